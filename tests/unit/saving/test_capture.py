"""What kind each storage of a save is, what becomes of each kind, and how much memory captured bytes may take.

Whole saves during training: test_overlap_correctness and its sisters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist.saving import capture
from fastpersist.saving.capture import Capture, Kind
from fastpersist.saving.containers import TorchZipContainer, container_for
from fastpersist.saving.ownership import Owners, storage_keys
from fastpersist.transfer import arena
from fastpersist.transfer.arena import Arena

GIB = 1 << 30


def key_of(tensor: torch.Tensor) -> int:
    (key,) = storage_keys(tensor)
    return key


def captured(owners: Owners, obj: object, *, max_bytes: int | None = None, **options: Any) -> Capture:
    """Sort an object's bytes, as save() does; `kinds` says what became of them."""
    taken = Capture(owners, Arena(max_bytes), **options)
    taken.add(container_for(obj, "state.pt", checksum=True))
    return taken


def kinds_by_name(owners: Owners, tensors: dict[str, torch.Tensor]) -> dict[str, Kind]:
    taken = captured(owners, tensors)
    kinds = dict(zip(tensors, taken.kinds, strict=True))
    taken.release()
    return kinds


# --- kinds


def test_kinds_of_a_usual_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    frozen, loose = torch.ones(3), torch.ones(3)
    kinds = kinds_by_name(
        Owners(optimizer, frozen),
        {**model.state_dict(), "lr": optimizer.param_groups[0]["lr"], "frozen": frozen, "loose": loose},
    )
    assert {name for name, kind in kinds.items() if kind == Kind.STABLE} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert {name for name, kind in kinds.items() if kind == Kind.CONSTANT} == {"frozen"}
    assert {name for name, kind in kinds.items() if kind == Kind.VOLATILE} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
        "lr",
        "loose",
    }


def test_tensors_without_a_counter_are_volatile() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["cache"] = tensor
    kinds = kinds_by_name(Owners(optimizer, tensor), {"parameter": parameter, "cache": tensor})
    assert kinds == {"parameter": Kind.STABLE, "cache": Kind.VOLATILE}


