"""What many ranks cost the coordinator: up to 4,096 followers, simulated on one machine, with a real rank 0.

    python benchmarks/ranks/simulated_ranks.py commit --ranks 512 4096  # agreement and commit: time; descriptors
    python benchmarks/ranks/simulated_ranks.py commit --ranks 512 --savers 3  # three Checkpointers of a group
    python benchmarks/ranks/simulated_ranks.py plan --ranks 512 --tensors 100000 --shards 8  # time, memory

`commit`: the followers are one process. Each has a real connection over loopback and the real session on it; they take
turns, so most of the wall time is that process's. `plan`: rank 0 plans a sharded save twice, writes `.metadata` into
memory, and saves again by the kept plan. The ranks are `--shards` groups of replicas (HSDP): each tensor is cut into so
many chunks, and each chunk is held by ranks / shards ranks. One follower of each group is real, in another process; the
others say what it says. Each run is a process of its own, and its memory is the most that this process had.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fastpersist.dcp.global_plan.assignment import Share, WholePlan
from fastpersist.dcp.metadata import METADATA_NAME, pickled
from fastpersist.dcp.plan_agreement import Done, Planned, SharedPlans, Whole, gather_done, tell_done
from fastpersist.dcp.save_state import ShardedFiles
from fastpersist.distributed.commit_agreement import gather_own_files, tell_own_files
from fastpersist.distributed.connections.io_thread import Connections
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.messages import encoded
from fastpersist.formats.manifest import FileEntry
from fastpersist.saving.directory_files import WriteSite
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import SaveStats

_TIMEOUT_S = 300.0
_TOKEN = bytes(range(32))
_SAVE_COUNT = 5
_PLAN_BYTES_MIN = 2000  # of tens of tensors; other messages are shorter


def main() -> int:
    """Measure what the command line asks for, each number of ranks in a process of its own."""
    parser = argparse.ArgumentParser(description="What many simulated ranks cost the coordinator.")
    parser.add_argument("part", choices=["commit", "plan"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[512])
    parser.add_argument("--tensors", type=int, default=1000, help="tensors of the state")
    parser.add_argument("--shards", type=int, default=8, help="chunks of each tensor")
    parser.add_argument("--savers", type=int, default=1, help="that have met; one of them saves")
    parser.add_argument("--soft-limit", type=int, default=0, metavar="N", help="of open files; 0: as it is")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each number of ranks")
    options = parser.parse_args()
    if options.part == "plan" and options.shards >= min(options.ranks):
        parser.error("--shards is less than --ranks: one process stands for all ranks that hold the same chunk")
    for count in options.ranks:
        is_commit = options.part == "commit"
        work, arguments = (_commit, (options.savers,)) if is_commit else (_plan, (options.tensors, options.shards))
        found = _in_process(work, options.soft_limit, count, *arguments)
        print(json.dumps(found) if options.json else "  ".join(f"{name} {value}" for name, value in found.items()))
    return 0


def _in_process(work: Callable[..., dict[str, Any]], soft_limit: int, *arguments: Any) -> dict[str, Any]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, work, soft_limit, arguments))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        raise SystemExit(f"rank 0 has ended with {process.exitcode}") from None
    process.join()
    return found


def _run(pipe: Connection, work: Callable[..., dict[str, Any]], soft_limit: int, arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    if soft_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    pipe.send(work(*arguments))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


# --- agreement and commit, over real connections


def _commit(count: int, saver_count: int) -> dict[str, Any]:
    before_count = _descriptor_count()
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(daemon=True, target=_followers, args=(theirs, count, saver_count))
    process.start()
    theirs.close()
    started_s = time.monotonic()
    savers = [_met(process, ours, count) for _ in range(saver_count)]
    ranks = savers[0]
    met_s = time.monotonic() - started_s
    ours.recv()
    commits, processor, messages = [], [], 0
    nothing = Planned("", [], 0, Whole(WholePlan([], [Share() for _ in range(count)], {})))
    for _ in range(_SAVE_COUNT):
        session = ranks.begin("step 1")
        ours.send("save")
        cpu_s = time.process_time()  # with the I/O thread
        session.gather(b"{}")  # hello
        session.answer(encoded({"directory": "/root/.step-00000001.pending-0123456789abcdef", "holds": True}))
        gather_done(session, Done(None, b"", []), nothing)
        files = list(gather_own_files(session))
        session.settle()
        session.answer(b"{}")
        session.finish()
        processor.append(time.process_time() - cpu_s)
        last_done_s, all_ended_s = ours.recv()
        commits.append(all_ended_s - last_done_s)
        messages = session.message_count
        if files:
            raise SystemExit("own files that were not written")
    ours.send("end")
    held_count = _descriptor_count() - before_count
    process.join()
    for one in savers:
        one.close()
    return {
        "ranks": count,
        "savers": saver_count,
        "meeting_s": round(met_s, 3),
        "last_own_to_all_end_ms": _spread(commits),
        "rank0_processor_ms": _spread(processor),
        "messages": messages,
        "descriptors": held_count,
        "peak_MB": _peak_bytes() // 10**6,
    }


def _met(process: BaseProcess, pipe: Connection, count: int) -> Ranks:
    ranks = Ranks(0, count, (0,) * count, _TIMEOUT_S)
    ranks.connections.token = _TOKEN
    ranks.connections.listen(["127.0.0.1"])
    pipe.send(ranks.connections.addresses)
    while not ranks.connections.wait_until(lambda: len(ranks.connections.ranks()) == count - 1, 0.4):
        if not process.is_alive():
            raise SystemExit("the followers have ended")
    return ranks


def _spread(times_s: Sequence[float]) -> str:
    middle = sorted(times_s)[len(times_s) // 2]
    return f"{middle * 1e3:.1f} ({min(times_s) * 1e3:.1f} – {max(times_s) * 1e3:.1f})"


def _serve_on_this_thread() -> None:
    """Let connections have no thread: those of thousands of ranks in one process would hold each other up."""

    def start(self: Connections) -> None:
        if self._selector is None:
            self._selector, self._wake_fd = selectors.PollSelector(), os.eventfd(0)
            self._selector.register(self._wake_fd, selectors.EVENT_READ)

    def wait_until(self: Connections, over: Callable[[], bool], limit_s: float) -> bool:
        end_s = time.monotonic() + limit_s
        with self.lock:
            while not over() and self._selector is not None and (left_s := end_s - time.monotonic()) > 0:
                self._serve(self._selector.select(left_s))
            return over()

    Connections._start, Connections.wait_until = start, wait_until  # type: ignore[method-assign]


def _followers(pipe: Connection, count: int, saver_count: int) -> None:
    hard_count = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_count, hard_count))
    _serve_on_this_thread()
    every, addresses = [], []
    for number in range(saver_count * (count - 1)):
        rank = 1 + number % (count - 1)
        addresses = pipe.recv() if rank == 1 else addresses
        follower = Ranks(rank, count, (0,) * count, _TIMEOUT_S)
        follower.connections.token, follower.connections.addresses = _TOKEN, addresses
        follower.connections.connect(_TIMEOUT_S)
        if not follower.connections.wait_welcome(_TIMEOUT_S):
            raise SystemExit(f"rank {rank} was not welcomed")
        every.append(follower)
    followers = every[: count - 1]  # of the saver that saves
    pipe.send("met")
    nothing = Planned("", [], 0, None)
    while pipe.recv() == "save":
        sessions = [one.begin("step 1") for one in followers]
        for session in sessions:
            session.tell(encoded({"label": "step 1", "version": "0123456789abcdef", "sums": {}}))
        for session in sessions:
            session.hear()
        for session in sessions:
            tell_done(session, Done(None, b"", []), nothing)
        for session in sessions:
            tell_own_files(session, [])
        last_s = time.monotonic()
        for session in sessions:
            session.hear()
            session.finish()
        pipe.send((last_s, time.monotonic()))
    for one in every:
        one.close()


# --- plans and metadata


class _Plans(SharedPlans):
    """Plans of a rank whose items are made up."""

    def __init__(self, items: list[WriteItem], paths: dict[str, Any]) -> None:
        super().__init__()
        self._made_up = items
        self.planner.mappings = paths

    def _plan_locally(self, state: Any, *, is_first: bool) -> None:
        if not self._local:
            self._local = self._made_up


def _held(shard: int, shards: int, tensors: int) -> tuple[list[WriteItem], dict[str, Any]]:
    items, paths = [], {}
    properties = TensorProperties(dtype=torch.float32)
    for number in range(tensors):
        name = f"model.layers.{number // 8}.block.{number % 8}.weight"
        size = torch.Size((128 * shards, 64))
        offsets = torch.Size((128 * shard, 0))
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((128, 64)))
        data = TensorWriteData(chunk=chunk, properties=properties, size=size)
        items.append(WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data))
        paths[name] = ("model", *name.split(".")[1:])
    return items, paths


def _sums(shard: int, items: Sequence[WriteItem]) -> dict[str, int]:
    return {item.index.fqn: hash((shard, number)) & 0xFFFFFFFF for number, item in enumerate(items)}


class _Session:
    """Rank 0's end: what one follower of each group says, all of the group say."""

    rank = 0

    def __init__(self, pipes: Sequence[Connection], count: int) -> None:
        self.count = count
        self._pipes = pipes
        self.message_bytes = 0

    def gather(self, own: bytes) -> list[bytes]:
        nothing_held = zlib.compress(pickled((b"", b"", [], {})))
        told = [pipe.recv_bytes() for pipe in self._pipes]
        # Only the first follower of a group is asked for what the group holds.
        others = [nothing_held if len(one) > _PLAN_BYTES_MIN else one for one in told]
        found = [own]
        for rank in range(1, self.count):
            message = (told if rank <= len(told) else others)[rank % len(told)]
            found.append(bytes(bytearray(message)))
        self.message_bytes += sum(map(len, found))
        return found

    def answer(self, message: bytes) -> None:
        self.answer_each([message] * self.count)

    def answer_each(self, messages: Sequence[bytes]) -> None:
        self.message_bytes += sum(map(len, messages[1:]))
        for number, pipe in enumerate(self._pipes):
            pipe.send_bytes(messages[number or len(self._pipes)])

    def check(self) -> None:
        pass


