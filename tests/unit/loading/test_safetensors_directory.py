"""fp.load_into of a model in a directory of safetensors: filled from all files, and nothing changes unless all fits."""

from __future__ import annotations

import errno
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import leaks
from support.sameness import assert_same, portrait

import fastpersist as fp
from fastpersist.loading.safetensors_directory import file_names, holds_safetensors, open_all, read_index

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


nothing_is_left_behind = leaks.nothing_is_left_behind


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", refuse)
    for call in (fp.load_into, lambda path, model: fp.stream(model, path)):
        with pytest.raises(fp.StorageError, match=f"listing {tmp_path}: Permission denied") as caught:
            call(tmp_path, torch.nn.Linear(1, 1, device="meta"))
        assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(tmp_path))


class Tied(torch.nn.Module):
    """A model whose head shares the weight of its embedding."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(50, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}


def save_shards(directory: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Write the weights to two files and an index, of which `changes` replaces entries."""
    directory.mkdir(exist_ok=True)
    names = list(weights)
    parts = {FIRST: names[::2], SECOND: names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name].contiguous() for name in held}, directory / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {**weight_map, **changes}}))
    return directory


def refused(directory: Path, target: torch.nn.Module, error: type[Exception], match: str, **options: Any) -> None:
    before = portrait(target.state_dict())
    with pytest.raises(error, match=match):
        fp.load_into(directory, target, **options)
    assert portrait(target.state_dict()) == before


# --- what is filled


def test_a_module_is_filled_from_all_files_of_an_index(tmp_path: Path) -> None:
    source, target = Tied(1), Tied(2)
    pointers = [tensor.data_ptr() for tensor in target.state_dict().values()]
    assert fp.load_into(save_shards(tmp_path, weights_of(source)), target) == ([], [])
    assert_same(target.state_dict(), source.state_dict())
    assert [tensor.data_ptr() for tensor in target.state_dict().values()] == pointers
    assert target.head.weight is target.embedding.weight


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_one_file_needs_no_index(name: str, tmp_path: Path) -> None:
    source, target = Tied(1), Tied(2)
    save_file(weights_of(source), tmp_path / name)
    fp.load_into(tmp_path, target)
    assert_same(target.state_dict(), source.state_dict())


