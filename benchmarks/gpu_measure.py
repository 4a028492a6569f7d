"""Shared by the parts of gpu.py: the device, the state, rows that take turns until time is up, and their memory.

It knows no ways to save or load. It writes every sample to a JSON file at once, so that a part that is killed or
crashes leaves its samples.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fastpersist.cli.bench.worker import forget_peak, resident_bytes

__all__ = [
    "Device",
    "Found",
    "MemoryWatch",
    "Row",
    "State",
    "check_equal",
    "make_state",
    "state_bytes",
    "take_turns",
]

State = dict[str, torch.Tensor]
_MIB = 1 << 20


class Device:
    """The device whose memory is saved; "cpu" rehearses all of it without one.

    Args:
        name: The name of the device, as torch takes it: "cuda", "cuda:1", "cpu".

    Raises:
        RuntimeError: torch cannot use it.
    """

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.is_cuda = self.torch.type == "cuda"
        if self.is_cuda and not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device here; --device cpu rehearses the script")
        if self.is_cuda and self.torch.index is None:
            self.torch = torch.device("cuda", 0)
        if self.is_cuda:
            torch.cuda.set_device(self.torch)

    @property
    def name(self) -> str:
        """Return the device as torch and safetensors take it."""
        return str(self.torch)

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def total_bytes(self) -> int:
        """Return the bytes of its memory."""
        if self.is_cuda:
            return int(torch.cuda.get_device_properties(self.torch).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def facts(self) -> dict[str, Any]:
        """Return the facts on the device and on torch."""
        facts: dict[str, Any] = {
            "device": self.name, "device_memory_bytes": self.total_bytes(), "torch": torch.__version__,
        }  # fmt: skip
        if self.is_cuda:
            properties = torch.cuda.get_device_properties(self.torch)
            facts["gpu"] = properties.name
            facts["multiprocessor_count"] = properties.multi_processor_count
            facts["cuda"] = torch.version.cuda
        return facts


def make_state(device: Device, size_bytes: int) -> State:
    """Return a state of about so many bytes on the device: large bf16 and fp32 tensors, and a hundred small ones."""
    generator = torch.Generator(device.torch).manual_seed(20260)
    state: State = {}

    def add(name: str, count: int, dtype: torch.dtype) -> None:
        state[name] = torch.randn(max(count, 1), device=device.torch, generator=generator).to(dtype)

    # A weight in bf16, and its two moments in fp32: 10 bytes a parameter.
    large_bytes = min(640 * _MIB, max(size_bytes // 4, 10))
    for layer in range(max(size_bytes // large_bytes, 1)):
        add(f"layers.{layer}.weight", large_bytes // 10, torch.bfloat16)
        add(f"layers.{layer}.exp_avg", large_bytes // 10, torch.float32)
        add(f"layers.{layer}.exp_avg_sq", large_bytes // 10, torch.float32)
    for norm in range(100):
        add(f"norms.{norm}", 1000 + norm, torch.float32)
    device.synchronize()
    return state


def state_bytes(state: State) -> int:
    """Return the bytes of all its tensors, which share no memory."""
    return sum(tensor.nbytes for tensor in state.values())


def check_equal(found: Any, wanted: State) -> None:
    """Compare bits, on the device where they are wanted.

    Raises:
        RuntimeError: Something differs; the message names the first.
    """
    if found.keys() != wanted.keys():
        raise RuntimeError(f"{len(found)} tensors were found instead of {len(wanted)}")
    for name, tensor in wanted.items():
        other = found[name].to(tensor.device)
        same_kind = other.dtype == tensor.dtype and other.shape == tensor.shape
        if not same_kind or not torch.equal(_bits(other), _bits(tensor)):
            raise RuntimeError(f"{name} is not what was saved")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# ------------------------------------------------------------------------------------------------ rows and turns


@dataclass(slots=True)
class Row:
    """Something to measure.

    Attributes:
        name: Unique in its part.
        kind: "yardstick", "ours" or "peer".
        run: Runs the row once; returns the seconds, or None to let the caller's clock measure.
        size_bytes: The bytes that one run moves.
        prepare: Called before each run, outside its time.
        check: Called after the first run: raises if what was written or read is not what was to be. None: the run
            moves nothing that could be checked.
        clean: Called after each run, outside its time.
        parts: Filled by `run`: seconds of each run, the first one included, by what they were spent on.
    """

    name: str
    kind: str
    run: Callable[[], float | None]
    size_bytes: int
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], object] | None = None
    clean: Callable[[], object] = lambda: None
    parts: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Found:
    """The findings of a part; `keep` writes them to the file.

    Attributes:
        rows: By row name: kind, size_bytes, seconds (one each round), first_s (of the run before the rounds), integrity
            ("equal", "not checked" or what is wrong), note (why it was given up).
        values: Whatever else there is to say, by name.
        notes: Facts that a reader has to know.
    """

    path: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def keep(self) -> None:
        """Write all of it, as it is now."""
        pending_path = f"{self.path}.new"
        with open(pending_path, "w") as file:
            json.dump({key: value for key, value in asdict(self).items() if key != "path"}, file)
        os.replace(pending_path, self.path)

    def row(self, name: str, kind: str, size_bytes: int) -> dict[str, Any]:
        """Add a row that has not been run, and return its record."""
        self.rows[name] = {
            "kind": kind, "size_bytes": size_bytes, "seconds": [], "first_s": None,
            "integrity": "not checked", "note": "",
        }  # fmt: skip
        return self.rows[name]

    def note(self, text: str) -> None:
        """Add a note, and print it."""
        self.notes.append(text)
        print(f"note: {text}", file=sys.stderr, flush=True)
        self.keep()


def take_turns(found: Found, device: Device, rows: Sequence[Row], rounds: int, deadline_s: float) -> None:
    """Run every row once, which is its warm-up and is checked; then all in turn, so often or until time is up.

    A row that fails is not run again, and its note says why; the others go on. There is at least one round.

    Args:
        found: The findings, which get the rows.
        device: The device, which is idle before each run.
        rows: The rows, in the order of the first run; every other round goes backwards.
        rounds: The most rounds.
        deadline_s: No round begins after this time.monotonic().
    """
    for row in rows:
        entry = found.row(row.name, row.kind, row.size_bytes)
        entry["parts"] = row.parts
        if row.check is None:
            entry["integrity"] = "moves no state"
    for row in rows:
        entry = found.rows[row.name]
        entry["first_s"] = _run_once(device, row, entry, is_first=True)
        found.keep()
    for number in range(rounds):
        round_start_s = time.monotonic()
        for row in rows if number % 2 else rows[::-1]:
            entry = found.rows[row.name]
            if not entry["note"] and (seconds := _run_once(device, row, entry, is_first=False)) is not None:
                entry["seconds"].append(seconds)
            found.keep()
        now_s = time.monotonic()
        if now_s + 0.8 * (now_s - round_start_s) > deadline_s and number + 1 < rounds:
            found.note(f"time for {number + 1} of {rounds} rounds")
            break


def _run_once(device: Device, row: Row, entry: dict[str, Any], *, is_first: bool) -> float | None:
    gc.collect()
    seconds: float | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peers, on how they are used
            row.prepare()
            device.synchronize()
            start_s = time.perf_counter()
            own_s = row.run()
            device.synchronize()
            seconds = time.perf_counter() - start_s if own_s is None else own_s
            if is_first and row.check is not None:
                entry["integrity"] = "not equal"
                row.check()
                entry["integrity"] = "equal"
    except Exception as error:  # noqa: BLE001 - whatever one way raises spoils its row, not the run
        entry["note"] = _said(error)
        if entry["integrity"] == "not equal":
            entry["integrity"] = _said(error)
        traceback.print_exc()
    finally:
        try:
            row.clean()
        except Exception as error:  # noqa: BLE001 - as above
            entry["note"] = entry["note"] or f"cleaning up: {_said(error)}"
    shown = "failed" if seconds is None else f"{seconds:.3f} s"
    print(f"… {row.name}: {shown}{' (first)' if is_first else ''}", file=sys.stderr, flush=True)
    return seconds


def _said(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# ------------------------------------------------------------------------------------------------ memory


class MemoryWatch:
    """Says how much host memory a piece of code has taken at most; a context manager.

    The peak of the resident set begins anew here, where the kernel allows that; pinned pages are resident. Memory that
    the CUDA driver has mapped for torch (torch's own pinned memory) is in `pinned_by_torch_bytes`, as the resident set
    may leave it out.
    """

    def __enter__(self) -> MemoryWatch:
        gc.collect()
        self.is_exact = forget_peak()
        self._before = resident_bytes("VmRSS")
        self._pinned_before = _pinned_by_torch_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = (resident_bytes("VmHWM") if self.is_exact else resident_bytes("VmRSS")) - self._before
        self.kept_bytes = resident_bytes("VmRSS") - self._before
        self.pinned_by_torch_bytes = _pinned_by_torch_bytes() - self._pinned_before

    def as_dict(self) -> dict[str, Any]:
        """Return it all, for JSON."""
        return {
            "peak_bytes": self.peak_bytes,
            "kept_bytes": self.kept_bytes,
            "pinned_by_torch_bytes": self.pinned_by_torch_bytes,
            "is_exact": self.is_exact,
        }


def _pinned_by_torch_bytes() -> int:
    """Return what torch's allocator of pinned memory holds; 0 where torch does not tell."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    found = stats()
    return int(found.get("allocated_bytes.current", found.get("allocated_bytes.all.current", 0)))
