"""Who owns which storage and so what kind each is, how much memory captured bytes may take, and what each kind means.

Whole saves beside training: test_overlap_correctness and its sisters.
"""

from __future__ import annotations

import builtins
import gc
import io
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import small_model, train

import fastpersist as fp
from fastpersist.saving import capture
from fastpersist.saving.capture import Capture, Kind
from fastpersist.saving.containers import TorchZipContainer, container_for
from fastpersist.saving.ownership import Owners, storage_keys
from fastpersist.transfer import arena
from fastpersist.transfer.arena import Arena, available_host_bytes

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


# --- owners


def test_without_an_optimizer_nothing_is_stable() -> None:
    owners = Owners()
    assert owners.optimizers() == []
    assert owners.stable() == ({}, "no optimizer was given")
    assert owners.constant() == {}


def test_parameters_and_state_are_stable_as_they_are_at_each_save() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    owners = Owners(optimizer)
    found, why_not = owners.stable()
    assert set(found) == {key_of(parameter) for parameter in model.parameters()}
    assert why_not == ""
    train(model, optimizer)
    found, _ = owners.stable()
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    assert len(state) == 12
    assert set(found) == {key_of(tensor) for tensor in (*model.parameters(), *state)}
    late = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [late]})
    assert key_of(late) in owners.stable()[0]


def test_tensors_are_found_anywhere_inside_state() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    inside = [torch.zeros(n) for n in range(1, 5)]
    optimizer.state[parameter] = {"a": [inside[0], (inside[1], {"b": inside[2]})], "c": 5, "d": None, "e": "text"}
    optimizer.state["all"] = OrderedDict(f=inside[3])  # type: ignore[index]
    assert set(Owners(optimizer).stable()[0]) == {key_of(tensor) for tensor in (parameter, *inside)}


class Wrapper:
    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def test_wrappers_are_taken_off() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    assert Owners(Wrapper(optimizer)).optimizers() == [optimizer]
    assert Owners(Wrapper(Wrapper(optimizer))).optimizers() == [optimizer]
    assert Owners([Wrapper(optimizer), other]).optimizers() == [optimizer, other]
    assert Owners((optimizer,)).optimizers() == [optimizer]
    assert Owners([]).optimizers() == []


def test_what_wraps_itself_is_refused() -> None:
    endless = Wrapper(None)
    endless.optimizer = endless
    with pytest.raises(fp.ConfigError, match="Wrapper"):
        Owners(endless)


@pytest.mark.parametrize("nonsense", [5, "adam", object(), torch.zeros(3), {"a": 1}, [None], Wrapper(7)])
def test_what_is_no_optimizer_is_refused(nonsense: object) -> None:
    with pytest.raises(fp.ConfigError, match=r"torch\.optim\.Optimizer"):
        Owners(nonsense)


@pytest.mark.parametrize("nonsense", [5, "text", b"bytes", [torch.zeros(3), None], {"a": 1.5}])
def test_what_is_no_tensor_is_no_constant(nonsense: object) -> None:
    with pytest.raises(fp.ConfigError, match="constant="):
        Owners(None, nonsense)


@pytest.mark.parametrize("gate", ["", "Optimizer", "auto", None])
def test_unknown_gate_is_refused(gate: Any) -> None:
    with pytest.raises(fp.ConfigError, match="gate"):
        Owners(None, (), gate)


def as_module(module: torch.nn.Module) -> object:
    return module


def as_generator(module: torch.nn.Module) -> object:
    return (tensor for tensor in [*module.parameters(), *module.buffers()])


def as_state_dict(module: torch.nn.Module) -> object:
    return module.state_dict()


def as_nest(module: torch.nn.Module) -> object:
    return [{"a": list(module.parameters())}, iter(()), (tensor for tensor in module.buffers())]


@pytest.mark.parametrize("named", [as_module, as_generator, as_state_dict, as_nest])
def test_constants_are_found_at_every_save(named: Callable[[torch.nn.Module], object]) -> None:
    module = torch.nn.BatchNorm1d(7)
    owners = Owners(None, named(module))
    expected = {key_of(tensor) for tensor in module.state_dict().values()}
    assert len(expected) == 5
    for _ in range(2):
        assert set(owners.constant()) == expected


@pytest.mark.parametrize("layout", ["sparse", "meta"])
def test_tensors_without_bytes_of_their_own_have_no_key(layout: str) -> None:
    tensor = torch.eye(3).to_sparse() if layout == "sparse" else torch.zeros(3, device="meta")
    assert isinstance(storage_keys(tensor), list)  # and no error


