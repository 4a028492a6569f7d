"""Runs a function on several ranks of a real gloo process group: forked processes that the test may kill.

    def work(rank, count, path):                     # a closure will do: the ranks are forks of the test
        return fp.load(path, process_group=dist.group.WORLD)

    results = run_ranks(2, work, path)               # by rank; what a rank raises fails the test
    endings = rank_endings(2, work, path)            # by rank; what a rank raises, or is killed by, is in its ending

The group is the default group of each rank, on 127.0.0.1, met through a file: no port is taken. A rank that has
returned stays until all have, so that its connections do not break under the others; one that has raised is gone at
once. Whatever runs when the deadline has passed is killed, and the test fails.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pickle
import selectors
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

GROUP_TIMEOUT_S = 100.0
"""How long a collective waits for the others: less than the deadline, so that a hang shows as the rank's own error."""

NO_ENVIRONMENT: Mapping[str, str] = {}


@dataclass(frozen=True)
class RankEnding:
    """How a rank ended.

    Attributes:
        result: What the function returned; None if it did not return.
        error_type: The class of what it raised; None if it raised nothing.
        error_text: The `str` of what it raised.
        error_attributes: The attributes of that exception, as far as they can be sent (`rank`, `subject`, `path` …).
        trace: The traceback of that exception, as text.
        signal: The signal that killed the rank; 0 if none did.
        seconds: How long the function took.
        met: Whether the function was called: the rank had met the others.
    """

    result: Any = None
    error_type: type[BaseException] | None = None
    error_text: str = ""
    error_attributes: dict[str, Any] = field(default_factory=dict)
    trace: str = ""
    signal: int = 0
    seconds: float = 0.0
    met: bool = True


def run_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    **options: Any,
) -> list[Any]:
    """Return what function(rank, count, *arguments) returns on each rank; fail the test if one does not return.

    Args: as in `rank_endings`.
    """
    __tracebackhide__ = True
    endings = rank_endings(count, function, *arguments, **options)
    for ending in endings:
        if ending.error_type is pytest.skip.Exception:
            pytest.skip(ending.error_text)
    failed = [
        f"rank {rank}: " + (f"killed by {signal.Signals(ending.signal).name}" if ending.signal else ending.trace)
        for rank, ending in enumerate(endings)
        if ending.signal or ending.error_type is not None
    ]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
    return [ending.result for ending in endings]


def rank_endings(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 300.0,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    environment: Mapping[str, str] = NO_ENVIRONMENT,
) -> list[RankEnding]:
    """Return how function(rank, count, *arguments) ended on each rank; fail the test if the deadline passes.

    gloo sometimes cannot connect the ranks of a busy machine. Then all are killed and meet once more.

    Args:
        count: The number of ranks.
        function: What each of them runs, in a forked process, inside an initialized process group.
        arguments: Arguments for the function.
        timeout_s: The deadline for all of it.
        group_timeout_s: How long a collective waits for the other ranks.
        environment: Variables to set in the ranks.
    """
    __tracebackhide__ = True
    first = _try_ranks(count, function, arguments, timeout_s, group_timeout_s, environment)
    if all(ending.met for ending in first):
        return first
    return _try_ranks(count, function, arguments, timeout_s, group_timeout_s, environment)


def _try_ranks(
    count: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_s: float,
    group_timeout_s: float,
    environment: Mapping[str, str],
) -> list[RankEnding]:
    """Start the ranks, and return how they ended: at once if one could not meet the others."""
    __tracebackhide__ = True
    deadline_s = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="fastpersist-ranks-") as directory:
        ranks: list[_Rank] = []
        stay_fd, let_go_fd = os.pipe()
        try:
            for rank in range(count):
                meeting = _Meeting(rank, count, f"file://{directory}/store", group_timeout_s)
                ranks.append(_Rank(meeting, stay_fd, let_go_fd, function, arguments, environment))
            late = _hear(ranks, deadline_s)
        finally:
            os.close(let_go_fd)
            os.close(stay_fd)
            met = all(each.ending.met for each in ranks)
            for each in ranks:
                each.end(deadline_s if met else 0.0)
    if late and met:
        said = [f"rank {rank}: {each.ending.trace}" for rank, each in enumerate(ranks) if each.ending.trace]
        pytest.fail("\n".join([f"ranks {late} still ran after {timeout_s:g} s", *said]), pytrace=False)
    return [each.ending for each in ranks]


