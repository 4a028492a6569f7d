"""Files made from other files: format, dtype, names, shards; equal to what a save would write, and proven."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.archives import flip_bit
from support.filesystems import failing_lookup
from support.sameness import assert_same_values

import fastpersist as fp
from fastpersist.contents.conversion import Conversion, Wish, convert
from fastpersist.contents.stored import open_contents


def converted(source: Path, out: Path, **wish: Any) -> Conversion:
    with open_contents(str(source)) as contents:
        return convert(contents, str(out), Wish(**wish))


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(1500, 2000, generator=generator),
        "half": torch.randn(77, 3, generator=generator).bfloat16(),
        "steps": torch.arange(5),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        **{f"small.{n}": torch.full((n % 5 + 1,), float(n)) for n in range(700)},
    }


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("source_suffix", [".pt", ".safetensors"])
def test_the_file_is_what_a_save_would_write(tmp_path: Path, source_suffix: str, suffix: str) -> None:
    source, out, saved = tmp_path / f"a{source_suffix}", tmp_path / f"out{suffix}", tmp_path / "saved" / f"out{suffix}"
    saved.parent.mkdir()
    tensors = state()
    fp.save(tensors, source)
    report = converted(source, out)
    with open_contents(str(source)) as contents:
        in_order = {name: tensors[name] for name in contents.tensors}
    fp.save(in_order, saved, metadata={"format": "pt"} if suffix == ".safetensors" else None)
    assert out.read_bytes() == saved.read_bytes()
    assert report.tensor_count == len(tensors)
    assert report.size_bytes == out.stat().st_size
    assert report.checked_count == report.tensor_count
    assert fp.verify(out).ok
    assert os.listdir(tmp_path / "saved") == [out.name]
    assert sorted(os.listdir(tmp_path)) == sorted([source.name, out.name, "saved"]), "nothing pending is left"


def test_stock_readers_read_it(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert_same_values(load_file(tmp_path / "b.safetensors"), state())
    converted(tmp_path / "b.safetensors", tmp_path / "c.pt")
    assert_same_values(torch.load(tmp_path / "c.pt", weights_only=True), state())


def test_only_floats_get_another_dtype(tmp_path: Path) -> None:
    fp.save(state(), tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.safetensors", dtype=torch.bfloat16)
    expected = {name: one.bfloat16() if one.is_floating_point() else one for name, one in state().items()}
    assert_same_values(load_file(tmp_path / "b.safetensors"), expected)
    converted(tmp_path / "a.pt", tmp_path / "c.pt", dtype=torch.float64)
    expected = {name: one.double() if one.is_floating_point() else one for name, one in state().items()}
    assert_same_values(torch.load(tmp_path / "c.pt"), expected)


def test_names_are_chosen_and_renamed(tmp_path: Path) -> None:
    fp.save({"module": {"a": torch.ones(2), "b": torch.zeros(2)}, "optimizer": torch.ones(9)}, tmp_path / "a.pt")
    wish = {"patterns": ["module.*"], "prefixes": {"module.": "model."}}
    converted(tmp_path / "a.pt", tmp_path / "b.pt", **wish)
    assert list(torch.load(tmp_path / "b.pt")) == ["model.a", "model.b"]


def test_nested_states_become_flat_and_values_are_reported(tmp_path: Path) -> None:
    fp.save({"model": {"w": torch.ones(2)}, "lr": 0.1, "step": 3}, tmp_path / "a.pt")
    report = converted(tmp_path / "a.pt", tmp_path / "b.pt")
    assert_same_values(torch.load(tmp_path / "b.pt"), {"model.w": torch.ones(2)})
    assert report.dropped_values == ["lr", "step"]


def test_tied_weights_stay_tied_in_a_torch_file(tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    fp.save({"embedding": weight, "head": weight, "other": weight.clone()}, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    assert found["embedding"].data_ptr() == found["head"].data_ptr() != found["other"].data_ptr()
    converted(tmp_path / "a.pt", tmp_path / "c.safetensors")
    assert_same_values(load_file(tmp_path / "c.safetensors"), dict.fromkeys(("embedding", "head", "other"), weight))


def test_views_are_written_row_major(tmp_path: Path) -> None:
    base = torch.arange(6_000_000.0).reshape(2000, 3000)
    expected = {"t": base.t(), "column": base[:, 1], "rows": base[10:20], "conj": torch.tensor([1 + 2j]).conj()}
    fp.save(expected, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert_same_values(
        load_file(tmp_path / "b.safetensors"), {name: one.resolve_conj() for name, one in expected.items()}
    )


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors = {f"layer.{n}": torch.full((1000,), float(n)) for n in range(10)}
    save_file(tensors, tmp_path / "a.safetensors")
    report = converted(tmp_path / "a.safetensors", tmp_path / "hf", shard_bytes=12_000)
    assert report.file_count == 4
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 40_000}
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        shard = load_file(tmp_path / "hf" / name)
        assert {index["weight_map"][tensor] for tensor in shard} == {name}
        assert sum(one.nbytes for one in shard.values()) <= 12_000
        found |= shard
    assert_same_values(found, tensors)
    assert fp.verify(tmp_path / "hf").ok
    back = converted(tmp_path / "hf", tmp_path / "one.pt")
    assert_same_values(torch.load(tmp_path / "one.pt"), tensors)
    assert back.file_count == 1


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "hf", shard_bytes=1 << 20)
    assert sorted(os.listdir(tmp_path / "hf")) == ["MANIFEST.json", "model.safetensors"]


def test_metadata_stay_between_safetensors(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(5)}, tmp_path / "a.safetensors", metadata={"author": "me"})
    assert not converted(tmp_path / "a.safetensors", tmp_path / "b.safetensors").dropped_values
    assert fp.inspect(tmp_path / "b.safetensors").metadata == {"format": "pt", "author": "me"}
    assert converted(tmp_path / "a.safetensors", tmp_path / "c.pt").dropped_values == ["metadata[author]"]


def test_a_step_becomes_one_file(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"model": {"w": torch.ones(3)}, "step": 1})
    converted(tmp_path / "run" / "step-00000001", tmp_path / "w.safetensors", prefixes={"model.": ""})
    assert_same_values(load_file(tmp_path / "w.safetensors"), {"w": torch.ones(3)})


@pytest.mark.parametrize("form", ["file", "shards"])
def test_damage_of_the_source_publishes_nothing(tmp_path: Path, form: str) -> None:
    source = tmp_path / "a.pt"
    fp.save({"first": torch.ones(9), "w": torch.ones(1 << 20)}, source)
    flip_bit(source, fp.inspect(source).tensors[1].offset_bytes + 4_000_000)
    with pytest.raises(fp.ChecksumError, match="w are damaged"):
        converted(source, tmp_path / "out.pt", shard_bytes=100 if form == "shards" else None)
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("form", ["file", "shards"])
def test_what_is_there_stays_unless_it_may_be_replaced(tmp_path: Path, form: str) -> None:
    shard_bytes = 1 << 20 if form == "shards" else None
    fp.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    out = tmp_path / "out.safetensors"
    converted(tmp_path / "a.pt", out, shard_bytes=shard_bytes)
    with pytest.raises(fp.ConfigError, match="exists already"):
        converted(tmp_path / "a.pt", out, shard_bytes=shard_bytes)
    fp.save({"w": torch.zeros(5)}, tmp_path / "b.pt")
    converted(tmp_path / "b.pt", out, shard_bytes=shard_bytes, overwrite=True)
    with open_contents(str(out)) as contents, open_contents(str(tmp_path / "b.pt")) as expected:
        assert contents.tensors["w"].crc32 == expected.tensors["w"].crc32


@pytest.mark.parametrize("form", ["file", "shards"])
def test_what_appears_meanwhile_stays(tmp_path: Path, form: str) -> None:
    fp.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    out = tmp_path / "out.safetensors"

    def appear(_: int) -> None:
        if form == "shards":
            out.mkdir()
        else:
            out.write_text("mine")

    wish = Wish(shard_bytes=1 << 20 if form == "shards" else None)
    with open_contents(str(tmp_path / "a.pt")) as contents, pytest.raises(fp.ConfigError, match="exists already"):
        convert(contents, str(out), wish, on_read=appear)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "out.safetensors"]
    assert os.listdir(out) == [] if form == "shards" else out.read_text() == "mine"


def test_what_cannot_be_looked_up_is_not_taken_for_absent(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(5)}, tmp_path / "a.pt")
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    with failing_lookup(out), pytest.raises(fp.StorageError, match=r"looking up .*out\.safetensors"):
        converted(tmp_path / "a.pt", out)
    assert out.read_text() == "mine"


def test_other_files_stay_when_shards_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    fp.save({"a": torch.ones(5), "b": torch.zeros(3)}, tmp_path / "a.pt")
    with fp.DirectorySave(out) as directory:
        directory.save({"a": 1}, "state.pt")
        directory.publish().result()
    (out / "config.json").write_text("{}")
    (out / "tokenizer").mkdir()
    (out / "tokenizer" / "words.txt").write_text("mine")
    kept = ["MANIFEST.json", "config.json", "tokenizer"]
    for shard_bytes, weights in [
        (0, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]),
        (1 << 20, ["model.safetensors"]),
    ]:
        converted(tmp_path / "a.pt", out, shard_bytes=shard_bytes, overwrite=True)
        assert sorted(os.listdir(out)) == sorted(kept + weights)
        assert (out / "config.json").read_text() == "{}"
        assert (out / "tokenizer" / "words.txt").read_text() == "mine"
        assert fp.verify(out).ok
    (out / "MANIFEST.json").write_text("damaged")
    converted(tmp_path / "a.pt", out, shard_bytes=1 << 20, overwrite=True)
    assert sorted(os.listdir(out)) == [*kept[:2], "model.safetensors", "tokenizer"]


def test_other_files_stay_that_the_manifest_lists_with_checksums(tmp_path: Path) -> None:
    out = tmp_path / "hf"
    fp.save({"a": torch.ones(5)}, tmp_path / "a.pt")
    with fp.DirectorySave(out) as directory:
        directory.save({"a": 1}, "state.pt")
        directory.add_bytes("config.json", b"{}")
        os.mkdir(os.path.join(directory.path, "tokenizer"))
        Path(directory.path, "tokenizer", "words.txt").write_text("mine")
        directory.publish().result()
    converted(tmp_path / "a.pt", out, shard_bytes=1 << 20, overwrite=True)
    assert sorted(os.listdir(out)) == ["MANIFEST.json", "config.json", "model.safetensors", "tokenizer"]
    assert (out / "config.json").read_text() == "{}"
    assert (out / "tokenizer" / "words.txt").read_text() == "mine"
    assert fp.verify(out).ok


def test_a_file_may_be_converted_onto_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(3 << 20)}, path)
    converted(path, path, dtype=torch.float16, overwrite=True)
    assert_same_values(load_file(path), {"w": torch.ones(3 << 20, dtype=torch.float16)})


def test_a_directory_may_be_converted_onto_itself_and_the_old_one_goes(tmp_path: Path) -> None:
    fp.save({"a": torch.ones(5), "b": torch.zeros(3)}, tmp_path / "a.pt")
    converted(tmp_path / "a.pt", tmp_path / "hf", shard_bytes=0)
    converted(tmp_path / "hf", tmp_path / "hf", shard_bytes=1 << 20, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "hf"]
    assert_same_values(load_file(tmp_path / "hf" / "model.safetensors"), {"a": torch.ones(5), "b": torch.zeros(3)})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8)
    torch.save({"q": quantized, "s": torch.eye(3).to_sparse(), "w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(fp.UnsupportedError, match=r"'q'.*quantized"):
        converted(tmp_path / "a.pt", tmp_path / "b.pt")
    with pytest.raises(fp.UnsupportedError, match=r"'s\.indices'.*sparse"):
        converted(tmp_path / "a.pt", tmp_path / "b.pt", patterns=["s.*"])
    converted(tmp_path / "a.pt", tmp_path / "b.pt", patterns=["w"])
    fp.save({"c": torch.ones(2, dtype=torch.complex128)}, tmp_path / "c.pt")
    with pytest.raises(fp.ConfigError, match=r"'c'.*complex128"):
        converted(tmp_path / "c.pt", tmp_path / "c.safetensors")


def test_names_that_meet_or_match_nothing(tmp_path: Path) -> None:
    fp.save({"a.w": torch.ones(2), "b.w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(fp.ConfigError, match=r"'b\.w' and 'a\.w' would both be called 'w'"):
        converted(tmp_path / "a.pt", tmp_path / "b.pt", prefixes={"a.": "", "b.": ""})
    with pytest.raises(fp.ConfigError, match="no tensor in"):
        converted(tmp_path / "a.pt", tmp_path / "b.pt", patterns=["c.*"])
    with pytest.raises(fp.ConfigError, match=r"no tensor in .* begins with 'c\.': leave out --rename c\.=d\.,"):
        converted(tmp_path / "a.pt", tmp_path / "b.pt", prefixes={"a.": "", "c.": "d."})
    with pytest.raises(fp.ConfigError, match=r"begins with 'b\.'"):
        converted(tmp_path / "a.pt", tmp_path / "b.pt", patterns=["a.*"], prefixes={"b.": ""})
    assert os.listdir(tmp_path) == ["a.pt"]
