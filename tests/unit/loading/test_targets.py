"""What a state is restored into: which entries are read, how a misfit is told, and what is left after an error."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumables import load, network, save, storages_of
from support.sameness import assert_same
from support.specimens import train

import fastpersist as fp
from fastpersist.loading.targets import (
    MODULES,
    OPTIMIZERS,
    OTHERS,
    IncompatibleKeys,
    Step,
    TargetChange,
    TargetWalk,
    misfit,
    missing_keys,
    refuse_misfit,
    unwrapped_optimizer,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


# --- entries of a state


def test_entries_that_are_asked_for_and_not_there_are_named() -> None:
    found = list(missing_keys(["model", "step"], ["model", "optimizer"], ["step", "ema"], "the file"))
    assert found == ["optimizer is in the target, but not in the file", "ema is among the keys, but not in the file"]


# --- misfits


def test_misfit_shows_ten_differences_and_counts_the_rest() -> None:
    message = str(misfit("x.pt", [f"w{index} has another shape" for index in range(12)]))
    assert message.startswith("x.pt does not fit the target, which was not changed: w0 has another shape; ")
    assert message.endswith("w9 has another shape; … and 2 more")


def test_names_on_one_side_are_refused_only_where_that_is_strict() -> None:
    keys = IncompatibleKeys(["a"], ["b"])
    refuse_misfit("x.pt", [], keys, strict=False)
    with pytest.raises(fp.ConfigError, match=r"changed: c is odd$"):
        refuse_misfit("x.pt", ["c is odd"], keys, strict=False)
    with pytest.raises(
        fp.ConfigError,
        match="a is in the target, but not in the checkpoint; c is odd; b is in the checkpoint, but not in the target",
    ):
        refuse_misfit("x.pt", ["c is odd"], keys, strict=True, where="checkpoint")


# --- the walk


class NotedWalk(TargetWalk):
    """Notes what it would plan."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, str]] = []

    def _add_tensor(self, path: Any, name: str, target: torch.Tensor, value: Any) -> None:
        self.noted.append(("tensor", name))

    def _add_module(self, path: Any, name: str, module: torch.nn.Module, value: Any) -> None:
        self.noted.append(("module", name))

    def _add_optimizer(self, path: Any, name: str, target: object, optimizer: Any, value: Any) -> bool:
        self.noted.append(("optimizer", name))
        return not isinstance(target, Wrapped)

    def _add_stateful(self, path: Any, name: str, target: Any, value: Any) -> None:
        self.noted.append(("stateful", name))


def test_each_part_of_a_target_is_planned_by_what_it_is() -> None:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    target: dict[str, Any] = {"m": module, "o": optimizer, "l": [torch.ones(1), Wrapped(optimizer)], "n": 1}
    walk = NotedWalk()
    walk.add((), "", {**target, "s": scheduler}, {"m": {}, "o": {}, "n": {}, "s": {}, "l": [0, 0]})
    # `_add_optimizer` is asked for whatever has an optimizer: it leaves the wrapper to load_state_dict.
    expected = [("module", "m"), ("optimizer", "o"), ("tensor", "l[0]"), ("optimizer", "l[1]"), ("stateful", "l[1]")]
    assert walk.noted == [*expected, ("optimizer", "s")]
    assert [step.name for step in walk.steps] == ["n"]
    assert walk.problems == []


def test_what_only_one_side_has_is_noted_with_its_path() -> None:
    walk = NotedWalk()
    target: dict[str, Any] = {"a": {"w": torch.ones(1), "x": torch.ones(1), "n": 1}}
    walk.add((), "", target, {"a": {"w": 0, "y": [torch.ones(1)], "k": 5}})
    assert walk.keys == IncompatibleKeys(["a.x"], ["a.y"])
    assert walk.unread == [("a", "y")]
    for step in walk.steps:
        step.apply(5)
    assert target["a"].keys() == {"w", "x", "n", "k"}
    assert target["a"]["k"] == 5


def test_optimizer_is_found_in_wrappers_and_not_in_modules_or_circles() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)])
    assert unwrapped_optimizer(Wrapped(Wrapped(optimizer))) is optimizer
    module = torch.nn.Linear(1, 1)
    module.optimizer = optimizer  # type: ignore[assignment]
    assert unwrapped_optimizer(module) is None
    circle = Wrapped(None)
    circle.optimizer = circle
    assert unwrapped_optimizer(circle) is None