def test_a_dict_of_another_dtype_is_filled_with_converted_values(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    target = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in weights.items()}
    fp.load_into(str(save_shards(tmp_path, weights)), target)
    assert_same(target, {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_our_own_shards_are_verified_before_anything_changes(tmp_path: Path) -> None:
    source = Tied(1)
    names = list(weights_of(source))
    for file, held in {FIRST: names[::2], SECOND: names[1::2]}.items():
        fp.save({name: weights_of(source)[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in {FIRST: names[::2], SECOND: names[1::2]}.items() for name in held}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    target = Tied(2)
    fp.load_into(tmp_path, target, verify=True)
    assert_same(target.state_dict(), source.state_dict())
    damaged = max(fp.inspect(tmp_path / SECOND).tensors, key=lambda tensor: tensor.size_bytes)
    data = bytearray((tmp_path / SECOND).read_bytes())
    data[damaged.offset_bytes or 0] ^= 1
    (tmp_path / SECOND).write_bytes(data)
    refused(tmp_path, Tied(2), fp.ChecksumError, damaged.name, verify=True)


# --- what does not fit


def test_differences_in_all_files_are_named_at_once(tmp_path: Path) -> None:
    weights = weights_of(Tied(1))
    first, second = list(weights)[:2]
    weights[first] = weights[first][:-1]
    weights["more"] = weights.pop(second)
    target = Tied(2)
    refused(save_shards(tmp_path, weights), target, fp.ConfigError, f"(?s){second} is in the target.*{first} has shape")
    refused(tmp_path, target, fp.ConfigError, "more is in the file, but not in the target")
    refused(tmp_path, target, fp.ConfigError, f"{first} has shape", strict=False)


def test_without_strict_other_names_are_passed_over_and_told(tmp_path: Path) -> None:
    source, target = Tied(1), Tied(2)
    weights = weights_of(source)
    weights["more"] = weights.pop("middle.bias")
    before = target.middle.bias.clone()
    assert fp.load_into(save_shards(tmp_path, weights), target, strict=False) == (["middle.bias"], ["more"])
    assert_same(target.middle.bias.data, before.data)
    assert_same(target.embedding.weight.data, source.embedding.weight.data)


def test_a_name_of_tied_weights_must_be_in_the_file(tmp_path: Path) -> None:
    weights = weights_of(Tied(1))
    del weights["embedding.weight"]
    refused(save_shards(tmp_path, weights), Tied(2), fp.ConfigError, "embedding.weight is in the target")


def test_a_target_with_more_than_tensors_is_refused(tmp_path: Path) -> None:
    model = Tied(2)
    with pytest.raises(fp.ConfigError, match="holds tensors only"):
        fp.load_into(save_shards(tmp_path, weights_of(model)), torch.optim.SGD(model.parameters()))


def test_ranks_do_not_load_a_directory_together(tmp_path: Path) -> None:
    group: Any = object()
    with pytest.raises(fp.UnsupportedError, match="each rank load it without process_group"):
        fp.load_into(save_shards(tmp_path, weights_of(Tied(1))), Tied(2), process_group=group)


# --- damaged directories


def test_all_missing_files_are_named(tmp_path: Path) -> None:
    directory = save_shards(tmp_path, weights_of(Tied(1)), lost="gone.safetensors")
    (tmp_path / SECOND).unlink()
    refused(directory, Tied(2), fp.CheckpointNotFoundError, f"names gone.safetensors, {SECOND}, missing here")


def test_an_index_that_contradicts_its_files_is_refused(tmp_path: Path) -> None:
    weights = weights_of(Tied(1))
    name = next(iter(weights))
    refused(save_shards(tmp_path, weights, **{name: SECOND}), Tied(2), fp.FormatError, f"'{name}' is in {SECOND}")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"weight": torch.ones(2)}, tmp_path / name)
    with pytest.raises(fp.FormatError, match=r"'weight' is in two files, a\.safetensors and b\.safetensors"):
        fp.load_into(tmp_path, {"weight": torch.zeros(2)})


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"PK\3\4" + bytes(60), "but a zip archive")])
def test_what_is_no_safetensors_file_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    directory = save_shards(tmp_path, weights_of(Tied(1)))
    (tmp_path / SECOND).write_bytes(content)
    refused(directory, Tied(2), fp.FormatError, said)


NO_INDEXES = {
    "empty": "",
    "a list": "[]",
    "no names": '{"weight_map": 3}',
    "another directory": '{"weight_map": {"a": "../a.safetensors"}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", NO_INDEXES)
def test_what_is_no_index_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(NO_INDEXES[kind])
    refused(tmp_path, Tied(2), fp.FormatError, "which tensor is in which file")


def test_other_directories_are_told_apart(tmp_path: Path) -> None:
    assert not holds_safetensors(str(tmp_path))
    with pytest.raises(fp.StorageError, match="directory, not a checkpoint file"):
        fp.load_into(tmp_path, Tied(2))
    (tmp_path / ".hidden.safetensors").write_bytes(b"")
    assert not holds_safetensors(str(tmp_path))
    assert not holds_safetensors(str(tmp_path / ".hidden.safetensors"))
    (tmp_path / INDEX).write_text("{}")
    assert holds_safetensors(str(tmp_path))


def test_the_file_of_the_whole_model_comes_before_others(tmp_path: Path) -> None:
    save_shards(tmp_path, weights_of(Tied(1)))
    assert read_index(str(tmp_path)) is not None
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert read_index(str(tmp_path)) is None
    assert file_names(str(tmp_path)) == ["model.safetensors"]
    with ExitStack() as stack:
        assert [os.path.basename(source.path) for source in open_all(str(tmp_path), stack)] == ["model.safetensors"]
    assert file_names(str(tmp_path)) == ["model.safetensors"]
    with pytest.raises(fp.CheckpointNotFoundError, match="no HuggingFace checkpoint"):
        file_names(str(tmp_path / "nowhere"))
