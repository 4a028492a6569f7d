"""Ranks agree on who writes what; what they hold differently is named; no message of another rank is trusted."""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks_in_threads import at_once, begin, ranks_in_threads

import fastpersist as fp
from fastpersist.dcp import plan_agreement
from fastpersist.dcp.global_plan.assignment import WHOLE, Share, WholePlan
from fastpersist.dcp.global_plan.kept_metadata import metadata_of
from fastpersist.dcp.plan_agreement import Done, Planned, SharedPlans, Whole, gather_done, tell_done
from fastpersist.distributed.messages import encoded
from fastpersist.distributed.sessions import Session

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch.distributed.checkpoint")


def test_a_plan_that_holds_is_told_in_a_few_bytes() -> None:
    states = [
        {"model": {f"layers.{index}": torch.zeros(4, 4) for index in range(300)}, f"own of {rank}": torch.zeros(3)}
        for rank in range(3)
    ]
    every_name = [*(f"model.{name}" for name in states[0]["model"]), *(f"own of {rank}" for rank in range(3))]
    plans = [SharedPlans() for _ in states]
    spoken = []

    def agree(rank: int, session: Session, directory: str) -> Planned:
        return plans[rank].agree(states[rank], session, "step", None if rank else directory)

    with ranks_in_threads(3) as ranks:
        for directory in ("/first", "/second", "/third"):
            if directory == "/third":
                states[2]["new"] = torch.zeros(1)
            sessions = begin(ranks)
            planned = at_once([partial(agree, rank, sessions[rank], directory) for rank in range(3)])
            for one in planned:
                if isinstance(one, BaseException):
                    raise one
                assert one.directory == directory
            names = sorted(item.index.fqn for one in planned for item in one.items)
            assert names == sorted([*every_name, *({"new"} & set(states[2]))])
            assert [len(share) for share in planned[0].whole.plan.shares] == [len(one.items) for one in planned]
            spoken.append(sessions[1].message_bytes)
    assert spoken[0] > 2000
    assert spoken[1] < 300
    assert spoken[2] > 2000


def agreed(states: Sequence[dict[str, Any]], *, labels: str = "sss", sums: Sequence[dict[str, int]] = ()) -> list[Any]:
    """Plan a save of these states; return what comes of it on each rank."""

    def agree(rank: int, session: Session) -> Planned:
        get_sums = (lambda: sums[rank]) if sums else None
        try:
            return SharedPlans().agree(states[rank], session, labels[rank], None if rank else "/d", get_sums)
        except Exception as error:
            session.fail(error)
            raise

    with ranks_in_threads(len(states)) as ranks:
        return at_once([partial(agree, rank, session) for rank, session in enumerate(begin(ranks))])


def expect_refusal(outcomes: list[Any], match: str) -> None:
    with pytest.raises(fp.CoordinationError, match=match):
        raise outcomes[0]
    assert all(isinstance(outcome, fp.PeerError) for outcome in outcomes[1:])


def test_replicas_are_written_once_and_what_one_rank_holds_it_writes() -> None:
    planned = agreed([{"same": torch.ones(3), f"own{rank}": torch.ones(2)} for rank in range(3)])
    written = [[item.index.fqn for item in one.items] for one in planned]
    assert sorted(name for names in written for name in names) == ["own0", "own1", "own2", "same"]
    assert [f"own{rank}" in names for rank, names in enumerate(written)] == [True] * 3
    assert [len(share) for share in planned[0].whole.plan.shares] == list(map(len, written))
    assert list(metadata_of(planned[0].whole.plan).state_dict_metadata) == ["same", "own0", "own1", "own2"]
    assert [one.directory for one in planned] == ["/d"] * 3
    assert planned[1].whole is None


def test_ranks_that_save_another_thing_are_named() -> None:
    state = {"a": torch.ones(3)}
    expect_refusal(agreed([state] * 3, labels="ssx"), "rank 0 is at s, rank 2 at x")
    expect_refusal(
        agreed([state, state, {"a": torch.ones(4)}]), r"'a' is a plain tensor of shape \(3,\).*on rank 0, .*4"
    )
    expect_refusal(agreed([state, {"a": "text"}]), "'a' is a plain tensor.* on rank 0, and an object on rank 1")
    expect_refusal(agreed([state] * 3, sums=[{"a": 7}, {"a": 7}, {"a": 8}]), r"'a'.*rank.* 2")


def test_sums_of_what_only_one_rank_samples_are_not_compared() -> None:
    outcomes = agreed([{"a": torch.ones(3)}] * 3, sums=[{"a": 7}, {}, {}])
    assert all(isinstance(one, Planned) for one in outcomes)