class WithoutHooks(torch.optim.SGD):
    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state = {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Announces itself to nobody."""


class TrainsAndEvaluates(torch.optim.SGD):
    def train(self) -> None:
        """Schedule-free optimizers swap parameters here."""

    def eval(self) -> None:
        """And here."""


@pytest.mark.parametrize(
    ("make", "reason"), [(WithoutHooks, "no hooks"), (lambda p: TrainsAndEvaluates(p, lr=0.1), "train")]
)
def test_optimizers_whose_steps_do_not_tell_all_own_nothing_stable(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], reason: str
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = make([parameter])
    found, why_not = Owners(optimizer).stable()
    assert not found.tensors
    assert reason in why_not
    assert type(optimizer).__name__ in why_not
    assert captured(Owners(optimizer), {"p": parameter}).why_volatile == why_not
    found, why_not = Owners(optimizer, gate="manual").stable()
    assert set(found.held) == {key_of(parameter)}
    assert why_not == ""


def test_one_optimizer_without_hooks_does_not_spoil_another() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    owners = Owners([WithoutHooks(parameters[:1]), torch.optim.SGD(parameters[1:], lr=0.1)])
    assert kinds_by_name(owners, {"a": parameters[0], "b": parameters[1]}) == {"a": Kind.VOLATILE, "b": Kind.STABLE}


def test_what_changed_before_the_gate_is_volatile_as_long_as_it_lives() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    owners = Owners(torch.optim.SGD(parameters, lr=0.1))
    state = dict(zip("abc", parameters, strict=True))
    torn = captured(owners, state)
    for changed in parameters[:2]:
        changed.data = changed.data  # not a change
        changed.detach().add_(1)
    with pytest.raises(fp.TornStateError, match=r"^a was changed in place.*wait_captured"):
        torn.check()
    torn.release()
    volatile = {"a": Kind.VOLATILE, "b": Kind.VOLATILE, "c": Kind.STABLE}
    assert kinds_by_name(owners, state) == volatile
    gc.collect()
    assert kinds_by_name(owners, state) == volatile
    parameters[0].data = torch.ones(3)  # another storage
    assert kinds_by_name(owners, state) == {**volatile, "a": Kind.STABLE}


def test_storages_that_died_are_forgotten() -> None:
    for _ in range(20):
        parameter = torch.nn.Parameter(torch.zeros(3))
        owners = Owners(torch.optim.SGD([parameter], lr=0.1))
        torn = captured(owners, {"p": parameter})
        assert torn.kinds == [Kind.STABLE]  # though one that was torn may have had its address
        parameter.detach().add_(1)
        assert torn.is_torn()
        torn.release()


def test_a_change_after_the_capture_is_none() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    taken = captured(Owners(torch.optim.SGD([parameter], lr=0.1)), {"p": parameter})
    assert not taken.captured()
    taken.wait_captured()
    assert taken.captured()
    parameter.detach().add_(1)
    taken.check()
    taken.release()


def test_only_what_is_held_and_not_released_is_waited_for() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    taken = captured(Owners(torch.optim.SGD([parameter], lr=0.1)), {"p": parameter})
    assert not capture._pending
    taken.hold()
    assert capture._pending == [taken]
    taken.release()
    assert not capture._pending
    nothing_stable = captured(Owners(), {"p": parameter})
    nothing_stable.hold()
    assert not capture._pending


def test_time_at_the_gate_is_told() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20))
    told: list[float] = []
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    taken = captured(Owners(optimizer), {"p": parameter}, on_gate=told.append)
    taken.hold()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.step()
    taken.release()
    assert len(told) == 1
    assert 0 < told[0] <= taken.capture_s


def test_paranoid_samples_small_and_odd_sources() -> None:
    sizes = [0, 1, 2, 63, 64, 65, 1000]
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    owners = Owners(torch.optim.SGD(parameters, lr=0.1))
    for changed in (False, True):
        taken = captured(owners, parameters, paranoid=True)
        if changed:
            parameters[-1].data.add_(1)
        assert taken.is_torn() == changed
        taken.release()


def test_paranoid_without_anything_stable_looks_at_nothing() -> None:
    taken = captured(Owners(), {"a": torch.ones(3), "b": torch.empty(0)}, paranoid=True)
    assert not taken.is_torn()
    taken.release()


def test_names_of_all_tensors_in_a_source_are_in_the_message() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    owners = Owners(torch.optim.SGD([parameter], lr=0.1))
    taken = captured(owners, {"model": {"whole": parameter.detach(), "half": parameter.detach()[:2]}})
    parameter.detach().zero_()
    with pytest.raises(fp.TornStateError, match=r"model\.whole, model\.half"):
        taken.check()
    taken.release()


def test_a_container_is_all_that_a_capture_needs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    container = TorchZipContainer({"p": parameter, "again": parameter}, "state", checksum=True)
    taken = Capture(Owners(torch.optim.SGD([parameter], lr=0.1)), Arena())
    taken.add(container)
    assert taken.remaining_bytes("stable") == 16
    assert taken.remaining_bytes("volatile") == 0
    taken.wait_captured()
    assert taken.remaining_bytes("stable") == 0
    assert taken.count("stable_copied_bytes") == 16
    taken.release()


# --- memory

BLOCK_BYTES = 2 << 20


def captured_bytes(taken: Capture) -> int:
    taken.copy_volatile(wait=False)
    copied_bytes = taken.count("volatile_copied_bytes")
    taken.release()
    return copied_bytes


@pytest.mark.parametrize(("max_bytes", "copied_bytes"), [(0, 0), (BLOCK_BYTES - 1, 0), (3 * BLOCK_BYTES, 3)])
def test_an_arena_holds_what_it_is_told_to(max_bytes: int, copied_bytes: int) -> None:
    state = {"a": torch.zeros(5 * BLOCK_BYTES, dtype=torch.uint8)}
    if copied_bytes:
        copied_bytes *= BLOCK_BYTES
    assert captured_bytes(captured(Owners(), state, max_bytes=max_bytes)) == copied_bytes


def test_an_arena_without_a_limit_holds_the_whole_state() -> None:
    state = [torch.zeros(size, dtype=torch.uint8) for size in (1, 100, BLOCK_BYTES + 1, 5 * BLOCK_BYTES, *[65] * 1000)]
    assert captured_bytes(captured(Owners(), state)) == sum(tensor.nbytes for tensor in state)


def test_an_arena_without_a_limit_grows_with_the_state_up_to_half_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "available_host_bytes", lambda: 8 * BLOCK_BYTES)
    memory = Arena()
    for size, room in [(BLOCK_BYTES, BLOCK_BYTES), (20 * BLOCK_BYTES, 4 * BLOCK_BYTES)]:
        taken = Capture(Owners(), memory)
        taken.add(container_for([torch.zeros(size, dtype=torch.uint8)], "state.pt", checksum=True))
        assert captured_bytes(taken) == room


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(fp.ConfigError, match="max_host_bytes"):
        Arena(-1)


def test_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Arena(8 * BLOCK_BYTES)
    native = memory.for_state(0)
    state = [torch.zeros(4 * BLOCK_BYTES, dtype=torch.uint8)]
    mapped = set()
    for _ in range(50):
        taken = Capture(Owners(), memory)
        taken.add(container_for(state, "state.pt", checksum=True))
        assert taken.copy_volatile(wait=False)
        assert native.used_bytes == 4 * BLOCK_BYTES
        taken.release()
        assert native.used_bytes == 0
        mapped.add(native.mapped_bytes)
    assert len(mapped) == 1
    assert memory.for_state(GIB) is native
