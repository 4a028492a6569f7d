"""The rows of `bench stream`: what bounds a token pass (fio, a bare read, the model in memory), ours, and others.

A way runs in a process of its own, which lives as long as the command and builds the model anew in each round.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fastpersist import PendingIO, TensorFile
from fastpersist.cli.bench.fio import fio_read_row
from fastpersist.cli.bench.rows import Kind, Row, Sample
from fastpersist.cli.bench.stream.memory_limit import MemoryLimit
from fastpersist.cli.bench.stream.model import ModelFiles
from fastpersist.cli.bench.stream.ways import OURS, RESIDENT
from fastpersist.cli.child_process import ChildProcess

__all__ = ["BARE_READ", "Case", "PassSample", "WayProcess", "bandwidth_rows", "way_rows"]

BARE_READ = "bare read by TensorFile"
_SUFFIXES = {"accelerate disk_offload": ".dat", "torch.load(mmap=True), assign": ".pt"}  # all others: .safetensors
_MIB = 1 << 20
_PIECE_BYTES = 32 * _MIB
_PIECE_COUNT = 8


@dataclass(frozen=True, slots=True)
class Case:
    """What is generated, with how much memory.

    Attributes:
        batch_size: The number of sequences that are generated at once.
        prompt_len: Tokens of each prompt.
        gen_len: Tokens to generate.
        budgets: Values of `budget_bytes` of fp.stream; a row for each.
        memory_bytes: How much the weights of a way may take, in memory and in the page cache; None for no limit.
        device: The device on which the model computes, as torch takes it.
    """

    batch_size: int
    prompt_len: int
    gen_len: int
    budgets: tuple[int, ...]
    memory_bytes: int | None
    device: str = "cpu"

    @property
    def activation_bytes(self) -> int:
        """What a way may take beside weights: some for each token of the prompts, and room for a copy of the head.

        torch.nn.functional.linear copies its weight for an input that is a slice, such as the last token of a prompt.
        """
        return 512 * _MIB + (self.batch_size * self.prompt_len << 17)


@dataclass(frozen=True, slots=True)
class PassSample(Sample):
    """One generation. `seconds` is the median token pass, `size_bytes` what a pass reads from the disk.

    Attributes:
        answer: The answer of the worker.
        group_peak_bytes: The most memory that the cgroup has used so far; None without a cgroup.
    """

    answer: dict[str, Any] = field(default_factory=dict)
    group_peak_bytes: int | None = None


class WayProcess:
    """The process of a way, inside its cgroup. It starts with the first generation. One owner thread.

    Args:
        way: A key of BUILDERS.
        case: What is generated.
        files: The model.
        root: A directory for what the way wants to write.
        budget_bytes: The `budget_bytes` of fp.stream; 0 for other ways.

    Attributes:
        name: The name of the row.
        program: What the process runs.
    """

    program = "from fastpersist.cli.bench.stream.worker import main; main()"

    def __init__(self, way: str, case: Case, files: ModelFiles, root: str, budget_bytes: int = 0) -> None:
        self.name = f"{way}, {budget_bytes / 1e9:.3g} GB" if budget_bytes else way
        self.way = way
        self._case, self._files, self._root, self._budget_bytes = case, files, root, budget_bytes
        self._closing = contextlib.ExitStack()
        self._process: ChildProcess | None = None
        self._limit: MemoryLimit | None = None

    def run(self, _path: str) -> PassSample:
        """Build the model and generate.

        Raises:
            UnsupportedError: The way could not do it, or has died; the message says why.
        """
        process = self._process or self._start()
        case, files = self._case, self._files
        process.send(
            {
                "way": self.way,
                "directory": files.directory,
                "torch_paths": files.torch_paths,
                "offload_directory": files.offload_directory,
                "root": self._root,
                "batch_size": case.batch_size,
                "prompt_len": case.prompt_len,
                "gen_len": case.gen_len,
                "budget_bytes": self._budget_bytes,
                "device": case.device,
            }
        )
        answer = process.result()
        passes_s = sorted(answer["passes_s"])
        return PassSample(
            seconds=passes_s[len(passes_s) // 2],
            size_bytes=answer["stats"]["streamed_bytes"] if answer["stats"] else files.weight_bytes,
            engine=answer["stats"]["engine"] if answer["stats"] else "",
            answer=answer,
            group_peak_bytes=self._limit.peak_bytes() if self._limit else None,
        )

    def close(self) -> None:
        """End the process, then remove its group."""
        self._closing.close()
        self._process = self._limit = None

    def _start(self) -> ChildProcess:
        if self._case.memory_bytes is not None and self.way != RESIDENT:
            self._limit = self._closing.enter_context(MemoryLimit(f"fastpersist-bench-{os.getpid()}-{id(self)}"))
        self._process = self._closing.enter_context(ChildProcess(self.program, title=f"the process of {self.name}"))
        if self._limit is not None and self._case.memory_bytes is not None:
            self._limit.add(self._process.pid)
            taken_bytes = self._process.result()["anonymous_bytes"]
            self._limit.hold_down(taken_bytes + self._case.memory_bytes + self._case.activation_bytes)
        else:
            self._process.result()
        return self._process


def way_rows(processes: Iterable[WayProcess]) -> list[Row]:
    """Return a row for each process; the suffix tells which files it reads."""
    kinds: dict[str, Kind] = {OURS: "fastpersist", RESIDENT: "ceiling"}
    return [
        Row(one.name, kinds.get(one.way, "peer"), one.run, suffix=_SUFFIXES.get(one.way, ".safetensors"))
        for one in processes
    ]


def bandwidth_rows(files: ModelFiles) -> list[Row]:
    """Return the rows of what the disk gives: fio on one shard, and ourselves on all of them, into huge pages."""
    fio = fio_read_row(".safetensors")
    run_fio, paths = fio.run, files.paths(".safetensors")
    largest = max(paths, key=os.path.getsize)

    def run(_path: str) -> Sample:
        return _bare_read(paths)

    return [
        fio if run_fio is None else Row(fio.name, fio.kind, lambda _path: run_fio(largest), suffix=fio.suffix),
        Row(BARE_READ, "ceiling", run, suffix=".safetensors"),
    ]


def _bare_read(paths: list[str]) -> Sample:
    """Read files whole, piece by piece, into memory that is used again and again, as a ring is."""
    pages = mmap.mmap(-1, _PIECE_COUNT * _PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.fill_(1)
    free = deque(memory.split(_PIECE_BYTES))
    reading: deque[tuple[PendingIO, torch.Tensor]] = deque()
    size_bytes = 0
    with contextlib.ExitStack() as closing:
        started_s = time.perf_counter()
        for path in paths:
            file = closing.enter_context(TensorFile(path))
            # A rest of less than a block would be copied; the rate is per byte, so nothing is gained by leaving it out.
            end_bytes = file.size() // mmap.PAGESIZE * mmap.PAGESIZE
            for offset_bytes in range(0, end_bytes, _PIECE_BYTES):
                if not free:
                    pending, piece = reading.popleft()
                    pending.result()
                    free.append(piece)
                piece = free.popleft()
                part = piece[: min(_PIECE_BYTES, end_bytes - offset_bytes)]
                reading.append((file.read_list_async([(part, offset_bytes)]), piece))
                size_bytes += part.nbytes
        for pending, _ in reading:
            pending.result()
        engine = file.engine
        seconds = time.perf_counter() - started_s
    return Sample(seconds, size_bytes, engine)