def test_views_have_the_key_of_what_they_view() -> None:
    base = torch.nn.Parameter(torch.zeros(10, 10))
    assert key_of(base) == key_of(base.detach()) == key_of(base[3, 2:4]) == key_of(base.t())
    assert key_of(base) != key_of(base.clone())


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
    assert not found
    assert reason in why_not
    assert type(optimizer).__name__ in why_not
    assert captured(Owners(optimizer), {"p": parameter}).why_volatile == why_not
    found, why_not = Owners(optimizer, gate="manual").stable()
    assert set(found) == {key_of(parameter)}
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


# --- what is available


class Files:
    """Stands in for /proc and /sys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
        real = builtins.open

        def open_file(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if not str(path).startswith(("/proc/", "/sys/")):
                return real(path, *arguments, **keywords)
            self.asked.append(str(path))
            if str(path) not in files:
                raise FileNotFoundError(path)
            return io.StringIO(files[str(path)])

        self.asked: list[str] = []
        monkeypatch.setattr(builtins, "open", open_file)


MEMINFO = {"/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable:   {8 << 20} kB\nBuffers: 1 kB\n"}
UNIFIED = "/sys/fs/cgroup"
LEGACY = "/sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (MEMINFO, 8 * GIB),
        ({**MEMINFO, "/proc/self/cgroup": "0::/\n"}, 8 * GIB),
        (
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/\n",
                f"{UNIFIED}/memory.max": f"{5 * GIB}\n",
                f"{UNIFIED}/memory.current": f"{2 * GIB}\n",
            },
            3 * GIB,
        ),
        (  # what only caches files is as good as free
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/job\n",
                f"{UNIFIED}/job/memory.max": f"{5 * GIB}\n",
                f"{UNIFIED}/job/memory.current": f"{5 * GIB}\n",
                f"{UNIFIED}/job/memory.stat": f"anon {GIB}\nfile {4 * GIB}\nshmem {GIB}\n"
                f"inactive_file {2 * GIB}\nactive_file {GIB}\nworkingset_refault_file 7\n",
            },
            3 * GIB,
        ),
        (
            {
                **MEMINFO,
                "/proc/self/cgroup": "7:memory:/job\n",
                f"{LEGACY}/job/memory.limit_in_bytes": f"{5 * GIB}\n",
                f"{LEGACY}/job/memory.usage_in_bytes": f"{5 * GIB}\n",
                f"{LEGACY}/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
            },
            2 * GIB,
        ),
        (  # the parent's limit counts, and "max" is none
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/user.slice/job\n",
                f"{UNIFIED}/user.slice/job/memory.max": "max\n",
                f"{UNIFIED}/user.slice/job/memory.current": f"{GIB}\n",
                f"{UNIFIED}/user.slice/memory.max": f"{6 * GIB}\n",
                f"{UNIFIED}/user.slice/memory.current": f"{5 * GIB}\n",
            },
            GIB,
        ),
        (  # over its limit: nothing, not less than nothing
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/job\n",
                f"{UNIFIED}/job/memory.max": f"{GIB}\n",
                f"{UNIFIED}/job/memory.current": f"{2 * GIB}\n",
            },
            0,
        ),
        (  # the older hierarchy, among others; an unlimited one has a huge number
            {
                **MEMINFO,
                "/proc/self/cgroup": "9:cpu,cpuacct:/a\n7:hugetlb,memory:/docker/b:c\n1:name=systemd:/x\n0::/\n",
                f"{LEGACY}/docker/b:c/memory.limit_in_bytes": f"{4 * GIB}\n",
                f"{LEGACY}/docker/b:c/memory.usage_in_bytes": f"{2 * GIB}\n",
                f"{LEGACY}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{LEGACY}/memory.usage_in_bytes": f"{9 * GIB}\n",
            },
            2 * GIB,
        ),
        (  # inside a container the group's own path may not be there, its root is
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/../../host/path\n",
                f"{UNIFIED}/memory.max": f"{2 * GIB}\n",
                f"{UNIFIED}/memory.current": "0\n",
            },
            2 * GIB,
        ),
        ({**MEMINFO, "/proc/self/cgroup": "0::/job\n", f"{UNIFIED}/job/memory.max": "garbage\n"}, 8 * GIB),
    ],
)
def test_available_memory_is_what_the_tightest_limit_leaves(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], available: int
) -> None:
    Files(monkeypatch, files)
    assert available_host_bytes() == available


def test_without_proc_there_is_a_number_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    Files(monkeypatch, {})
    assert available_host_bytes() > 0


def test_available_memory_of_this_machine_is_plausible() -> None:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 <= available_host_bytes() <= total_bytes
    assert Path("/proc/meminfo").exists()
