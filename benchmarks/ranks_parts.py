"""What the processes of ranks.py do: ranks that save together, fio, and hundreds of simulated ranks that only talk.

Ranks are forks of the benchmark; what they have in common with those of `fastpersist bench ranks` is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

import fastpersist as fp
from fastpersist.cli.bench.ranks import processes
from fastpersist.cli.bench.ranks.processes import Failed, Here, Span, hold_state, save_alone, save_together, whole_span
from fastpersist.distributed import coordination, shared_reader
from fastpersist.transfer.pipeline import Pieces, Writer

__all__ = [
    "Failed",
    "FioMissing",
    "Here",
    "RankProcesses",
    "Span",
    "copy_memory",
    "fill_file",
    "fio_write",
    "hold_state",
    "load_together",
    "pump_nowhere",
    "save_alone",
    "save_and_count",
    "save_and_listen",
    "save_tiny",
    "save_together",
    "simulate",
    "stay_on_cores",
    "whole_span",
]

_MIB = 1 << 20
_CHUNK_BYTES = 8 * _MIB
_CORES = sorted(os.sched_getaffinity(0))
_FORKING = multiprocessing.get_context("fork")


class FioMissing(Exception):
    """There is no fio, or it cannot do this here."""


# --- ranks in processes of their own ---


class RankProcesses(processes.RankProcesses):
    """Ranks that are forks of the benchmark: torch is imported once, not once in each process."""

    def __init__(self, counts: Sequence[int], scratch: str, timeout_s: float) -> None:
        super().__init__(counts, scratch, timeout_s, _fork)


def _fork(others: Sequence[Connection]) -> processes.StartedRank:
    ours, theirs = _FORKING.Pipe()
    process = _FORKING.Process(target=_be_a_rank, args=(theirs, [*others, ours]), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe

    def end(patience_s: float) -> None:
        process.join(patience_s)
        process.kill()
        process.join()

    return ours, end


def _be_a_rank(connection: Connection, inherited: Sequence[Connection]) -> None:
    for other_end in inherited:
        other_end.close()  # so that the end of the benchmark is the end of the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which ends the ranks
    processes.serve(connection)


def _shard_of(here: Here, count: int) -> list[tuple[int, torch.Tensor]]:
    """Return this rank's n-th of the state's tensors, and where each would lie in a file of them all."""
    placed, offset_bytes = [], 0
    for tensor in here.state["weights"].values():
        placed.append((offset_bytes, tensor))
        offset_bytes += tensor.nbytes
    return placed[len(placed) * here.rank // count : len(placed) * (here.rank + 1) // count]


# --- what ranks do ---


def stay_on_cores(here: Here, one_each: bool) -> None:
    """Keep this rank, its threads included, on a core of its own as far as there are enough; or let it go again."""
    cores = [_CORES[here.rank % len(_CORES)]] if one_each else _CORES
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def fill_file(here: Here, path: str, count: int, one_each: bool) -> Span:
    """Write this rank's n-th of the state by bare pwrite into a fresh, preallocated file, or into one of its own."""
    shard = _shard_of(here, count)
    here.together(count)
    start_s = time.monotonic()
    if one_each:
        first_bytes = shard[0][0] if shard else 0
        path += f".{here.rank}"
        _preallocate(path, sum(tensor.nbytes for _, tensor in shard))
    else:
        first_bytes = 0
        if here.rank == 0:
            _preallocate(path, sum(tensor.nbytes for tensor in here.state["weights"].values()))
        here.together(count)
    fd = os.open(path, os.O_WRONLY)
    try:
        for offset_bytes, tensor in shard:
            view = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            for low in range(0, tensor.nbytes, _CHUNK_BYTES):
                os.pwrite(fd, view[low : low + _CHUNK_BYTES], offset_bytes - first_bytes + low)
    finally:
        os.close(fd)
    return start_s, time.monotonic()


def _preallocate(path: str, size_bytes: int) -> None:
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))