def test_a_name_that_two_entries_have_is_refused_where_it_is() -> None:
    with pytest.raises(fp.ConfigError, match="same name"):
        SharedPlans().agree({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, None, "s", "/d")


def test_plans_that_a_save_has_are_not_given_to_another_one() -> None:
    plans = SharedPlans()
    with plans.taken() as own, plans.taken() as other:
        assert own is plans
        assert other is not plans
    with plans.taken() as again:
        assert again is plans


class Evil:
    def __reduce__(self) -> Any:
        return eval, ("1",)


@pytest.mark.parametrize(
    "plan",
    [
        b"",
        b"no zlib",
        zlib.compress(b"no pickle"),
        zlib.compress(pickle.dumps((b"", b"", [], {})))[:-1],
        zlib.compress(pickle.dumps((b"", b"", [], {}))) + b"more",
        zlib.compress(pickle.dumps((b"", b"", []))),
        zlib.compress(pickle.dumps((b"other than was told", b"", [], {}))),
        zlib.compress(pickle.dumps([b"", b"", [], {}])),
        zlib.compress(pickle.dumps((b"", b"", [Evil()], {}))),
        zlib.compress(bytes(1 << 20)),
    ],
)
def test_what_is_no_plan_is_refused_with_the_rank_that_sent_it(plan: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_agreement, "_PLAN_BYTES_MAX", 1 << 16)

    def follow(session: Session) -> None:
        session.tell(encoded({"label": "s", "version": "", "sums": {}}))
        session.hear()
        session.tell(encoded({"names": "a", "chunks": "b"}))
        session.hear()
        session.tell(plan)

    with ranks_in_threads(2) as ranks:
        first, other = begin(ranks)
        outcome, _ = at_once(
            [lambda: SharedPlans().agree({"a": torch.ones(3)}, first, "s", "/d"), lambda: follow(other)]
        )
    with pytest.raises(fp.CoordinationError, match="the plan of rank 1 cannot be read"):
        raise outcome


def test_ranks_that_hold_the_same_send_it_once() -> None:
    """Of 6 ranks in two groups of replicas, two send their tensors, and the rank that is alike sends nothing."""
    layers = {f"layers.{index}.weight": torch.full((40, 3), float(index)) for index in range(200)}
    states = [{"model": layers, f"sampler of {rank}": rank} for rank in range(3)]
    states += [{"model": {**layers, "more": torch.ones(2)}, f"sampler of {rank}": rank} for rank in range(3, 6)]
    plans = [SharedPlans() for _ in states]
    told: dict[int, int] = {}

    def agree(rank: int, session: Session) -> Planned:
        before_bytes = session.message_bytes
        planned = plans[rank].agree(states[rank], session, "step", None if rank else "/d")
        told[rank] = session.message_bytes - before_bytes
        return planned

    with ranks_in_threads(6) as ranks:
        planned = at_once([partial(agree, rank, session) for rank, session in enumerate(begin(ranks))])
    assert [told[rank] > 3000 for rank in range(1, 6)] == [False, False, True, False, False], told
    names = sorted(item.index.fqn for one in planned for item in one.items)
    samplers = [f"sampler of {rank}" for rank in range(6)]
    assert names == sorted([*(f"model.{name}" for name in layers), "model.more", *samplers])
    assert [item.index.fqn for item in planned[5].items] == ["sampler of 5"]


# --- what was written


def planned_for(*objects_of: list[str]) -> Planned:
    """Return the coordinator's plan of ranks that write objects only."""
    shares = [Share(objects=names) for names in objects_of]
    return Planned("/d", [], 0, Whole(WholePlan([], shares, {})), "now")


def gathered(message: bytes | Done) -> Any:
    """Return what the coordinator makes of what a rank says that it has written."""

    def tell(session: Session) -> None:
        if isinstance(message, Done):
            tell_done(session, message, Planned("/d", [], 0, None, "now"))
        else:
            session.tell(message)

    with ranks_in_threads(2) as ranks:
        first, other = begin(ranks)
        planned = planned_for([], ["a", "b"])
        outcome, _ = at_once([lambda: gather_done(first, Done(None, b"", []), planned), lambda: tell(other)])
    return outcome


@pytest.mark.parametrize("part", [None, ("__1_0.distcp", 1 << 40, 7), ("__1_0.distcp", 9, None)])
def test_places_arrive_as_they_were_told(part: Any) -> None:
    done = Done(part, b"", [(0, 4096), ((1 << 64) - 1, 1)])
    assert gathered(done) == [Done(None, b"", []), done]


@pytest.mark.parametrize(
    "message",
    [
        Done(None, b"", [(0, 1)]),
        b"",
        b"[]\n",
        b'{"part": null}\nno zlib',
        b'{"part": null}\n' + zlib.compress(bytes(33)),
        b'{"part": null}\n' + zlib.compress(bytes(1 << 20)),
        b'{"part": null, "places": "of another save"}\n' + zlib.compress(bytes(32)),
        b"{}\n" + zlib.compress(bytes(32)),
        b'{"part": 7}\n' + zlib.compress(bytes(32)),
        b'{"part": ["a"]}\n' + zlib.compress(bytes(32)),
    ],
)
def test_what_was_not_planned_is_refused_with_the_rank_that_tells_it(message: bytes | Done) -> None:
    with pytest.raises(fp.CoordinationError, match="rank 1"):
        raise gathered(message)


class _Wire:
    """Takes what is told, and gives it to the coordinator."""

    rank = 0
    count = 2

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def tell(self, message: bytes) -> None:
        self.messages.append(message)

    def gather(self, own: bytes) -> list[bytes]:
        return [own, self.messages[-1]]


def test_places_that_the_coordinator_has_are_told_by_a_digest() -> None:
    share = Share(array("I", range(1000)), array("q", [WHOLE] * 1000), array("q", bytes(8000)), ["object"])
    whole = Whole(WholePlan([], [Share(), share], {}))
    wire: Any = _Wire()
    told: dict[str, bytes] = {}
    sizes = []
    for save, kept, shift in (("1", "", 0), ("2", "1", 0), ("3", "2", 0), ("4", "3", 8), ("5", "3", 0), ("6", "5", 0)):
        places = [((number * 7919) % 1000 + shift, number) for number in range(1000)] + [(5000 + shift, 9)]
        planned = Planned("/d", [], 0, whole, save, kept, told)
        tell_done(wire, Done.of(("__1_0.distcp", 1, 0), places, 1000), planned)
        _, done = gather_done(wire, Done(None, b"", []), planned)
        assert done == Done.of(("__1_0.distcp", 1, 0), places, 1000)
        whole.metadata.places = [b"", done.places]
        sizes.append(len(wire.messages[-1]))
    assert [size > 2000 for size in sizes] == [True, False, False, True, True, False]
    assert sizes[1] < 200