@dataclass(frozen=True)
class _Meeting:
    """What a rank needs to find the others."""

    rank: int
    count: int
    init_method: str
    group_timeout_s: float

    def __enter__(self) -> None:
        import torch.distributed as dist

        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank))
        os.environ.update(WORLD_SIZE=str(self.count), LOCAL_WORLD_SIZE=str(self.count))
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=self.init_method,
            rank=self.rank,
            world_size=self.count,
            timeout=datetime.timedelta(seconds=max(self.group_timeout_s, GROUP_TIMEOUT_S)),
        )
        # Not before they have met, which takes a busy machine seconds. The first is a name of torch 2.15.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(datetime.timedelta(seconds=self.group_timeout_s), dist.group.WORLD)

    def __exit__(self, *exception: object) -> None:
        """Leave the group as it is: the process ends without Python's or C++'s destructors."""


class _Rank:
    """A forked process that is one rank, and what is known of its end."""

    def __init__(
        self,
        meeting: _Meeting,
        stay_fd: int,
        let_go_fd: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
    ) -> None:
        self.ending = RankEnding()
        self._said = b""
        self.verdict_fd, verdict_fd = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.verdict_fd)
            os.close(let_go_fd)
            _be_a_rank(meeting, verdict_fd, stay_fd, function, arguments, environment)
        os.close(verdict_fd)

    def hear(self) -> bool:
        """Read what the rank says; return whether that was all."""
        part = os.read(self.verdict_fd, 1 << 20)
        self._said += part
        if not part and self._said:
            self.ending = pickle.loads(self._said)
        return not part

    def end(self, deadline_s: float) -> None:
        """Wait until the process has ended; kill it when it has not by the deadline."""
        os.close(self.verdict_fd)
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline_s:
                os.kill(self._pid, signal.SIGKILL)
                _, status = os.waitpid(self._pid, 0)
                break
            time.sleep(0.005)
        if os.WIFSIGNALED(status) and not self._said:
            self.ending = RankEnding(signal=os.WTERMSIG(status))


def _hear(ranks: list[_Rank], deadline_s: float) -> list[int]:
    """Read what ranks say until all have ended, one could not meet the others, or the deadline; return who had not."""
    with selectors.DefaultSelector() as selector:
        for rank, each in enumerate(ranks):
            selector.register(each.verdict_fd, selectors.EVENT_READ, rank)
        while selector.get_map() and time.monotonic() < deadline_s and all(each.ending.met for each in ranks):
            for key, _ in selector.select(max(0.0, deadline_s - time.monotonic())):
                if ranks[key.data].hear():
                    selector.unregister(key.fd)
        return sorted(key.data for key in selector.get_map().values())


def _be_a_rank(
    meeting: _Meeting,
    verdict_fd: int,
    stay_fd: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
) -> None:
    """Run the function in the forked process, say how it ended, and end. Never returns."""
    said = pickle.dumps(RankEnding(error_type=RuntimeError, trace="it ended without a verdict"))
    returned = False
    try:
        gc.freeze()  # what the parent had is not ours to collect
        torch.set_num_threads(1)  # torch's threads are the parent's; waiting for them would be for ever
        os.environ.update(environment)
        with meeting:
            started_s = time.monotonic()
            try:
                result = function(meeting.rank, meeting.count, *arguments)
                said = pickle.dumps(RankEnding(result=result, seconds=time.monotonic() - started_s))
                returned = True
            except BaseException as error:  # noqa: BLE001 - whatever it was, the parent reports it
                said = pickle.dumps(_ending_by(error, time.monotonic() - started_s))
    except BaseException as error:  # noqa: BLE001 - the group could not be made
        said = pickle.dumps(replace(_ending_by(error, 0.0), met=False))
    finally:
        try:
            with os.fdopen(verdict_fd, "wb") as file:
                file.write(said)
            if returned:
                os.read(stay_fd, 1)  # ends when the parent closes the other end, or is gone
        finally:
            os._exit(0)


def _ending_by(error: BaseException, seconds: float) -> RankEnding:
    attributes = {}
    for name in ("errno", "filename", *getattr(error, "__dict__", ())):
        with contextlib.suppress(Exception):
            value = getattr(error, name)
            pickle.dumps(value)
            attributes[name] = value
    kind: type[BaseException] = type(error)
    try:
        pickle.dumps(kind)
    except Exception:  # noqa: BLE001 - a class of the test function's own
        kind = RuntimeError
    return RankEnding(
        error_type=kind,
        error_text=str(error),
        error_attributes=attributes,
        trace="".join(traceback.format_exception(error)),
        seconds=seconds,
    )