# --- the change


ERRORS: dict[str, Callable[[], fp.FastPersistError]] = {
    "disk": lambda: fp.NoSpaceError(28, "no", "x.pt", 7),
    "damage": lambda: fp.ChecksumError("no", path="x.pt", offset_bytes=7),
    "peer": lambda: fp.PeerError("no", rank=3, subject="step 1"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_error_stays_what_it_is_and_names_the_changed_targets(kind: str) -> None:
    error = ERRORS[kind]()
    touched: list[str] = []
    with pytest.raises(type(error), match=r"no.*; partly overwritten.*: a, b") as caught:
        with TargetChange("x.pt", touched.append) as change:
            for key in ("a", "b", "a"):
                change.touch(key)
            raise error
    assert touched == ["a", "b"]
    assert caught.value.__cause__ is error
    for name in ("errno", "filename", "path", "offset_bytes", "rank", "subject"):
        assert getattr(caught.value, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("error", [*(make() for make in ERRORS.values()), RuntimeError("no"), KeyboardInterrupt()])
def test_error_before_the_first_change_is_raised_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        with TargetChange("x.pt"):
            raise error
    assert caught.value is error


def test_error_of_another_kind_is_told_with_what_it_leaves() -> None:
    with pytest.raises(fp.StorageError, match=r"filling the targets from x.pt failed: RuntimeError: no; partly.*: a$"):
        with TargetChange("x.pt") as change:
            change.touch("a")
            raise RuntimeError("no")


def test_steps_are_taken_by_rank_and_the_one_that_fails_is_named() -> None:
    taken: list[str] = []

    def step(rank: int, name: str, fails: bool = False) -> Step:
        def apply(part: Any) -> None:
            taken.append(part)
            if fails:
                raise LookupError("no")

        return Step(rank, (name, "inner"), f"{name}.inner", apply)

    steps = [step(OTHERS, "c"), step(OPTIMIZERS, "b", fails=True), step(MODULES, "a")]
    with pytest.raises(fp.ConfigError, match=r"b.inner refused what x.pt holds for it: LookupError: no; .*: a, b$"):
        with TargetChange("x.pt") as change:
            change.take(steps, lambda one: f"part of {one.name}")
    assert taken == ["part of a.inner", "part of b.inner"]


# --- with files


class Wrapped:
    """An optimizer inside another object, as trainers have it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.calls = 0

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.calls += 1
        self.optimizer.load_state_dict(state)


@pytest.mark.parametrize("depth", [1, 2])
def test_wrapped_optimizers_are_filled_through_the_wrapper(depth: int, path: Path) -> None:
    source = network()
    optimizer = torch.optim.Adam(source.parameters())
    train(source, optimizer, 2)
    save({"optimizer": optimizer.state_dict()}, path)
    target = torch.optim.Adam(network(9).parameters())
    train(network(9), target, 0)
    inner = network(9)
    target = torch.optim.Adam(inner.parameters())
    train(inner, target, 1)
    addresses = storages_of(target)
    wrapper: Any = target
    for _ in range(depth):
        wrapper = Wrapped(wrapper)
    load(path, {"optimizer": wrapper})
    assert wrapper.calls == 1
    assert storages_of(target) == addresses
    assert_same(target.state_dict(), optimizer.state_dict())


def test_tensor_lr_stays_the_tensor_that_schedulers_and_graphs_know(path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.Adam([{"params": [w]} for w in weights], lr=torch.tensor(0.5), foreach=False)
    save({"shared": optimizer.state_dict()}, path)
    kept = optimizer.param_groups[0]["lr"]
    kept.fill_(9)
    load(path, {"shared": optimizer})
    assert [group["lr"] is kept for group in optimizer.param_groups] == [True] * 3
    assert kept.item() == 0.5
    # In a file where the groups differ, one tensor cannot be the rate of both.
    state = optimizer.state_dict()
    state["param_groups"][1]["lr"] = torch.tensor(0.25)
    save({"shared": state}, path)
    load(path, {"shared": optimizer})
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.25, 0.5]


def test_state_of_more_precision_than_its_parameters_keeps_it_where_it_is_filled(path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    master = torch.tensor([1.0001, 2.0001])
    optimizer.state[weight]["momentum_buffer"] = master
    save({"optimizer": optimizer.state_dict()}, path)
    wanted = master.clone()
    master.zero_()
    load(path, {"optimizer": optimizer})
    assert optimizer.state[weight]["momentum_buffer"] is master
    assert torch.equal(master, wanted)


def test_nested_containers_are_filled_and_their_numbers_set(path: Path) -> None:
    Pair = namedtuple("Pair", "left right")
    save({"ema": {"w": torch.ones(2), 3: [torch.zeros(1), 4], "n": 5, "new": "x"}, "pair": (torch.ones(1), 2)}, path)
    weight, inner = torch.zeros(2), torch.ones(1)
    target: dict[str, Any] = {"w": weight, 3: [inner, 0], "n": 0}
    pair = Pair(torch.zeros(1), "left alone")
    loaded = load(path, {"ema": target, "pair": pair})
    assert loaded["ema"] is target
    assert loaded["pair"] is pair
    assert target["w"] is weight
    assert target == {"w": weight, 3: [inner, 4], "n": 5, "new": "x"}
    assert (weight.tolist(), inner.tolist(), pair.left.tolist(), pair.right) == ([1, 1], [0], [1], "left alone")


def test_empty_containers_take_what_the_file_has(path: Path) -> None:
    save({"log": {"losses": [1.0, 2.0]}, "queue": [torch.ones(2), torch.zeros(1)]}, path)
    target: dict[str, Any] = {"log": {"losses": []}, "queue": []}
    queue = target["queue"]
    load(path, target)
    assert target["log"] == {"losses": [1.0, 2.0]}
    assert [tensor.tolist() for tensor in queue] == [[1, 1], [0]]


@pytest.mark.parametrize("wraps", ["file", "target"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "a.b."])
@pytest.mark.parametrize("owner", ["", "model."])
def test_names_that_differ_by_a_prefix_are_told_as_one(wraps: str, prefix: str, owner: str, tmp_path: Path) -> None:
    plain = {f"{owner}{name}": torch.ones(2) for name in ("weight", "bias", "layer.0.weight")}
    wrapped = {name.replace(owner, owner + prefix, 1) if owner else prefix + name: t for name, t in plain.items()}
    stored, target = (wrapped, plain) if wraps == "file" else (plain, wrapped)
    fp.save(stored, tmp_path / "model.pt")
    for fill in (
        lambda: fp.load_into(tmp_path / "model.pt", target),
        lambda: load(tmp_path / "state.pt", {"all": target}),
    ):
        fp.save({"all": stored}, tmp_path / "state.pt")
        with pytest.raises(fp.ConfigError) as raised:
            fill()
        assert f"differ by the prefix {prefix!r}, which only those of the {wraps} have" in str(raised.value)
        assert "3 in all" in str(raised.value)
        assert "but not in" not in str(raised.value)


def test_names_that_a_prefix_does_not_explain_are_listed(tmp_path: Path) -> None:
    fp.save({"module.weight": torch.ones(2), "module.bias": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(fp.ConfigError, match="bias is in the file, but not in the target"):
        fp.load_into(tmp_path / "model.pt", {"weight": torch.ones(2), "other": torch.ones(2)})
    with pytest.raises(fp.ConfigError, match="bias is in the file, but not in the target"):
        fp.load_into(tmp_path / "model.pt", {"weight": torch.ones(2)})


def test_target_that_refuses_its_state_is_named_and_so_is_what_changed(path: Path) -> None:
    class Proud:
        def load_state_dict(self, state: Any) -> None:
            raise LookupError(f"no, not {state}")

    save({"w": torch.ones(2), "proud": {"a": 1}, "also": torch.ones(2)}, path)
    touched: list[str] = []
    with pytest.raises(fp.ConfigError, match=r"proud refused .*LookupError: no, not {'a': 1}.*overwritten.*: w, proud"):
        load(path, {"w": torch.zeros(2), "proud": Proud()}, on_filled=touched.append)
    assert touched == ["w", "proud"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_hooks_that_may_rename_are_told_of(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"old{suffix}"
    fp.save({"weight_g": torch.ones(3, 1), "weight_v": torch.ones(3, 3), "bias": torch.ones(3)}, path)
    new = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
    with pytest.raises(fp.ConfigError, match=r"original0 is in the target.*Hooks of load_state_dict in the target may"):
        fp.load_into(path, new)
    new.load_state_dict(fp.load(path))
    with pytest.raises(fp.ConfigError) as caught:
        fp.load_into(path, torch.nn.Linear(3, 3))
    assert "Hooks" not in str(caught.value)
