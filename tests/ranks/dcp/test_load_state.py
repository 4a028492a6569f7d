"""Steps of sharded state are loaded in place on any number of ranks, sharded in any way; misfits are said first."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import kill_this_process
from support.sameness import assert_same
from support.sharded_runs import SHAPES, ShardedRun, expected, mesh_of_all, sharded, whole
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import fastpersist as fp

Way = Callable[[], tuple[DeviceMesh | None, list[Placement] | None]]

WAYS: dict[str, Way] = {
    "rows": lambda: (mesh_of_all(), [Shard(0)]),
    "columns": lambda: (mesh_of_all(), [Shard(-1)]),
    "replicas": lambda: (mesh_of_all(), [Replicate()]),
    "replicas of shards": lambda: (mesh_of_all(2, 2), [Replicate(), Shard(0)]),
    "shards of shards": lambda: (mesh_of_all(2, 2), [Shard(0), Shard(0)]),
    "plain": lambda: (None, None),
}


def save(root: Path, count: int, way: str = "rows", steps: int = 1) -> None:
    def work(rank: int, count: int) -> None:
        run = ShardedRun(*WAYS[way]())
        with fp.Checkpointer(root, sharded=True, process_group=dist.group.WORLD) as checkpoints:
            for _ in range(steps):
                checkpoints.save(run.advance().step, run.state(), rank_state={"rank": rank})

    run_ranks(count, work)


def checkpointer(root: Path, **options: Any) -> fp.Checkpointer:
    return fp.Checkpointer(root, process_group=dist.group.WORLD, **options)


def places(run: ShardedRun) -> list[int]:
    def local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    state = run.optimizer.state
    return [local(p).data_ptr() for p in [*run.model, *(state[p]["momentum_buffer"] for p in run.model if state)]]


@pytest.mark.parametrize(
    ("saved_by", "saved_as", "loaded_by", "loaded_as"),
    [
        (2, "rows", 1, "plain"),
        (2, "rows", 3, "columns"),
        (3, "rows", 2, "replicas"),
        (4, "replicas of shards", 2, "rows"),
        (1, "plain", 4, "shards of shards"),
        (2, "replicas", 3, "rows"),
        (4, "shards of shards", 4, "replicas of shards"),
        (2, "columns", 2, "rows"),
    ],
)
def test_what_was_saved_in_one_way_is_filled_in_place_in_another(
    tmp_path: Path, saved_by: int, saved_as: str, loaded_by: int, loaded_as: str
) -> None:
    save(tmp_path, saved_by, saved_as, steps=2)

    def work(rank: int, count: int) -> dict[str, Any]:
        run = ShardedRun(*WAYS[loaded_as](), blank=True)
        optimizer_state: dict[Any, Any] = {}
        for _ in range(2):  # at first the optimizer has no state; then it has, and keeps its memory
            before = places(run)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*step 2 was saved by .* rank_state", RuntimeWarning)
                found = checkpointer(tmp_path).load(into=run.targets(), keys=["position"])
            assert places(run)[: len(before)] == before
            assert found["model"] is run.model
            assert found["optimizer"] is run.optimizer
            assert found.get("rank_state") == ({"rank": rank} if saved_by == count else None)
            found.update(model=dict(whole(run.model.state_dict())), optimizer=whole(run.optimizer.state_dict()))
            found.pop("rank_state", None)
            if optimizer_state:
                assert_same(found, optimizer_state)
            optimizer_state = found
        return found

    for found in run_ranks(loaded_by, work):
        assert_same({key: found[key] for key in expected(2)}, expected(2))


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(9, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 5, bias=False)
    )


def steps_of(model: torch.nn.Module, optimizer: Any, count: int) -> None:
    for step in range(count):
        data = torch.arange(8 * 9).reshape(8, 9).remainder(7 + step).float()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("names", ["names", "numbers"])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2), (2, 3)])
def test_fsdp_goes_on_where_it_was_on_another_number_of_ranks(
    tmp_path: Path, names: str, saved_by: int, loaded_by: int
) -> None:
    def objects(count: int) -> tuple[Any, Any, Any]:
        model = small_model()
        if count > 1:
            fully_shard(model[0], mesh=mesh_of_all())
            fully_shard(model, mesh=mesh_of_all())
        # Two groups, the second of which names the last layer's parameters first.
        groups = [{"params": [*model[3].parameters(), *model[0].parameters()]}, {"params": [*model[1].parameters()]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5])

    def train(rank: int, count: int) -> dict[str, Any]:
        model, optimizer, schedule = objects(count)
        steps_of(model, optimizer, 2)
        schedule.step()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments if names == "names" else optimizer.state_dict()}
        with checkpointer(tmp_path, sharded=True, optimizer=optimizer) as checkpoints:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*milestones.*", RuntimeWarning)
                checkpoints.save(1, {**state, "schedule": schedule.state_dict()})
            checkpoints.wait()
        return dict(whole(get_state_dict(model, optimizer)[1]))

    def resume(rank: int, count: int) -> dict[str, Any]:
        model, optimizer, schedule = objects(count)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()
        checkpointer(tmp_path).load(into={"optimizer": optimizer, "schedule": schedule, "model": model})
        assert schedule.last_epoch == 1
        assert dict(schedule.milestones) == {1: 1, 5: 1}
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
        weights, moments = whole(list(get_state_dict(model, optimizer)))
        steps_of(model, optimizer, 1)  # it can go on
        return {"weights": dict(weights), "moments": dict(moments)}

    trained = run_ranks(saved_by, train)[0]
    plain = fp.Checkpointer(tmp_path).load()
    for resumed in run_ranks(loaded_by, resume):
        assert_same(resumed["weights"], plain["model"])
        assert_same(resumed["moments"]["state"], trained["state"])
        assert resumed["moments"]["param_groups"] == trained["param_groups"]


def test_optimizer_state_is_found_by_name_when_parameters_change_places(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps_of(model, optimizer, 2)
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(1, {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)})
    other = small_model()
    turned = torch.optim.AdamW(reversed([*other.parameters()]), lr=1.0)
    fp.Checkpointer(tmp_path).load(into={"model": other, "optimizer": turned})
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(dict(turned.state[twin]), dict(optimizer.state[parameter]))
    assert turned.param_groups[0]["lr"] == 1e-2


def test_wrapped_modules_take_what_was_saved_without_the_wrapper(tmp_path: Path) -> None:
    model = small_model()
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(
            1, {"model": model.state_dict(), "wrapped": {f"module.{k}": v for k, v in model.state_dict().items()}}
        )

    def work(rank: int, count: int) -> None:
        for key in ("model", "wrapped"):
            wrapped = DistributedDataParallel(small_model().apply(_zero))
            checkpointer(tmp_path).load(into={key: wrapped})
            assert_same(dict(wrapped.module.state_dict()), dict(model.state_dict()))

    run_ranks(2, work)


def _zero(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        torch.nn.init.zeros_(parameter)


def test_dicts_lists_and_tensors_are_filled_in_place_and_other_values_set(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {
            "ema": {"a": torch.arange(6.0).reshape(2, 3), "b": [torch.full((2,), 1.0), torch.full((3,), 2.0)], "n": 5},
            "half": torch.arange(4, dtype=torch.float16),
            "turned": torch.arange(12.0).reshape(3, 4),
            "rest": {"x": torch.ones(2), "y": (1, 2)},
        }

    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(1, state())
    a, b0, b1 = torch.zeros(2, 3), torch.zeros(2), torch.zeros(3)
    half, turned = torch.zeros(4, dtype=torch.float64), torch.zeros(4, 3).t()
    ema: dict[str, Any] = {"a": a, "b": [b0, b1], "n": 0}
    found = fp.Checkpointer(tmp_path).load(into={"ema": ema, "half": half, "turned": turned}, keys=["rest"])
    assert_same([a, b0, b1, ema["n"]], [*[state()["ema"]["a"]], *state()["ema"]["b"], 5])
    assert ema["a"] is a
    assert_same(half, state()["half"].double())
    assert_same(turned.contiguous(), state()["turned"])
    assert found["ema"] is ema
    assert_same(found["rest"], state()["rest"])


def test_memory_and_dtypes_of_the_optimizer_stay_its_own(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.5))
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}
        return parameter, optimizer

    parameter, optimizer = made()
    optimizer.state[parameter]["exp_avg"].fill_(1.0 + 2**-20)  # more than bfloat16 holds
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(1, {"optimizer": optimizer.state_dict()})
    twin, other = made()
    rate, moment = other.param_groups[0]["lr"], other.state[twin]["exp_avg"]
    rate.fill_(7.0)
    fp.Checkpointer(tmp_path).load(into={"optimizer": other})
    assert other.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    assert other.state[twin]["exp_avg"] is moment
    assert_same(moment, torch.full((5,), 1.0 + 2**-20))


def test_an_optimizer_without_state_is_restored(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(1, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.25).state_dict()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fp.Checkpointer(tmp_path).load(into={"optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert fp.Checkpointer(tmp_path).load()["optimizer"]["state"] == {}


def test_what_has_no_state_needs_none_in_the_checkpoint(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    activation = torch.nn.ReLU()
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(1, {"scaler": scaler.state_dict(), "empty": {}, "activation": activation.state_dict(), "n": 1})
    targets: dict[str, Any] = {"scaler": scaler, "empty": {}, "activation": activation}
    assert fp.Checkpointer(tmp_path).load(into=targets) == {**targets, "n": 1}


# --- what does not fit


def misfits() -> dict[str, tuple[Callable[[], dict[str, Any]], str]]:
    def run_with(**changes: Any) -> dict[str, Any]:
        return {**ShardedRun(blank=True).targets(), **changes}

    fewer = (*SHAPES[:-1], (300, 71))
    return {
        "a key that was not saved": (
            lambda: run_with(ema={"a": torch.ones(1)}),
            "ema is in the target, but not in the checkpoint",
        ),
        "another shape": (
            lambda: {"model": ShardedRun(shapes=fewer, blank=True).model},
            r"model.4 has shape \(300, 71\) in the target, \(300, 70\) in the checkpoint",
        ),
        "a missing parameter": (
            lambda: {"model": ShardedRun(shapes=(*SHAPES, (2,)), blank=True).model},
            "model.5 is in the target, but not in the checkpoint",
        ),
        "one too few": (
            lambda: {"model": ShardedRun(shapes=SHAPES[:4], blank=True).model},
            "model.4 is in the checkpoint, but not in the target",
        ),
        "another optimizer": (
            lambda: {"optimizer": ShardedRun(shapes=SHAPES[:4], blank=True).optimizer},
            r"groups of \[4\] parameters in the target, and of \[5\] in the checkpoint",
        ),
        "state of another shape": (
            lambda: {"optimizer": ShardedRun(shapes=fewer, blank=True).advance().optimizer},
            "optimizer.state.4.momentum_buffer has shape",
        ),
        "a tensor for a dict": (
            lambda: run_with(schedule=torch.ones(2)),
            "schedule is a tensor in the target, but a dict",
        ),
        "a dict for a tensor": (lambda: run_with(position={"a": 1}), "position is a dict in the target, but a tensor"),
        "a dict for an optimizer": (
            lambda: {"model": ShardedRun(blank=True).optimizer},
            "model is an optimizer in the target, but no state_dict of one in the checkpoint",
        ),
        "a list for a dict": (
            lambda: run_with(model=[torch.ones(2)]),
            "model is a value of type list in the target, but a dict",
        ),
    }


@pytest.mark.parametrize("case", misfits())
def test_what_does_not_fit_is_named_and_nothing_is_changed_on_any_rank(tmp_path: Path, case: str) -> None:
    save(tmp_path, 2)
    make, said = misfits()[case]

    def work(rank: int, count: int) -> None:
        run = ShardedRun(mesh_of_all(), blank=True)
        targets = run.targets()
        try:
            checkpointer(tmp_path).load(into=make() if rank == 1 else targets)
        finally:
            for parameter in run.model:
                assert not parameter.to_local().any()
            assert not run.optimizer.state

    first, second = rank_endings(2, work)
    assert first.error_type is fp.PeerError, first.trace
    assert first.error_attributes["rank"] == 1
    assert second.error_type is fp.ConfigError, second.trace
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(second.error_text)
    assert "not changed" in second.error_text


def test_state_whose_sharding_nobody_knows_wants_a_step_first(tmp_path: Path) -> None:
    class Factored(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 1.0})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["row"] = torch.full((parameter.shape[0],), 3.0)

    def work(rank: int, count: int) -> None:
        parameter = torch.nn.Parameter(sharded(torch.ones(4, 6), mesh_of_all(), None))
        optimizer = Factored([parameter])
        optimizer.step()
        with checkpointer(tmp_path, sharded=True) as checkpoints:
            checkpoints.save(1, {"optimizer": optimizer.state_dict()}).result()
        with pytest.raises(fp.ConfigError, match="one step of the optimizer"):
            checkpointer(tmp_path).load(into={"optimizer": Factored([parameter])})
        optimizer.state[parameter]["row"].zero_()
        checkpointer(tmp_path).load(into={"optimizer": optimizer})
        assert_same(optimizer.state[parameter]["row"], torch.full((4,), 3.0))

    run_ranks(2, work)


def test_one_rank_looks_at_all_files_of_a_step(tmp_path: Path) -> None:
    """Each of 4,096 ranks that looks at 4,096 parts asks a file server 16 million times."""
    save(tmp_path, 4)

    def work(rank: int, _count: int) -> None:
        looks: list[str] = []
        stat = os.stat

        def counting(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            looks.append(str(path))
            return stat(path, *arguments, **options)

        run = ShardedRun(*WAYS["rows"](), blank=True)
        with checkpointer(tmp_path) as checkpoints, pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "stat", counting)
            checkpoints.load(into=run.targets())
        parts = [look for look in looks if look.endswith((".distcp", ".pt"))]
        assert len(parts) == (0 if rank else 8), parts

    run_ranks(4, work)


def test_map_location_is_a_device(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(1, {"a": torch.ones(2)}).result()
        assert checkpoints.load(map_location="cpu")["a"].device.type == "cpu"
        with pytest.raises(fp.ConfigError, match="a device"):
            checkpoints.load(map_location=lambda storage, _: storage)


# --- which kind of step it is, is found out


def test_the_step_says_whether_it_is_sharded_not_who_loads_it(tmp_path: Path) -> None:
    replicated, in_parts = tmp_path / "replicated", tmp_path / "sharded"
    run = ShardedRun().advance(1)
    for root, is_sharded in ((replicated, False), (in_parts, True)):
        with fp.Checkpointer(root, sharded=is_sharded) as checkpoints:
            checkpoints.save(1, run.state())
    for root in (replicated, in_parts):
        for is_sharded in (False, True):
            blank = ShardedRun(blank=True)
            found = fp.Checkpointer(root, sharded=is_sharded).load(into=blank.targets(), keys=["position"])
            assert_same(found["position"], torch.arange(50) + 1)
            assert_same(dict(blank.model.state_dict()), expected(1)["model"])
            assert_same(blank.optimizer.state_dict(), expected(1)["optimizer"])


@pytest.mark.parametrize("has_state", [False, True])
def test_a_step_that_is_not_sharded_is_cut_for_the_ranks_that_load_it(tmp_path: Path, has_state: bool) -> None:
    run = ShardedRun().advance(1)
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {**run.state(), "alone": torch.arange(12.0).reshape(6, 2)})

    def work(rank: int, count: int) -> list[Any]:
        blank = ShardedRun(*WAYS["rows"](), blank=True)
        if has_state:
            blank.advance()
        alone = sharded(torch.zeros(6, 2), mesh_of_all(), None)
        checkpointer(tmp_path).load(into={**blank.targets(), "alone": alone})
        whole_ones = whole([dict(blank.model.state_dict()), blank.optimizer.state_dict(), alone])
        blank.step = 1
        blank.advance()  # the optimizer has all that it needs
        return [*whole_ones, dict(whole(blank.model.state_dict()))]

    for model, optimizer, alone, after in run_ranks(2, work):
        assert_same(model, expected(1)["model"])
        assert_same(optimizer, expected(1)["optimizer"])
        assert_same(alone, torch.arange(12.0).reshape(6, 2))
        assert_same(after, expected(2)["model"])


def test_one_root_may_hold_both_kinds(tmp_path: Path) -> None:
    run = ShardedRun()
    for step in (1, 2, 3):
        with fp.Checkpointer(tmp_path, sharded=step == 2, keep=2) as checkpoints:
            checkpoints.save(step, run.advance().state())
    reader = fp.Checkpointer(tmp_path)
    assert reader.steps() == [2, 3]
    for step in (2, 3):
        found = reader.load(step)
        assert_same({**found, "model": dict(found["model"])}, expected(step))


# --- damage


def damage_by_byte(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[len(data) // 4] ^= 1
    part.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "cut off": (lambda part: part.write_bytes(part.read_bytes()[:1000]), {}),
    "missing": (lambda part: part.unlink(), {}),
    "a byte of a tensor that is read whole": (damage_by_byte, {}),
    "a byte, looked for first": (damage_by_byte, {"verify": True}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_ranks_go_back_from_a_damaged_step_to_the_one_before(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 2, steps=2)
    spoil, options = DAMAGES[damage]
    spoil(tmp_path / "step-00000002" / "__1_0.distcp")

    def work(rank: int, count: int) -> int:
        run = ShardedRun(mesh_of_all(), blank=True)
        with pytest.warns(RuntimeWarning, match="step 2 cannot be loaded"):
            found = checkpointer(tmp_path).load(into=run.targets(), **options)
        assert_same(dict(whole(run.model.state_dict())), expected(1)["model"])
        assert_same(whole(run.optimizer.state_dict()), expected(1)["optimizer"])
        return int(found["step"])

    assert run_ranks(2, work) == [1, 1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_says_which_part_and_who_wrote_it(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 2)
    spoil, options = DAMAGES[damage]
    spoil(tmp_path / "step-00000001" / "__1_0.distcp")
    with pytest.raises((fp.CorruptionError, fp.CheckpointNotFoundError)) as caught:
        fp.Checkpointer(tmp_path).load(1, **options)
    assert "__1_0.distcp" in str(caught.value)
    assert "rank 1 wrote" in str(caught.value)


def test_with_verify_nothing_is_changed_when_a_byte_is_wrong_and_without_it_that_is_said(tmp_path: Path) -> None:
    save(tmp_path, 2)
    damage_by_byte(tmp_path / "step-00000001" / "__1_0.distcp")
    run = ShardedRun(blank=True)
    with pytest.raises(fp.ChecksumError) as caught:
        fp.Checkpointer(tmp_path).load(1, into=run.targets(), verify=True)
    assert "overwritten" not in str(caught.value)
    assert not any(parameter.any() for parameter in run.model)
    with pytest.raises(fp.ChecksumError, match="partly overwritten") as caught:
        fp.Checkpointer(tmp_path).load(1, into=run.targets())
    assert "model" in str(caught.value)


def test_metadata_of_another_save_or_with_a_wrong_byte_are_not_followed(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        for step, names in ((1, "ab"), (2, "ba")):  # as long as each other
            checkpoints.save(step, {name: torch.full((3,), float(step)) for name in names}).result()
    older, newer = (tmp_path / f"step-0000000{step}" / ".metadata" for step in (1, 2))
    whole = newer.read_bytes()
    byte_by_byte = bytearray(whole)
    byte_by_byte[len(whole) // 2] ^= 1
    for wrong in (older.read_bytes(), bytes(byte_by_byte)):
        assert len(wrong) == len(whole)
        newer.write_bytes(wrong)
        with pytest.raises(fp.ChecksumError, match=r"\.metadata"):
            fp.Checkpointer(tmp_path).load(2)
        with pytest.warns(RuntimeWarning, match="step 2 cannot be loaded"):
            assert_same(fp.Checkpointer(tmp_path).load(), {name: torch.full((3,), 1.0) for name in "ab"})


def test_a_rank_that_dies_while_it_loads_is_noticed_by_the_others(tmp_path: Path) -> None:
    class Dies:
        def load_state_dict(self, state: Any) -> None:
            kill_this_process()

    class Lives:
        def load_state_dict(self, state: Any) -> None:
            assert state["last"] == 1

    save(tmp_path, 2)

    def work(rank: int, count: int) -> None:
        checkpointer(tmp_path).load(into={"schedule": Dies() if rank else Lives()})

    first, second = rank_endings(2, work)
    assert second.signal == signal.SIGKILL
    assert first.error_type is not None
    assert issubclass(first.error_type, fp.PeerError), first.trace


def test_a_target_that_refuses_its_value_is_named(tmp_path: Path) -> None:
    class Refuses:
        def load_state_dict(self, state: Any) -> None:
            raise KeyError(state["last"])

    save(tmp_path, 1)
    with pytest.raises(fp.ConfigError, match=r"schedule refused what .* KeyError: 1; partly overwritten"):
        fp.Checkpointer(tmp_path).load(into={"schedule": Refuses()})