def copy_memory(here: Here, count: int, repeat_count: int) -> list[Span]:
    """Copy this rank's n-th to memory that was touched before, several times."""
    shard = _shard_of(here, count)
    target = mmap.mmap(-1, max(mmap.PAGESIZE, sum(tensor.nbytes for _, tensor in shard)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    spans = []
    for _ in range(repeat_count + 1):
        here.together(count)
        start_s, position = time.monotonic(), address
        for _, tensor in shard:
            ctypes.memmove(position, tensor.data_ptr(), tensor.nbytes)
            position += tensor.nbytes
        spans.append((start_s, time.monotonic()))
    return spans[1:]


def pump_nowhere(here: Here, path: str, count: int) -> Span:
    """Send this rank's n-th through the writer and its null engine: what is left of a save without the kernel."""
    pieces = Pieces()
    for index, (_, tensor) in enumerate(_shard_of(here, count)):
        pieces.add_storage(tensor.untyped_storage(), index)
    path += f".{here.rank}"
    with open(path, "w+b") as file, Writer(file.fileno(), path, engine="null") as writer:
        here.together(count)
        start_s = time.monotonic()
        writer.append(pieces)
        writer.finish()
        return start_s, time.monotonic()


def load_together(here: Here, path: str, count: int, way: str) -> Span:
    """Load a file with the first ranks in one of the ways of SharedReader; return when."""
    shared = shared_reader.SharedReader
    replaced: Any = shared_reader
    replaced.SharedReader = functools.partial(shared, way=way)
    try:
        here.together(count)
        start_s = time.monotonic()
        loaded = fp.load(path, process_group=here.groups[count])
        end_s = time.monotonic()
        here.together(count)  # nobody frees what was loaded while another one is still loading
        del loaded
    finally:
        replaced.SharedReader = shared
    return start_s, end_s


def save_and_count(here: Here, root: str, count: int) -> tuple[list[int], int]:
    """Save by a Checkpointer; return the bytes of each rank as the first one says, and what this one says itself."""
    with fp.Checkpointer(root, constant=here.state["weights"], process_group=here.groups[count]) as checkpoints:
        checkpoints.save(1, here.state).result()
        stats = checkpoints.stats()[-1]
    return stats.bytes_by_rank, stats.bytes


def save_tiny(here: Here, root: str, count: int, save_count: int) -> list[tuple[float, float, float]]:
    """Save a state of 4 KiB again and again; return when each began, let training go on, and was published."""
    state = {"step": 0, "weight": torch.zeros(1024)}
    times = []
    group = here.groups[count] if count > 1 else None
    with fp.Checkpointer(root, keep=2, process_group=group) as checkpoints:
        for step in range(2 + save_count):
            here.together(count)
            start_s = time.monotonic()
            pending = checkpoints.save(step, state)
            returned_s = time.monotonic()
            pending.result()
            times.append((start_s, returned_s, time.monotonic()))
    return times[2:]


def save_and_listen(here: Here, root: str, count: int, tensor_count: int) -> tuple[list[str], int, int]:
    """Save many tensors, all cut; return what this rank said, and its messages and their bytes, headers included."""
    # Sizes repeat as those of a transformer's layers do. Zeros that nobody has written take no memory.
    weights = {
        f"layers.{index // 12}.{index % 12}": torch.zeros((_MIB + 4096 * (index % 12) * 3) // 4 + 64 * (index % 5))
        for index in range(tensor_count)
    }
    sessions: list[coordination.Session] = []
    said: list[bytes] = []
    begin, tell, answer = coordination.Ranks.begin, coordination.Session.tell, coordination.Session.answer

    def begin_noted(self: coordination.Ranks, *arguments: Any, **options: Any) -> coordination.Session:
        sessions.append(begin(self, *arguments, **options))
        return sessions[-1]

    def tell_noted(self: coordination.Session, message: bytes) -> None:
        said.append(message)
        tell(self, message)

    def answer_noted(self: coordination.Session, message: bytes) -> None:
        said.append(message)
        answer(self, message)

    changed: Any = coordination.Ranks
    talking: Any = coordination.Session
    changed.begin, talking.tell, talking.answer = begin_noted, tell_noted, answer_noted
    try:
        with fp.Checkpointer(root, constant=weights, process_group=here.groups[count]) as checkpoints:
            checkpoints.save(1, {"weights": weights}, rank_state={"rank": here.rank}).result()
            sessions.clear()  # in the first one, rank 0 asks who sees its files; that is asked once
            said.clear()
            checkpoints.save(2, {"weights": weights}, rank_state={"rank": here.rank}).result()
    finally:
        changed.begin, talking.tell, talking.answer = begin, tell, answer
    return [message.decode("latin-1") for message in said], sessions[0].message_count, sessions[0].message_bytes


# --- fio ---


def fio_write(path: str, size_bytes: int, job_count: int) -> tuple[float, int, str]:
    """Write a fresh, preallocated file with as many jobs, a range each; return seconds, bytes and engine.

    The seconds are those of the job that took longest, from its first request to the end of its fsync; starting fio and
    filling its buffers is not in them.

    Raises:
        FioMissing: There is no fio, or it cannot.
    """
    if shutil.which("fio") is None:
        raise FioMissing("fio is not installed: apt install fio (or dnf, or pacman -S)")
    part_bytes = -(-size_bytes // job_count // _CHUNK_BYTES) * _CHUNK_BYTES
    reasons = []
    for engine in ("io_uring", "libaio"):
        _preallocate(path, part_bytes * job_count)
        escaped = path.replace(":", "\\:")
        command = [
            "fio", "--name=ceiling", f"--filename={escaped}", "--rw=write", f"--ioengine={engine}", "--direct=1",
            "--bs=8M", "--iodepth=8", f"--numjobs={job_count}", f"--size={part_bytes}",
            f"--offset_increment={part_bytes}", "--fallocate=none", "--end_fsync=1", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            # fio may put remarks in front of the report.
            jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
            moved_bytes = sum(job["write"]["io_bytes"] for job in jobs)
            if moved_bytes != part_bytes * job_count:
                raise FioMissing(f"fio moved {moved_bytes} bytes instead of {part_bytes * job_count}")
            return max(max(int(job["write"]["runtime"]), 1) for job in jobs) / 1000, moved_bytes, engine
        os.unlink(path)
        reasons.append(f"{engine}: {(done.stderr.strip() or done.stdout.strip() or 'no reason').splitlines()[0]}")
    raise FioMissing(f"fio cannot write here by direct I/O ({'; '.join(reasons)})")


# --- simulated ranks ---


def _exchange(count: int, offered: Callable[[Any], Any]) -> coordination.Exchange:
    """Return what `Ranks.of` takes for a collective: every rank is on this machine, and none has failed."""
    answers: Iterator[Callable[[Any], Any]] = iter((lambda own: own, offered, lambda own: None))

    def exchange(own: Any) -> list[Any]:
        return [next(answers)(own)] * count

    return exchange


def simulate(
    count: int, session_count: int, plan: bytes, go: bytes, done: bytes, end: bytes
) -> tuple[list[tuple[float, float]], float, float]:
    """Have rank 0, here, agree with count - 1 ranks that are in one other process and take turns there.

    Returns:
        For each session the seconds from the last plan told to the last go heard, and from the last done told to the
        last end heard; and per other rank, the messages that rank 0 sent and got, and their bytes.
    """
    ours, theirs = _FORKING.Pipe()
    helper = _FORKING.Process(target=_be_the_others, args=(theirs, ours, count, session_count, plan, done), daemon=True)
    helper.start()
    theirs.close()

    def offered(own: Any) -> Any:
        ours.send(own)
        return own

    seconds = []
    try:
        ranks = coordination.Ranks.of(0, count, _exchange(count, offered), timeout_s=60)
        for number in range(session_count):
            session = ranks.begin(f"step {number}")
            ours.send(None)
            session.gather(plan)
            session.answer(go)
            session.gather(done)
            session.answer(end)
            session.finish()
            seconds.append(ours.recv())
        ranks.close()
    except EOFError:
        raise Failed(f"the process of the {count - 1} simulated ranks has died") from None
    finally:
        ours.close()
        helper.join(5)
        helper.kill()
        helper.join()
    return seconds[2:], session.message_count / (count - 1), session.message_bytes / (count - 1)


def _be_the_others(
    connection: Connection, inherited: Connection, count: int, session_count: int, plan: bytes, done: bytes
) -> None:
    """Be all ranks but the first, one after the other."""
    inherited.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    offer = connection.recv()
    others = [
        coordination.Ranks.of(rank, count, _exchange(count, lambda _: offer), timeout_s=60) for rank in range(1, count)
    ]
    for number in range(session_count):
        sessions = [ranks.begin(f"step {number}") for ranks in others]
        connection.recv()
        for session in sessions:
            session.tell(plan)
        planned_s = time.monotonic()
        for session in sessions:
            session.hear()
        went_s = time.monotonic()
        for session in sessions:
            session.tell(done)
        done_s = time.monotonic()
        for session in sessions:
            session.hear()
            session.finish()
        connection.send((went_s - planned_s, time.monotonic() - done_s))
    for ranks in others:
        ranks.close()
