"""fp.load_into fills tensors in place as load_state_dict would, and changes nothing when anything does not fit."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.archives import flip_bit, record_places, save_aligned
from support.leaks import no_leaks
from support.sameness import assert_same, portrait
from support.specimens import SPECIMENS, Network, train

import fastpersist as fp
from fastpersist.loading.restore import load_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with no_leaks(tmp_path_factory.getbasetemp()):
        yield


def trained() -> Network:
    torch.manual_seed(3)
    network = Network()
    train(network, torch.optim.SGD(network.parameters(), lr=0.5))
    return network


def refused(path: Path, target: Any, match: str, error: type[Exception] = fp.ConfigError, **options: Any) -> str:
    """Expect a refusal that leaves the target as it was, down to its version counters; return the message."""
    before = portrait(target)
    versions = [tensor._version for tensor in tensors_in(target)]
    with pytest.raises(error, match=match) as raised:
        fp.load_into(path, target, **options)
    assert portrait(target) == before
    assert [tensor._version for tensor in tensors_in(target)] == versions
    return str(raised.value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from value.state_dict(keep_vars=True).values()
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


# --------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("suffix", ["pt", "safetensors", "stock.pt", "stock.safetensors"])
def test_module_is_filled_in_place(suffix: str, verify: bool, tmp_path: Path) -> None:
    source, target, path = trained(), Network(), tmp_path / f"model.{suffix}"
    state = source.state_dict()
    if "safetensors" in suffix:
        del state["head.weight"]  # tied; the format cannot say so
    if suffix == "stock.pt":
        save_aligned(state, path, alignment=64)
    elif suffix == "stock.safetensors":
        save_file(state, path)
    else:
        fp.save(state, path)
    if verify and suffix == "stock.safetensors":
        refused(path, target, "without checksums", fp.UnsupportedError, strict=False, verify=True)
        return
    pointers = [tensor.data_ptr() for tensor in tensors_in(target)]
    fp.load_into(path, target, strict="safetensors" not in suffix, verify=verify)
    assert_same(target.state_dict(), source.state_dict())
    assert [tensor.data_ptr() for tensor in tensors_in(target)] == pointers
    assert target.head.weight is target.embedding.weight


def test_optimizer_state_is_filled_in_place(tmp_path: Path) -> None:
    source = trained()
    optimizer = torch.optim.AdamW(source.parameters())
    train(source, optimizer)
    fp.save({"model": source.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "all.pt")
    network = Network()
    other = torch.optim.AdamW(network.parameters())
    train(network, other, steps=1)
    fp.load_into(tmp_path / "all.pt", {"model": network, "optimizer": other.state_dict(), "step": 0})
    assert_same(network.state_dict(), source.state_dict())
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert_same(mine, theirs)


def test_nested_containers_are_filled(tmp_path: Path) -> None:
    Pair = collections.namedtuple("Pair", "left right")
    source = {"list": [torch.ones(2), {"deep": torch.full((3,), 5)}], 7: (torch.zeros(1), 3), "text": "kept"}
    fp.save(source, tmp_path / "model.pt")
    target = {
        "list": [torch.zeros(2), {"deep": torch.zeros(3, dtype=torch.int64)}],
        7: Pair(torch.ones(1), "old"),
        "text": "old",
    }
    fp.load_into(tmp_path / "model.pt", target)
    assert target["list"][0].tolist() == [1, 1]
    assert target["list"][1]["deep"].tolist() == [5, 5, 5]
    assert target[7] == Pair(torch.zeros(1), 3)
    assert target["text"] == "kept"


def test_single_tensor_is_filled(tmp_path: Path) -> None:
    fp.save(torch.arange(9), tmp_path / "model.pt")
    target = torch.zeros(9, dtype=torch.int64)
    fp.load_into(tmp_path / "model.pt", target)
    assert target.tolist() == list(range(9))


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "every second row": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
    "inner columns": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "offset": lambda t: torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("target_form", FORMS)
@pytest.mark.parametrize("source_form", FORMS)
def test_strides_and_dtypes_are_converted_as_load_state_dict_does(
    source_form: str, target_form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    values = torch.arange(1200, dtype=torch.float32).view(30, 40).fmod(251) - 100.5
    fp.save({"w": FORMS[source_form](values)}, tmp_path / "model.pt", durable=False)
    target = FORMS[target_form](torch.zeros(30, 40, dtype=dtype))
    stride, offset = target.stride(), target.storage_offset()
    around = target.untyped_storage().nbytes() - target.nbytes
    fp.load_into(tmp_path / "model.pt", {"w": target})
    assert torch.equal(target, values.to(dtype))
    assert (target.stride(), target.storage_offset()) == (stride, offset)
    if around:
        whole = torch.empty(0, dtype=dtype).set_(target.untyped_storage())
        assert whole.double().abs().sum() == target.double().abs().sum()  # nothing was written between its rows


def test_conversion_larger_than_the_chunks(tmp_path: Path) -> None:
    values = torch.arange(5_000_000)
    fp.save([torch.zeros(3, dtype=torch.uint8), values], tmp_path / "model.pt", durable=False)
    target = [torch.ones(3), torch.zeros(5_000_000, dtype=torch.float64)]
    fp.load_into(tmp_path / "model.pt", target)
    assert torch.equal(target[1], values.double())
    assert target[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("alignment", [1, 64])
def test_unaligned_elements_are_converted(alignment: int, tmp_path: Path) -> None:
    values = torch.randn(3_000_000)
    save_aligned([torch.zeros(3, dtype=torch.uint8), values], tmp_path / "model.pt", alignment=alignment)
    target = [torch.ones(3), torch.zeros(3_000_000, dtype=torch.float64)]
    fp.load_into(tmp_path / "model.pt", target)
    assert torch.equal(target[1], values.double())


def test_views_of_one_storage_fill_separate_tensors(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    fp.save([base[10:20], base.view(10, 10)[:, 3], base], tmp_path / "model.pt")
    target = [torch.zeros(10), torch.zeros(10), torch.zeros(100)]
    fp.load_into(tmp_path / "model.pt", target)
    assert_same([part.tolist() for part in target], [base[10:20].tolist(), base[3::10].tolist(), base.tolist()])


def test_empty_and_scalar_tensors_are_filled(tmp_path: Path) -> None:
    fp.save([torch.empty(0, 3), torch.tensor(2.5), torch.ones(1)], tmp_path / "model.pt")
    target = [torch.empty(0, 3), torch.tensor(0.0), torch.zeros(1)]
    fp.load_into(tmp_path / "model.pt", target)
    assert target[1].item() == 2.5
    assert target[2].item() == 1


# --------------------------------------------------------------------------------------------- autograd


def test_leaf_parameters_are_filled_and_autograd_notices(tmp_path: Path) -> None:
    fp.save({"w": torch.full((3,), 2.0)}, tmp_path / "model.pt")
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    version = weight._version
    fp.load_into(tmp_path / "model.pt", {"w": weight})
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fresh_forward_and_backward_work_afterwards(tmp_path: Path) -> None:
    fp.save(trained().state_dict(), tmp_path / "model.pt")
    network = Network()
    fp.load_into(tmp_path / "model.pt", network)
    network(torch.arange(5)).sum().backward()
    assert network.embedding.weight.grad is not None


def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with torch.inference_mode():
        target = {"w": torch.zeros(3)}
        fp.load_into(tmp_path / "model.pt", target)
    assert target["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("form", FORMS)
def test_default_device_does_not_matter(form: str, tmp_path: Path) -> None:
    values = torch.arange(12.0).view(3, 4)
    fp.save({"w": FORMS[form](values), "v": values}, tmp_path / "model.pt")
    target = {"w": torch.zeros(3, 4), "v": FORMS[form](torch.zeros(3, 4, dtype=torch.float64))}
    with torch.device("meta"):
        fp.load_into(tmp_path / "model.pt", target)
    assert torch.equal(target["w"], values)
    assert torch.equal(target["v"], values.double())


# --------------------------------------------------------------------------------------------- tied memory


def test_tied_target_and_tied_file(tmp_path: Path) -> None:
    source, target = trained(), Network()
    fp.save(source.state_dict(), tmp_path / "model.pt")
    fp.load_into(tmp_path / "model.pt", target, verify=True)
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.head.weight, source.head.weight)


def test_tied_target_and_untied_file_end_as_load_state_dict_leaves_them(tmp_path: Path) -> None:
    # 3 chunks each, so that two reads into one memory would mix.
    first, last = torch.full((6_000_000,), 1.0), torch.full((6_000_000,), 2.0)
    fp.save({"b": last, "a": first}, tmp_path / "model.pt", durable=False)
    target = torch.zeros(6_000_000)
    fp.load_into(tmp_path / "model.pt", {"a": target, "b": target})
    assert target.unique().tolist() == [2.0]


# --------------------------------------------------------------------------------------------- extra state


class Extra(torch.nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


EXTRA_STATES: dict[str, Any] = {
    "plain": {"scale": 2.0, "history": [1, 2]},
    "none": None,
    "tensor": torch.arange(4.0),
    "tensors inside": {"amax": torch.arange(4.0), "step": 3},
}


@pytest.mark.parametrize("kind", EXTRA_STATES)
def test_extra_state_is_set_as_load_state_dict_sets_it(kind: str, tmp_path: Path) -> None:
    source = torch.nn.Sequential(Extra(EXTRA_STATES[kind]), torch.nn.Linear(2, 2))
    fp.save(source.state_dict(), tmp_path / "model.pt")
    stock = torch.nn.Sequential(Extra("old"), torch.nn.Linear(2, 2))
    stock.load_state_dict(torch.load(tmp_path / "model.pt"))
    target = torch.nn.Sequential(Extra("old"), torch.nn.Linear(2, 2))
    fp.load_into(tmp_path / "model.pt", target)
    assert_same(target.state_dict(), stock.state_dict())


# --------------------------------------------------------------------------------------------- refusals


def test_every_difference_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3), "b": torch.ones(2), "extra": torch.ones(1), "same": torch.ones(5)}, tmp_path / "m.pt")
    target = {"a": torch.zeros(4), "b": torch.zeros(2, 1), "missing": torch.zeros(1), "same": torch.zeros(5)}
    message = refused(tmp_path / "m.pt", target, "was not changed")
    for part in (
        "a has shape (4,) in the target, (3,) in the file",
        "b has shape (2, 1) in the target, (2,) in the file",
        "missing is in the target, but not in the file",
        "extra is in the file, but not in the target",
    ):
        assert part in message
    assert "same" not in message


def test_long_lists_of_differences_are_cut(tmp_path: Path) -> None:
    fp.save({}, tmp_path / "model.pt")
    message = refused(tmp_path / "model.pt", {str(i): torch.zeros(1) for i in range(50)}, "was not changed")
    assert "40 more" in message


def test_without_strict_the_common_part_is_filled(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3), "extra": torch.ones(1)}, tmp_path / "model.pt")
    target = {"a": torch.zeros(3), "missing": torch.zeros(1)}
    fp.load_into(tmp_path / "model.pt", target, strict=False)
    assert target["a"].tolist() == [1, 1, 1]
    assert target["missing"].tolist() == [0]


def test_without_strict_shapes_must_agree_all_the_same(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", {"a": torch.zeros(4)}, "shape", strict=False)


def test_module_with_other_names_is_refused(tmp_path: Path) -> None:
    fp.save(trained().state_dict(), tmp_path / "model.pt")
    message = refused(tmp_path / "model.pt", torch.nn.Linear(6, 6), "was not changed")
    assert "weight is in the target, but not in the file" in message
    assert "embedding.weight is in the file, but not in the target" in message


def test_lazy_module_is_refused(tmp_path: Path) -> None:
    fp.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "model.pt")
    with pytest.raises(fp.ConfigError, match="weight"):
        fp.load_into(tmp_path / "model.pt", torch.nn.LazyLinear(2))


TARGETS: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.zeros(2, 2, device="meta"),
    "expanded": lambda: torch.zeros(1, 2).expand(2, 2),
    "sparse": lambda: torch.zeros(2, 2).to_sparse(),
    "subclass": lambda: torch.zeros(2, 2).as_subclass(type("Sub", (torch.Tensor,), {})),
    "conjugated": lambda: torch.zeros(2, 2, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_target_that_cannot_be_filled_is_refused(kind: str, tmp_path: Path) -> None:
    fp.save({"w": torch.ones(2, 2), "other": torch.ones(3)}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", {"w": TARGETS[kind](), "other": torch.zeros(3)}, "w is")


@pytest.mark.parametrize("name", ["sparse_coo", "conjugated", "negated", "nested_strided", "quantized"])
def test_file_that_cannot_fill_is_refused(name: str, tmp_path: Path) -> None:
    with SPECIMENS[name].made() as obj:
        fp.save([torch.ones(2), obj], tmp_path / "model.pt")
    refused(tmp_path / "model.pt", [torch.zeros(2), [torch.zeros(2)]], "load", fp.UnsupportedError)


def test_file_of_tensors_without_data_is_refused(tmp_path: Path) -> None:
    fp.save({"w": torch.empty(2, device="meta")}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", {"w": torch.zeros(2)}, "without data", fp.UnsupportedError)


def test_other_kinds_of_file_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "legacy.pt", {"w": torch.zeros(2)}, "load_state_dict", fp.UnsupportedError)
    with pytest.raises(fp.CheckpointNotFoundError):
        fp.load_into(tmp_path / "nothing.pt", {"w": torch.zeros(2)})


def test_pickled_module_is_refused_by_torch(tmp_path: Path) -> None:
    import pickle

    fp.save(Network(), tmp_path / "model.pt")
    refused(tmp_path / "model.pt", Network(), "Weights only load failed", pickle.UnpicklingError)


def test_file_whose_tensors_reach_beyond_their_storage_is_refused(tmp_path: Path) -> None:
    from support.archives import read_records, with_pickle

    fp.save({"w": torch.ones(4)}, tmp_path / "model.pt")
    pkl = read_records(tmp_path / "model.pt")["model/data.pkl"]
    shape = b"K\x04\x85q\x08"
    assert pkl.count(shape) == 1
    with_pickle(tmp_path / "model.pt", pkl.replace(shape, b"K\x09\x85q\x08"))
    with pytest.raises((fp.FormatError, RuntimeError)):
        fp.load_into(tmp_path / "model.pt", {"w": torch.zeros(9)})


# --------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_verify_leaves_the_target_alone_when_any_byte_is_damaged(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    fp.save({"a": torch.ones(3), "b": torch.full((5000,), 2.0)}, path)
    if suffix == "pt":
        offset = record_places(path.read_bytes())["data/1"][0] + 17
    else:
        offset = next(t.offset_bytes for t in fp.inspect(path).tensors if t.name == "b") + 17
    flip_bit(path, offset)
    refused(path, {"a": torch.zeros(3), "b": torch.zeros(5000)}, "b", fp.ChecksumError, verify=True)


def test_file_without_checksums_is_not_verified(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(3)}, tmp_path / "model.pt", checksum=False)
    refused(tmp_path / "model.pt", {"a": torch.zeros(3)}, "without checksums", fp.UnsupportedError, verify=True)


def test_target_is_a_copy_of_nothing(tmp_path: Path) -> None:
    """Filling twice from two files gives the second, whatever the first left."""
    fp.save({"w": torch.full((10,), 1.0)}, tmp_path / "one.pt")
    fp.save({"w": torch.full((10,), 2.0)}, tmp_path / "two.pt")
    target = {"w": torch.zeros(10)}
    kept = copy.copy(target)
    for name, value in (("one", 1.0), ("two", 2.0), ("one", 1.0)):
        fp.load_into(tmp_path / f"{name}.pt", target)
        assert kept["w"].unique().tolist() == [value]


@pytest.mark.parametrize("wraps", ["file", "target"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "a.b."])
@pytest.mark.parametrize("owner", ["", "model."])
def test_names_that_differ_by_a_prefix_are_told_as_one(wraps: str, prefix: str, owner: str, tmp_path: Path) -> None:
    plain = {f"{owner}{name}": torch.ones(2) for name in ("weight", "bias", "layer.0.weight")}
    wrapped = {name.replace(owner, owner + prefix, 1) if owner else prefix + name: t for name, t in plain.items()}
    stored, target = (wrapped, plain) if wraps == "file" else (plain, wrapped)
    fp.save(stored, tmp_path / "model.pt")
    for load in (
        lambda: fp.load_into(tmp_path / "model.pt", target),
        lambda: load_state(
            str(tmp_path / "state.pt"),
            into={"all": target},
            map_location=None,
            verify=False,
            weights_only=True,
            engine="auto",
        ),
    ):
        fp.save({"all": stored}, tmp_path / "state.pt")
        with pytest.raises(fp.ConfigError) as raised:
            load()
        assert f"differ by the prefix {prefix!r}, which only those of the {wraps} have" in str(raised.value)
        assert "3 in all" in str(raised.value)
        assert "but not in" not in str(raised.value)


def test_names_that_a_prefix_does_not_explain_are_listed(tmp_path: Path) -> None:
    fp.save({"module.weight": torch.ones(2), "module.bias": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(fp.ConfigError, match="bias is in the file, but not in the target"):
        fp.load_into(tmp_path / "model.pt", {"weight": torch.ones(2), "other": torch.ones(2)})
    with pytest.raises(fp.ConfigError, match="bias is in the file, but not in the target"):
        fp.load_into(tmp_path / "model.pt", {"weight": torch.ones(2)})


def test_module_on_the_meta_device_is_told_to_get_memory(tmp_path: Path) -> None:
    fp.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(fp.ConfigError, match=r"weight is on the meta device and has no memory yet; call to_empty"):
        fp.load_into(tmp_path / "model.pt", model)
    model.to_empty(device="cpu")
    fp.load_into(tmp_path / "model.pt", model)
