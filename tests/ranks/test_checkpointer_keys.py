"""What of a step is read: what is filled, what `keys=` names, and what is small; alike for both kinds of steps."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forking import run_in_child
from support.process_groups import run_ranks
from support.sameness import assert_same
from support.store_runs import two_stores
from support.torch_release import TORCH

import fastpersist as fp
from fastpersist.loading import restore, selection

BOTH = pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])


class Flat(collections.OrderedDict[str, Any]):
    """A dict that torch pickles by its class."""


@pytest.fixture(autouse=True)
def every_tensor_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of a few bytes be none of the small ones, which come along without being asked for."""
    monkeypatch.setattr(selection, "_SMALL_BYTES", 1)


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    shared = torch.arange(7.0)
    return {
        "model": torch.nn.Linear(3, 4).state_dict(),
        "ema": {"weights": [torch.ones(5), shared], "decay": 0.5},
        "rng": torch.arange(9, dtype=torch.uint8),
        "head": shared[2:4],
        "sparse": torch.eye(3).to_sparse(),
        "scheduler": {"last": 3, "rates": [0.5, 0.25]},
        "step": 5,
    }


def saved(root: Path, *, sharded: bool, **options: Any) -> fp.Checkpointer:
    with fp.Checkpointer(root, sharded=sharded) as checkpoints:
        checkpoints.save(1, state(), **options)
    return fp.Checkpointer(root)


def expect(found: dict[str, Any]) -> None:
    """Compare values; that "head" is a part of a longer storage, and "model" no plain dict, DCP's format loses."""
    for own in (found, expected := {key: state()[key] for key in found}):
        own.update({key: own[key].clone() for key in ("head",) if key in own})
        own.update({key: dict(own[key]) for key in ("model",) if key in own})
    assert_same(found, expected)


@BOTH
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (None, {"model", "scheduler", "step", "rank_state"}),
        (["ema", "rng"], {"model", "ema", "rng", "scheduler", "step", "rank_state"}),
        (["head", "sparse", "model", "rank_state"], {"model", "head", "sparse", "scheduler", "step", "rank_state"}),
    ],
    ids=["no keys", "two", "others"],
)
@pytest.mark.parametrize("verify", [False, True])
def test_with_targets_other_tensors_are_there_if_they_are_asked_for(
    tmp_path: Path, sharded: bool, keys: Collection[str] | None, expected: set[str], verify: bool
) -> None:
    checkpoints = saved(tmp_path, sharded=sharded, rank_state={"rng": torch.ones(2)})
    model = torch.nn.Linear(3, 4)
    found = checkpoints.load(into={"model": model}, keys=keys, verify=verify)
    assert found.keys() == expected
    assert found.pop("model") is model
    assert_same(dict(model.state_dict()), dict(state()["model"]))
    assert_same(found.pop("rank_state"), {"rng": torch.ones(2)})
    expect(found)


@BOTH
@pytest.mark.parametrize("keys", [["model"], ["step"], ["rng", "head"], ["rank_state"], [], ("ema", "rank_state")])
def test_without_targets_there_is_what_is_asked_for_and_nothing_else(
    tmp_path: Path, sharded: bool, keys: Collection[str]
) -> None:
    checkpoints = saved(tmp_path, sharded=sharded, rank_state={"at": 7})
    found = checkpoints.load(keys=keys)
    assert set(found) == set(keys)
    assert found.pop("rank_state", {"at": 7}) == {"at": 7}
    expect(found)


@BOTH
@pytest.mark.parametrize("into", [False, True])
def test_key_that_is_not_there_is_named_and_nothing_changes(tmp_path: Path, sharded: bool, into: bool) -> None:
    checkpoints = saved(tmp_path, sharded=sharded)
    weight = torch.full((9,), 3, dtype=torch.uint8)
    for key in ("optimiser", "rank_state"):
        with pytest.raises(fp.ConfigError, match=rf"{key} is among the keys, but not in the .*holds .*ema"):
            checkpoints.load(into={"rng": weight} if into else None, keys=["step", key])
    assert weight.tolist() == [3] * 9
    with pytest.raises(fp.ConfigError, match=r"keys=\['step'\]"):
        checkpoints.load(keys="step")


def test_entry_of_that_name_in_the_state_is_meant_where_no_rank_has_saved_its_own(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"rank_state": torch.ones(2), "step": 1})
    assert_same(fp.Checkpointer(tmp_path).load(keys=["rank_state"]), {"rank_state": torch.ones(2)})


def test_what_torch_loads_itself_has_the_same_keys(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, sharded=False)
    weights = [torch.zeros(5), torch.zeros(7)]
    found = checkpoints.load(
        into={"ema": {"weights": weights, "decay": 0}}, keys=["rng"], map_location=lambda storage, _: storage
    )
    assert found.keys() == {"ema", "rng", "scheduler", "step"}
    assert_same(weights, state()["ema"]["weights"])
    # torch 2.15 checks the numbers of sparse tensors, also of those on the meta device.
    for place in (lambda storage, _: storage, *(["meta"] if TORCH < (2, 15) else [])):
        assert checkpoints.load(keys=["step"], map_location=place) == {"step": 5}


