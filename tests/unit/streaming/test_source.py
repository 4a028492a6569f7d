"""The weights of each kind of source, where they lie, and what is said of sources that are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.leaks import no_leaks
from support.streamed_models import Blocks, expect_same, hand_made_safetensors, on_meta, save_weights, weights_of
from torch import nn

import fastpersist as fp
from fastpersist.errors import CheckpointNotFoundError, ConfigError, FastPersistError, UnsupportedError
from fastpersist.streaming.source import Place, WeightSource

TENSORS = {
    "matrix": torch.randn(30, 40),
    "half": torch.randn(7).bfloat16(),
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 3),
    "numbers": torch.arange(10),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "complex": torch.randn(3, dtype=torch.complex64),
}


def values_of(source: WeightSource) -> dict[str, torch.Tensor]:
    """Read every tensor with plain reads."""
    found = {}
    for name, place in source.places.items():
        with open(source.file(place.file).path, "rb") as file:
            file.seek(place.offset_bytes)
            data = bytearray(file.read(place.size_bytes))
        flat = torch.frombuffer(data, dtype=place.dtype) if data else torch.empty(0, dtype=place.dtype)
        found[name] = flat.view(place.shape)
    return found


def expect_values(path: Path, expected: dict[str, torch.Tensor]) -> WeightSource:
    with no_leaks():
        source = WeightSource(str(path))
        assert source.problems == []
        found = values_of(source)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            expect_same(found[name], tensor)
        source.close()
    return source


def expect_no_source(path: Path, error: type[Exception], said: str) -> None:
    with no_leaks(), pytest.raises(error, match=said):
        WeightSource(str(path))


# ---------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("writer", ["stock", "ours"])
def test_one_safetensors_file(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    if writer == "stock":
        save_file(TENSORS, path)
    else:
        fp.save(TENSORS, path)
    source = expect_values(path, TENSORS)
    assert all((place.crc32 is not None) == (writer == "ours") for place in source.places.values())
    expect_values(tmp_path, TENSORS)  # the directory, too


def test_several_files_with_an_index_and_without(tmp_path: Path) -> None:
    whole = Blocks()
    save_weights(whole, tmp_path, shards=3)
    save_file({"stale": torch.ones(3)}, tmp_path / "consolidated.safetensors")  # not in the index
    source = expect_values(tmp_path, weights_of(whole))
    assert len(source.file_sizes) == 3
    assert source.file_sizes == [path.stat().st_size for path in sorted(tmp_path.glob("model-*.safetensors"))]
    (tmp_path / "model.safetensors.index.json").unlink()
    expect_values(tmp_path, weights_of(whole) | {"stale": torch.ones(3)})


@pytest.mark.parametrize("padding", range(9))
def test_data_at_any_offset(padding: int, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5), "b": torch.arange(3, dtype=torch.uint8), "c": torch.randn(4, dtype=torch.float64)}
    path = tmp_path / "odd.safetensors"
    hand_made_safetensors(tensors, path, padding=padding)
    if padding in (0, 8):
        assert load_file(path).keys() == tensors.keys()
    expect_values(path, tensors)


@pytest.mark.parametrize("writer", [torch.save, fp.save], ids=["stock", "ours"])
def test_a_torch_zip_with_its_views(writer: Any, tmp_path: Path) -> None:
    storage = torch.randn(100)
    state = {
        "model": {
            "rows": storage[10:40].view(5, 6),
            "same rows": storage[10:40].view(5, 6),
            "turned": storage[:30].view(5, 6).t(),
            "every second": storage[::2],
            "one": storage[3],
            "none": storage[:0],
            "column": storage[:5].view(5, 1).t().t(),
            "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
            "parameter": nn.Parameter(torch.randn(3, 3)),
            "sparse": torch.eye(3).to_sparse(),
        },
        "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}, "step": 7},
        "step": 3,
    }
    path = tmp_path / "state.pt"
    writer(state, path)
    source = WeightSource(str(path))
    found = values_of(source)
    for name in ("rows", "same rows", "one", "none", "column", "parameter"):
        expect_same(found[f"model.{name}"], state["model"][name].detach())
    assert "model.sparse" not in found
    for name in ("turned", "every second", "conjugate"):
        assert f"model.{name}" not in found
        assert source.unusable[f"model.{name}"]
    assert "not lie in order" in source.unusable["model.turned"]
    assert any(name.startswith("optimizer.state") for name in found)
    source.close()


def test_checksums_of_a_torch_zip_are_those_of_whole_storages(tmp_path: Path) -> None:
    storage = torch.randn(1000)
    fp.save({"whole": storage, "part": torch.randn(1000)[3:]}, tmp_path / "a.pt")
    source = WeightSource(str(tmp_path / "a.pt"))
    assert source.places["whole"].crc32 is not None
    assert source.places["part"].crc32 is None
    source.close()


def test_a_step_of_a_checkpointer(tmp_path: Path) -> None:
    model = Blocks()
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(100, {"model": model.state_dict(), "step": 3})
        checkpoints.wait()
    (step,) = (each for each in tmp_path.iterdir() if each.is_dir() and each.name.startswith("step-"))
    expected = {f"model.{name}": each for name, each in weights_of(model).items()}
    for path in (step, step / "state.pt"):
        expect_values(path, expected)
    expect_no_source(tmp_path, ConfigError, "a directory of steps; name one of them")


# -------------------------------------------------------------------------------------------------- what is refused


def test_nothing_there(tmp_path: Path) -> None:
    expect_no_source(tmp_path / "none", CheckpointNotFoundError, "none")
    expect_no_source(tmp_path, CheckpointNotFoundError, r"has no \.safetensors file")


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        (["pytorch_model.bin"], UnsupportedError, "has no safetensors"),
        (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"], UnsupportedError, "has no safetensors"),
        ([".metadata", "__0_0.distcp"], UnsupportedError, "sharded checkpoint: `fastpersist merge`"),
        ([".metadata", "__0_0.distcp", "state.pt"], UnsupportedError, "sharded checkpoint: `fastpersist merge`"),
        (["step-00000100"], ConfigError, "directory of steps"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], ConfigError, "several indexes"),
    ],
    ids=str,
)
def test_directories_of_other_things(names: list[str], error: type[Exception], said: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    expect_no_source(tmp_path, error, said)


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\x80\x02}q\x00.", b"PK\x03\x04" + bytes(100), b"\xff" * 200, b"GGUF" + bytes(60)], ids=repr
)
def test_files_of_other_things(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    expect_no_source(path, FastPersistError, r"weights\.safetensors")
    expect_no_source(tmp_path, FastPersistError, r"weights\.safetensors")


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": ["a"]}',
        '{"weight_map": null}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": "."}}',
    ],
)
def test_an_index_that_makes_no_sense(index: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with no_leaks():
        try:
            source = WeightSource(str(tmp_path))
        except FastPersistError as error:
            said = str(error)
        else:
            said = "index: " + str(source.problems)
            assert source.problems
            source.close()
    assert "index" in said


def test_a_name_that_is_in_two_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    expect_no_source(tmp_path, ConfigError, "has a in two files")


def test_what_an_index_says_wrongly_is_told_at_once(tmp_path: Path) -> None:
    save_weights(Blocks(), tmp_path, shards=3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    moved = next(name for name, file in index["weight_map"].items() if file == second)
    index["weight_map"] |= {moved: first, "not there": first, "in none": "model-00004-of-00003.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    os.truncate(tmp_path / "model-00003-of-00003.safetensors", 3000)
    source = WeightSource(str(tmp_path))
    told = "\n".join(source.problems)
    source.close()
    assert f"{moved} is not in {first}" in told
    assert f"not there is not in {first}" in told
    assert "model-00004-of-00003.safetensors, which model.safetensors.index.json names, is missing" in told
    assert "model-00003-of-00003.safetensors" in told
    with no_leaks(), pytest.raises(ConfigError) as caught:
        fp.stream(on_meta(Blocks()), tmp_path)
    for problem in source.problems:
        assert problem in str(caught.value)


def test_a_file_is_closed_with_its_source(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors")
    with no_leaks():
        source = WeightSource(str(tmp_path), engine="threads-buffered")
        assert source.engine == "threads-buffered"
        source.close()
        source.close()
        assert source.engine == ""


def test_a_place_knows_its_length() -> None:
    assert Place(0, 8, torch.bfloat16, (3, 5), None).size_bytes == 30
    assert Place(0, 8, torch.bfloat16, (), None).size_bytes == 2
    assert Place(0, 8, torch.bfloat16, (0, 5), None).size_bytes == 0


def test_a_source_that_another_thread_has_closed_is_a_clear_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    source = WeightSource(str(tmp_path / "m.safetensors"), engine="auto")
    source.close()
    with pytest.raises(ConfigError, match=r"m.safetensors is read no more: its stream is closed"):
        source.file(0)