class _FollowerSession:
    def __init__(self, rank: int, count: int, pipe: Connection) -> None:
        self.rank, self.count = rank, count
        self._pipe = pipe

    def tell(self, message: bytes) -> None:
        self._pipe.send_bytes(message)

    def hear(self) -> bytes:
        return self._pipe.recv_bytes()

    def check(self) -> None:
        pass


def _plan(count: int, tensors: int, shards: int) -> dict[str, Any]:
    context = get_context("spawn")
    pairs = [context.Pipe() for _ in range(shards)]
    process = context.Process(daemon=True, target=_groups, args=([theirs for _, theirs in pairs], count, tensors))
    process.start()
    pipes = [ours for ours, _ in pairs]
    for _, theirs in pairs:
        theirs.close()
    items, paths = _held(0, shards, tensors)
    plans = _Plans(items, paths)
    base_bytes = _peak_bytes()
    found: dict[str, Any] = {"ranks": count, "tensors": tensors, "chunks": tensors * shards}
    sums = _sums(0, items)
    for save in range(3):
        session: Any = _Session(pipes, count)
        small: dict[str, int] = {}
        for pipe in pipes:
            pipe.recv_bytes()  # this group is ready
        started_s, cpu_s = time.monotonic(), time.thread_time()
        planned = plans.agree({}, session, "step", "/root/pending", lambda: sums)
        plan_s, plan_cpu_s = time.monotonic() - started_s, time.thread_time() - cpu_s
        metadata_s = _complete(plans, planned, count, small)
        found[f"save{save}_plan_s"] = f"{plan_s:.3f} (processor {plan_cpu_s:.3f})"
        found[f"save{save}_metadata_s"] = f"{metadata_s:.3f}"
        found[f"save{save}_messages_MB"] = f"{(session.message_bytes + small['messages']) / 1e6:.3f}"
        found["metadata_MB"] = f"{small[METADATA_NAME] / 1e6:.1f}"
        found[f"save{save}_peak_MB"] = (_peak_bytes() - base_bytes) // 10**6
    process.join()
    return found