def test_objects_around_tensors_that_nobody_asks_for_are_built_and_left_out(tmp_path: Path) -> None:
    held = {"module": torch.nn.Linear(2, 2), "flat": Flat(w=torch.ones(3)), "step": 1, "w": torch.ones(2)}
    held["twice"] = [held["module"].weight, held["w"]]
    with fp.Checkpointer(tmp_path) as checkpoints, pytest.warns(RuntimeWarning, match="weights_only"):
        checkpoints.save(1, held)
    weight = torch.zeros(2)
    found = fp.Checkpointer(tmp_path).load(into={"w": weight}, weights_only=False)
    assert found.keys() == {"w", "step"}
    assert weight.tolist() == [1, 1]
    found = fp.Checkpointer(tmp_path).load(into={"w": weight}, keys=["flat"], weights_only=False)
    assert_same(found["flat"], held["flat"])


def test_storages_that_nobody_asks_for_get_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, sharded=False)
    made: list[int] = []
    original = restore.new_storage

    def spy(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
        if device.type != "meta":
            made.append(size_bytes)
        return original(size_bytes, device)

    monkeypatch.setattr(restore, "new_storage", spy)
    checkpoints.load(keys=["rng"])
    assert 9 in made
    assert not {16, 20}.intersection(made)  # of the model's bias, and of the averages
    made.clear()
    checkpoints.load(into={"model": torch.nn.Linear(3, 4)}, keys=["head"])
    assert 28 in made  # it is a part of what "ema" holds
    assert not {16, 20, 9}.intersection(made)


@BOTH
@pytest.mark.parametrize("stores", [1, 2])
def test_ranks_may_ask_for_different_keys(tmp_path: Path, sharded: bool, stores: int) -> None:
    roots = two_stores(tmp_path) if stores == 2 else [tmp_path, tmp_path]

    def work(rank: int, count: int) -> None:
        with fp.Checkpointer(
            roots[rank], sharded=sharded, process_group=dist.group.WORLD, node_local="parts"
        ) as checkpoints:
            checkpoints.save(1, state(), rank_state=rank)
            checkpoints.wait()
            dist.barrier()
            rng = torch.zeros(9, dtype=torch.uint8)
            into, keys = (({"rng": rng}, None), (None, ["ema", "rank_state"]))[rank]
            found = checkpoints.load(into=into, keys=keys)
            assert found.pop("rank_state") == rank
            assert found.keys() == ({"rng", "step", "scheduler"}, {"ema"})[rank]
            expect(found)

    run_ranks(2, work)


# --- memory

MEASURE = """
    import sys, torch, fastpersist as fp

    def kib(field):
        lines = open("/proc/self/status").read().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1])

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])  # 67 MB
    fp.Checkpointer(sys.argv[2]).load(into={"w": torch.ones(2)}, keys=["v"])  # the ring, and what is imported once
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = kib("VmRSS")
    if sys.argv[3] == "into":
        found = fp.Checkpointer(sys.argv[1]).load(into={"model": model})
    else:
        found = fp.Checkpointer(sys.argv[1]).load(keys=["small"])
    assert found["step" if sys.argv[3] == "into" else "small"] is not None
    print((kib("VmHWM") - before) // 1024)
"""


def save_what_is_measured(root: Path, sharded: bool) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])
    rest = {"ema": torch.ones(1 << 24), "more": [torch.ones(1 << 24)], "small": torch.ones(2), "step": 1}  # 134 MB
    for path, held in ((root / "large", {"model": model.state_dict(), **rest}), (root / "tiny", {"w": torch.ones(2)})):
        with fp.Checkpointer(path, sharded=sharded) as checkpoints:
            checkpoints.save(1, {**held, "v": torch.ones(3)})


@BOTH
def test_of_a_large_step_only_what_is_wanted_is_in_memory(tmp_path: Path, sharded: bool) -> None:
    """201 MB and more: 67 of the model, which has its memory, and 134 that nobody asks for."""
    script = tmp_path / "measure.py"
    script.write_text(textwrap.dedent(MEASURE))
    small = {"FASTPERSIST_RING_BYTES": str(8 << 20), "FASTPERSIST_CHUNK_BYTES": str(1 << 20), "MALLOC_ARENA_MAX": "1"}
    run_in_child(lambda _report: save_what_is_measured(tmp_path, sharded))
    for what in ("into", "keys"):
        command = [sys.executable, str(script), str(tmp_path / "large"), str(tmp_path / "tiny"), what]
        result = subprocess.run(command, env={**os.environ, **small}, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert int(result.stdout) <= 16, what
