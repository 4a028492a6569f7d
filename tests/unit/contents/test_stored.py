"""The tensors of files, directories and steps, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fastpersist as fp
from fastpersist.contents.stored import open_contents, refuse_root
from fastpersist.formats.torch_zip import Directory
from fastpersist.loading.checkpoint_file import CheckpointSource


def test_torch_zip_names_are_those_of_inspect(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    weight = torch.arange(6.0).reshape(2, 3)
    fp.save({"model": {"w": weight, "t": weight.t(), "row": weight[1]}, "step": 3, "groups": [torch.ones(2)]}, path)
    manifest = fp.inspect(path)
    with open_contents(str(path)) as contents:
        assert list(contents.tensors) == [entry.name for entry in manifest.tensors]
        assert [one.offset_bytes for one in contents.tensors.values()] == [one.offset_bytes for one in manifest.tensors]
        assert contents.values == {"step": "3"}
        assert not contents.unreadable
        assert contents.tensors["model.w"].crc32 == manifest.tensors[0].crc32
        assert contents.tensors["model.row"].crc32 is None, "the record holds more than this tensor"
        assert contents.tensors["model.t"].crc32 is None, "its bytes lie in another order"
        assert not contents.tensors["model.t"].lies_in_order


def test_safetensors_with_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(2, 2, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    with open_contents(str(path)) as contents:
        (stored,) = contents.tensors.values()
        assert (stored.name, stored.dtype, stored.shape, stored.stride) == ("w", torch.bfloat16, (2, 2), (2, 1))
        assert (contents.metadata, contents.values) == ({"format": "pt"}, {})


def huggingface_directory(directory: Path) -> None:
    directory.mkdir()
    save_file({"a": torch.ones(3)}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, directory / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_directory_of_safetensors(tmp_path: Path) -> None:
    huggingface_directory(tmp_path / "hf")
    with open_contents(str(tmp_path / "hf")) as contents:
        assert {name: tensor.shape for name, tensor in contents.tensors.items()} == {"a": (3,), "b": (2,)}


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    huggingface_directory(tmp_path / "hf")
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(fp.FormatError, match="model-00002-of-00002"), open_contents(str(tmp_path / "hf")):
        pass


def test_step_with_a_rank_file(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, {"w": torch.ones(2)}, rank_state={"w": torch.zeros(3), "seed": 9})
    with open_contents(str(tmp_path / "step-00000005")) as contents:
        names = {name: tensor.shape for name, tensor in contents.tensors.items()}
        assert names == {"w": (2,), "rank-00000.pt:w": (3,)}
        assert contents.values == {"rank-00000.pt:seed": "9"}


def test_a_root_is_refused_with_the_name_of_a_step(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, {"w": torch.ones(2)})
    with pytest.raises(fp.ConfigError, match="step-00000005"):
        refuse_root(str(tmp_path))
    refuse_root(str(tmp_path / "step-00000005"))


def test_one_name_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.ones(3)}}, path)
    with open_contents(str(path)) as contents:
        assert {name: tensor.shape for name, tensor in contents.tensors.items()} == {"a.b": (2,), "a.b (2)": (3,)}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_has_no_data_or_needs_its_own_code(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8)
    sparse = torch.eye(3).to_sparse()
    torch.save({"meta": torch.empty(2, device="meta"), "q": quantized, "sparse": sparse}, path)
    with open_contents(str(path)) as contents:
        assert list(contents.unreadable) == ["q"]
        assert "meta" in contents.values
        assert {name: one.kind for name, one in contents.tensors.items()} == {
            "sparse.indices": "sparse_coo",
            "sparse.values": "sparse_coo",
        }


def test_few_bytes_that_claim_to_be_many(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 20, 1 << 20), "few": torch.ones(1).expand(5)}, tmp_path / "a.pt")
    with open_contents(str(tmp_path / "a.pt")) as contents:
        assert "expanded view" in contents.unreadable["w"]
        assert list(contents.tensors) == ["few"]


@pytest.mark.parametrize("kind", ["nothing", "text", "empty directory"])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "text":
        path.write_text("no checkpoint at all, just text")
    elif kind == "empty directory":
        path.mkdir()
    with pytest.raises(fp.FastPersistError, match="thing"), open_contents(str(path)):
        pass


def test_a_tensor_beyond_its_storage_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    storage = torch.ones(4).untyped_storage()
    view = torch.empty(0).set_(storage, 0, (4,), (1,))
    torch.save({"w": view}, path)
    data = path.read_bytes()
    # The shape (4,) is pickled as K\x04\x85; the storage keeps its 4 elements.
    assert data.count(b"K\x04\x85") == 1
    path.write_bytes(data.replace(b"K\x04\x85", b"K\x05\x85"))
    with pytest.raises(fp.FormatError, match="beyond its storage"), open_contents(str(path)):
        pass


def test_the_time_to_open_a_file_without_checksums_grows_with_its_tensors_not_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp.save({f"w{number}": torch.ones(4) for number in range(50)}, tmp_path / "a.pt", checksum=False)
    asked = []
    whether = Directory.has_checksums.fget
    monkeypatch.setattr(Directory, "has_checksums", property(lambda self: asked.append(0) or whether(self)))
    with open_contents(str(tmp_path / "a.pt")) as contents:
        assert [one.crc32 for one in contents.tensors.values()] == [None] * 50
    assert len(asked) == 1


def test_the_same_pickle_is_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        fp.save({"w": torch.full((4,), value), "lr": 0.1}, tmp_path / f"{name}.pt")
    scans = []
    scan = CheckpointSource.scan
    monkeypatch.setattr(CheckpointSource, "scan", lambda self: scans.append(self.path) or scan(self))
    with open_contents(str(tmp_path / "a.pt")) as a, open_contents(str(tmp_path / "b.pt"), like=a) as b:
        assert len(scans) == 1
        assert a.values == b.values == {"lr": "0.1"}
        assert b.tensors["w"].path == str(tmp_path / "b.pt")
        assert a.tensors["w"].crc32 != b.tensors["w"].crc32
