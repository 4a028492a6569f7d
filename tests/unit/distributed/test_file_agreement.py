"""The messages about one file: what one end tells, the other one hears; and what is no such message is refused."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sessions import ThreadSession, run_threads

import fastpersist as fp
from fastpersist.distributed.file_agreement import (
    agree_on_plans,
    ask,
    follow_plans,
    gather_done,
    offsets_in,
    tell_done,
    tell_go,
)
from fastpersist.distributed.messages import encoded
from fastpersist.distributed.node_local.detection import StoreSeeker

OFFSETS = [4096, 1 << 33, (1 << 33) + 12288]


def converse(
    plans: list[dict[str, Any]], sums: list[list[int]] | None = None, questions: tuple[dict[str, Any], ...] = ()
) -> list[Any]:
    """Have ranks with these plans agree; return what the coordinator was answered, and each follower's *go*."""

    def work(session: ThreadSession) -> Any:
        own: Any = session

        def describe() -> dict[str, Any]:
            return {"mode": "samples", "sums": [] if sums is None else sums[session.rank]}

        if session.rank:
            return follow_plans(own, plans[session.rank], describe, lambda said: {"heard": said, "by": session.rank})
        agree_on_plans(own, plans[0], describe, lambda position: [f"tensor {position}"])
        answers = [ask(own, question) for question in questions]
        tell_go(own, "/a/file", OFFSETS, {"split": 1} if questions else {})
        return answers

    return run_threads(len(plans), work)


PLAN = {"name": "step-1/state.pt", "digest": "abc", "writers": 5}


def test_followers_hear_where_to_write() -> None:
    _, *followers = converse([PLAN] * 3)
    for go in followers:
        assert go["path"] == "/a/file"
        assert "split" not in go
        assert offsets_in(go) == OFFSETS


def test_what_is_asked_before_is_answered_by_all() -> None:
    answers, *followers = converse([PLAN] * 3, questions=({"look": "x"}, {"find": "y"}))
    assert answers == [
        [{}, {"heard": {"look": "x"}, "by": 1}, {"heard": {"look": "x"}, "by": 2}],
        [{}, {"heard": {"find": "y"}, "by": 1}, {"heard": {"find": "y"}, "by": 2}],
    ]
    assert all(go["split"] == 1 for go in followers)


def test_ranks_that_save_another_file_are_named() -> None:
    coordinator, *followers = converse([PLAN, PLAN, {**PLAN, "name": "step-2/state.pt"}])
    assert isinstance(coordinator, fp.CoordinationError)
    assert "rank 0 is at step-1/state.pt, rank 2 at step-2/state.pt" in str(coordinator)
    assert all(isinstance(one, fp.PeerError) for one in followers)


def test_ranks_with_other_writers_are_named() -> None:
    coordinator, *followers = converse([PLAN, PLAN, {**PLAN, "writers": 6}])
    assert isinstance(coordinator, fp.ConfigError)
    assert "ranks 0 and 2 were given different writers=" in str(coordinator)
    assert all(isinstance(one, fp.PeerError) for one in followers)


def test_tensors_that_differ_are_named() -> None:
    coordinator, _, follower = converse([PLAN, PLAN, {**PLAN, "digest": "abd"}], [[1, 2], [1, 2], [1, 3]])
    assert isinstance(coordinator, fp.CoordinationError)
    assert "tensor 1 on rank 2" in str(coordinator)
    assert isinstance(follower, fp.PeerError)


def done(crcs: list[list[int]], counts: list[int]) -> Any:
    def work(session: ThreadSession) -> Any:
        own: Any = session
        return tell_done(own, crcs[session.rank]) if session.rank else gather_done(own, counts)

    return run_threads(len(crcs), work)[0]


@given(st.lists(st.lists(st.integers(0, (1 << 32) - 1), max_size=5), max_size=3))
def test_crcs_arrive_as_they_were_told(crcs: list[list[int]]) -> None:
    assert done([[], *crcs], [0, *map(len, crcs)]) == [[], *crcs]


def test_rank_that_has_written_something_else_is_named() -> None:
    error = done([[], [7, 8], [9]], [0, 2, 2])
    assert isinstance(error, fp.CoordinationError)
    assert "rank 2" in str(error)


def test_bytes_that_are_no_crcs_are_refused() -> None:
    def work(session: ThreadSession) -> Any:
        own: Any = session
        return session.tell(b"\0" * 7) if session.rank else gather_done(own, [0, 1])

    with pytest.raises(fp.CoordinationError, match="rank 1"):
        raise run_threads(2, work)[0]


class FailedMeanwhile:
    """A session in which rank 0 asks something, fails, and removes what the answer needs."""

    def tell(self, _data: bytes) -> None:
        """Take what this rank tells."""

    def hear(self) -> bytes:
        return encoded({"look": "step-1"})

    def check(self) -> None:
        raise fp.PeerError("rank 2 has failed", rank=2)


def test_rank_that_lacks_what_a_failed_one_has_removed_tells_of_that_failure() -> None:
    session: Any = FailedMeanwhile()

    def reply(_said: dict[str, Any]) -> dict[str, Any]:
        raise fp.StorageError(errno.ENOENT, "this rank does not see the same files as before")

    with pytest.raises(fp.PeerError, match="rank 2 has failed"):
        follow_plans(session, PLAN, dict, reply)
    stores: Any = object()
    writer = StoreSeeker("/a/step-1", 1, stores)
    writer.reply = reply  # type: ignore[method-assign]
    with pytest.raises(fp.PeerError, match="rank 2 has failed"):
        writer.directory_for(session, "step 1")