def _complete(plans: SharedPlans, planned: Any, count: int, small: dict[str, int]) -> float:
    """Hear what all ranks have written, and write the metadata; return the processor's time of that."""

    def write_small(name: str, data: bytes) -> FileEntry:
        small[name] = len(data)
        return FileEntry(name, len(data), 0)

    shares = planned.whole.plan.shares
    written = [Done.of((f"__{rank}_0.distcp", 1 << 30, 0), *_places(share)) for rank, share in enumerate(shares)]
    told: Any = _Told(count)
    for rank, done in enumerate(written[1:], 1):
        known = {} if planned.kept == "" else {planned.kept: planned.whole.metadata.places[rank]}
        tell_done(told, done, replace(planned, told=known))
    started_s = time.thread_time()
    site = WriteSite(
        "/root/pending", "/root/step", None, "step", "auto", lambda _: None, lambda _: None, write_small, SaveStats("")
    )
    files = ShardedFiles({}, Owners(None, (), "manual"), plans)
    files._complete(planned, gather_done(told, written[0], planned), site)
    small["messages"] = sum(map(len, told.messages))
    return time.thread_time() - started_s


def _places(share: Share) -> tuple[list[tuple[int, int]], int]:
    return [(number * 40960, 33000) for number in range(len(share))], len(share.items)


class _Told:
    """What all followers have told."""

    rank = 0

    def __init__(self, count: int) -> None:
        self.count = count
        self.messages: list[bytes] = []

    def tell(self, message: bytes) -> None:
        self.messages.append(message)

    def gather(self, own: bytes) -> list[bytes]:
        return [own, *self.messages]


def _groups(pipes: Sequence[Connection], count: int, tensors: int) -> None:
    threads = []
    for number, pipe in enumerate(pipes):
        threads.append(threading.Thread(target=_group, args=(number, len(pipes), pipe, count, tensors)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _group(shard: int, shards: int, pipe: Connection, count: int, tensors: int) -> None:
    items, paths = _held(shard, shards, tensors)
    plans = _Plans(items, paths)
    sums = _sums(shard, items)
    with suppress(EOFError):
        for _ in range(3):
            session: Any = _FollowerSession(shard or shards, count, pipe)
            pipe.send_bytes(b"ready")
            plans.agree({}, session, "step", None, lambda: sums)


if __name__ == "__main__":
    sys.exit(main())
