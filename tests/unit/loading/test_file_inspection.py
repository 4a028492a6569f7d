"""inspect lists what a file holds, verify finds every damaged byte; neither runs anything of the file."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import leaks
from support.archives import (
    data_offset,
    flip_bit,
    read_records,
    record_places,
    save_aligned,
    with_pickle,
    write_records,
)
from support.sameness import storage_bytes
from support.specimens import SPECIMENS, Network

import fastpersist as fp
from fastpersist.loading import file_inspection

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC)|The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
]


nothing_is_left_behind = leaks.nothing_is_left_behind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.pt"


# --------------------------------------------------------------------------------------------- inspect


def test_tensors_are_listed_with_their_places(path: Path) -> None:
    base = torch.arange(100, dtype=torch.int16)
    fp.save({"all": base, "view": base[10:20], "layer": {"weights": [torch.ones(2, 3).double()]}}, path)
    data = path.read_bytes()
    manifest = fp.inspect(path)
    assert (manifest.path, manifest.format, manifest.size_bytes) == (str(path), "torch_zip", len(data))
    assert manifest.has_checksums
    everything, view, weights = manifest.tensors
    assert (everything.name, view.name, weights.name) == ("all", "view", "layer.weights[0]")
    assert (view.dtype, view.shape, view.size_bytes, view.record) == ("int16", (10,), 20, "data/0")
    assert (weights.dtype, weights.shape, weights.size_bytes, weights.record) == ("float64", (2, 3), 48, "data/1")
    assert view.offset_bytes == everything.offset_bytes + 20
    assert data[view.offset_bytes : view.offset_bytes + 20] == base[10:20].numpy().tobytes()
    assert view.crc32 == everything.crc32 == zlib.crc32(storage_bytes(base.untyped_storage()))


@pytest.mark.parametrize("name", SPECIMENS)
def test_bytes_at_the_listed_places_are_the_tensors(name: str, path: Path) -> None:
    with SPECIMENS[name].made() as obj:
        fp.save(obj, path, durable=False)
        data = path.read_bytes()
        manifest = fp.inspect(path)
    places = record_places(data)
    for tensor in manifest.tensors:
        if tensor.record:
            start, size = places[tensor.record]
            assert tensor.offset_bytes is not None
            assert start <= tensor.offset_bytes <= start + size
            assert tensor.crc32 == zlib.crc32(data[start : start + size])
        else:
            assert tensor.offset_bytes is None
            assert tensor.crc32 is None


def test_names_of_a_model_are_those_of_its_state(path: Path) -> None:
    network = Network()
    fp.save(network.state_dict(), path)
    assert [t.name for t in fp.inspect(path).tensors] == list(network.state_dict())
    fp.save(network, path)
    names = {t.name for t in fp.inspect(path).tensors}
    assert names >= {name for name, _ in network.named_parameters()}


def test_globals_are_listed_and_not_imported(path: Path) -> None:
    fp.save({"t": torch.ones(1)}, path)
    pkl = b"\x80\x02cno_such_module_anywhere\nharm\n)R."
    with_pickle(path, pkl)
    assert fp.inspect(path).globals == ("no_such_module_anywhere.harm",)
    assert fp.verify(path).ok


def test_file_without_checksums_says_so(path: Path) -> None:
    fp.save({"t": torch.ones(3)}, path, checksum=False)
    manifest = fp.inspect(path)
    assert not manifest.has_checksums
    assert manifest.tensors[0].crc32 is None
    report = fp.verify(path)
    assert report.ok
    assert bool(report) is True
    assert not report.has_checksums
    assert report.checked_bytes == 0


@pytest.mark.parametrize("dtype", ["foo", "bcomplex32", "uint128"])
def test_dtype_that_this_torch_lacks_is_listed(dtype: str, path: Path) -> None:
    fp.save({"t": torch.ones(1)}, path)
    with_pickle(
        path,
        b"\x80\x02ctorch._utils\n_rebuild_meta_tensor_no_storage\n(ctorch\n%b\nK\x01\x85K\x01\x85\x89tR."
        % dtype.encode(),
    )
    (tensor,) = fp.inspect(path).tensors
    assert (tensor.dtype, tensor.shape, tensor.record) == (dtype, (1,), "")
    assert fp.verify(path).ok


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save({"t": torch.ones(1)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "text.txt").write_text("hello, this is no checkpoint")
    for name in ("legacy.pt", "text.txt"):
        with pytest.raises(fp.UnsupportedError, match="neither"):
            fp.inspect(tmp_path / name)
    assert not fp.verify(tmp_path / "text.txt").ok
    assert bool(fp.verify(tmp_path / "text.txt")) is False
    for look in (fp.inspect, fp.verify):
        with pytest.raises(fp.CheckpointNotFoundError):
            look(tmp_path / "nothing.pt")
        with pytest.raises(fp.StorageError, match="directory"):
            look(tmp_path)


# --------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_good_files_are_good(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    state = {f"layer.{i}": torch.full((i * 1000,), float(i)) for i in range(20)}
    fp.save(state, path)
    report = fp.verify(path)
    assert report.ok
    assert bool(report) is True
    assert report.has_checksums
    assert report.damages == ()
    assert report.checked_bytes >= sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("alignment", [64, 4096])
def test_files_of_torch_save_are_verified(alignment: int, path: Path) -> None:
    save_aligned({"a": torch.ones(10), "b": torch.zeros(100)}, path, alignment=alignment)
    assert fp.verify(path).ok
    assert fp.verify(path).has_checksums
    flip_bit(path, record_places(path.read_bytes())["data/1"][0])
    (damage,) = fp.verify(path).damages
    assert damage.tensors == ("b",)


def test_every_damaged_record_is_reported_with_its_tensors(path: Path) -> None:
    base = torch.arange(50.0)
    fp.save({"one": base, "view": base[3:], "good": torch.ones(3), "two": torch.zeros(9)}, path)
    places = record_places(path.read_bytes())
    for name in ("data/0", "data/2", "version"):
        flip_bit(path, places[name][0])
    damages = {damage.record: damage for damage in fp.verify(path).damages}
    assert set(damages) == {"data/0", "data/2", "version"}
    assert damages["data/0"].tensors == ("one", "view")
    assert damages["data/0"].offset_bytes == places["data/0"][0]
    assert "one, view" in damages["data/0"].message
    assert damages["version"].tensors == ()


def test_no_flipped_bit_is_missed(path: Path) -> None:
    """Every byte of the file but padding and fields that no reader looks at."""
    fp.save({"w": torch.arange(300, dtype=torch.uint8)}, path)
    good = path.read_bytes()
    covered = {at for offset, size in record_places(good).values() for at in range(offset, offset + size)}
    for at in sorted(covered):
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        assert not fp.verify(path).ok, f"a flipped bit at {at} was missed"


@pytest.mark.parametrize("writer", ["ours", "torch", "zipfile"])
def test_no_changed_byte_of_a_header_is_missed(writer: str, path: Path) -> None:
    """Names, flags, sizes and all: only the padding before a record's data is nobody's."""
    state = {"w": torch.ones(3), "empty": torch.empty(0)}
    if writer == "ours":
        fp.save(state, path, durable=False)
    else:
        save_aligned(state, path, alignment=1)
    if writer == "zipfile":
        write_records(path, read_records(path))
    good = path.read_bytes()
    assert fp.verify(path).ok
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
    looked_at = set(range(good.index(b"PK\x01\x02"), len(good)))
    for info in infos:
        looked_at |= set(range(info.header_offset, info.header_offset + 30 + len(info.filename)))
        end = data_offset(good, info) + info.file_size
        looked_at |= set(range(end, end + 16)) if info.flag_bits & 8 else set()
    missed = []
    for at in sorted(looked_at):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        if fp.verify(path, engine="threads-buffered").ok:
            missed.append(at)
    if writer == "zipfile":  # its own values of some fields of the central directory are written once
        single = {at + field for at in entries_of(good) for field in (4, 5, *range(36, 42))}
        assert set(missed) <= single | set(range(len(good) - 22, len(good)))
    else:
        assert missed == []


def entries_of(data: bytes) -> list[int]:
    """Return where the entries of the central directory start."""
    return [match.start() for match in re.finditer(b"PK\x01\x02", data)]


@pytest.mark.parametrize("place", ["directory", "header"])
def test_changed_name_of_a_record_is_reported(place: str, path: Path) -> None:
    fp.save({"w": torch.ones(3)}, path)
    data = path.read_bytes()
    name = b"/byteorder"
    at = data.rindex(name) if place == "directory" else data.index(name)
    path.write_bytes(data[:at] + b"/byteordes" + data[at + len(name) :])
    (damage,) = fp.verify(path).damages
    assert damage.record.startswith("byteorde")
    assert "its header has another name" in damage.message


def test_header_of_a_safetensors_file_is_compared_with_the_manifest_beside_it(tmp_path: Path) -> None:
    files = fp.DirectorySave(tmp_path / "saved")
    files.save({"weight": torch.ones(3)}, "model.safetensors")
    files.save({"weight": torch.ones(3)}, "state.pt")
    files.publish().result()
    path = tmp_path / "saved" / "model.safetensors"
    report = fp.verify(path)
    assert report.ok
    assert report.has_checksums
    path.write_bytes(path.read_bytes().replace(b'"weight"', b'"weighs"'))
    (damage,) = fp.verify(path).damages
    assert "damaged outside of its tensors" in damage.message
    (tmp_path / "saved" / "MANIFEST.json").unlink()
    assert fp.verify(path).ok  # nothing vouches for a name then


def test_damaged_directory_is_reported_where_it_is(path: Path) -> None:
    fp.save({"w": torch.ones(3)}, path)
    good = path.read_bytes()
    directory = good.index(b"PK\x01\x02")
    for at in range(directory, len(good)):
        bad = bytearray(good)
        bad[at] ^= 0xFF
        path.write_bytes(bad)
        report = fp.verify(path)  # some fields nobody reads; but nothing else than a report may come out
        assert all(damage.message for damage in report.damages)
    path.write_bytes(good[:directory])
    (damage,) = fp.verify(path).damages
    assert "never finished" in damage.message


def test_every_truncation_is_reported(path: Path) -> None:
    fp.save({"w": torch.ones(3)}, path)
    good = path.read_bytes()
    for length in [*range(0, len(good), 97), *range(len(good) - 130, len(good))]:
        os.truncate(path, 0)
        path.write_bytes(good[:length])
        assert not fp.verify(path).ok


def test_storage_that_is_missing_or_short_is_reported(path: Path) -> None:
    fp.save({"a": torch.ones(4), "b": torch.ones(5)}, path)
    records = read_records(path)
    missing = {name: data for name, data in records.items() if name != "model/data/1"}
    write_records(path, missing)
    (damage,) = fp.verify(path).damages
    assert damage.tensors == ("b",)
    assert "missing" in damage.message
    write_records(path, records | {"model/data/0": b"x" * 15})
    (damage,) = fp.verify(path).damages
    assert damage.tensors == ("a",)
    assert "15 bytes" in damage.message


def test_pickle_that_is_no_pickle_is_reported(path: Path) -> None:
    fp.save({"a": torch.ones(4)}, path)
    for data in (b"", b"\x80\x02", b"garbage", b"\x80\x02]q\x00"):
        with_pickle(path, data)
        (damage,) = fp.verify(path).damages
        assert damage.record == "data.pkl"
        for look in (fp.load, fp.inspect):
            with pytest.raises(fp.FormatError, match=r"data\.pkl"):
                look(path)


class Harm:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_of_the_file_is_run(tmp_path: Path) -> None:
    fp.save({"harm": Harm(str(tmp_path / "harm")), "t": torch.ones(2)}, tmp_path / "model.pt")
    assert fp.verify(tmp_path / "model.pt").ok
    assert [tensor.name for tensor in fp.inspect(tmp_path / "model.pt").tensors] == ["t"]
    flip_bit(tmp_path / "model.pt", record_places((tmp_path / "model.pt").read_bytes())["data/0"][0])
    (damage,) = fp.verify(tmp_path / "model.pt").damages
    assert damage.tensors == ("t",)
    assert not (tmp_path / "harm").exists()


def test_what_is_found_can_be_read_at_a_glance(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"a": torch.zeros(10), "b": torch.zeros(20)}, path)
    size_bytes = path.stat().st_size
    assert repr(fp.inspect(path)) == f"<Manifest of {path}: torch_zip, 2 tensors, {size_bytes} bytes>"
    report = fp.verify(path)
    assert repr(report) == f"<VerifyReport of {path}: ok, {report.checked_bytes} bytes compared>"
    fp.save({"a": torch.zeros(10)}, path, checksum=False)
    assert repr(fp.inspect(path)).endswith(" bytes, no checksums>")
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, {"a": torch.zeros(10)})
    root = tmp_path / "run"
    assert repr(fp.inspect(root)).startswith(f"<Manifest of {root}: root, 2 checkpoints, ")
    step_path = root / "step-00000003"
    assert repr(fp.inspect(step_path)).startswith(f"<Manifest of {step_path}: directory, step 3, 1 files, 1 tensors, ")
    (step_path / "state.pt").unlink()
    (root / "step-00000004" / "state.pt").write_bytes(b"")
    assert repr(fp.verify(root)).startswith(
        f"<VerifyReport of {root}: DAMAGED: step-00000003: state.pt is missing (and 1"
    )


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_engine_that_cannot_read_is_an_error_and_no_damage(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp.save({"a": torch.ones(3)}, tmp_path / f"model.{suffix}")

    def read_extents(*_: Any, **__: Any) -> Any:
        raise fp.UnsupportedError("this engine cannot be used here")

    monkeypatch.setattr(file_inspection, "read_extents", read_extents)
    with pytest.raises(fp.UnsupportedError, match="this engine"):
        fp.verify(tmp_path / f"model.{suffix}", engine="threads")


# ------------------------------------------------------------------------------------------ files without checksums


def test_files_that_cannot_be_checked_are_not_called_damaged(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(fp.UnsupportedError, match=r"old.pt cannot be checked: it is a file of an older torch.save"):
        fp.verify(tmp_path / "old.pt")
    fp.write_rows(tmp_path / "rows.npy", torch.ones(3, 4))
    with pytest.raises(fp.UnsupportedError, match=r"rows.npy cannot be checked: it is an array of NumPy.*rows verify"):
        fp.verify(tmp_path / "rows.npy")
    with zipfile.ZipFile(tmp_path / "script.pt", "w", zipfile.ZIP_DEFLATED) as archive:  # as torch.jit.save does
        for name in ("data.pkl", "code/__torch__/linear.py", "constants.pkl"):
            archive.writestr(f"script/{name}", b"x" * 1000)
    with pytest.raises(fp.UnsupportedError, match=r"script.pt cannot be checked: it is a TorchScript archive"):
        fp.verify(tmp_path / "script.pt")


def test_arrays_of_numpy_and_compressed_archives_cannot_be_checked(tmp_path: Path) -> None:
    numpy.savez_compressed(tmp_path / "arrays.npz", a=numpy.zeros(3))
    with pytest.raises(fp.UnsupportedError, match=r"arrays.npz cannot be checked: it is an npz file of NumPy"):
        fp.verify(tmp_path / "arrays.npz")
    (tmp_path / "arrays.npz").rename(tmp_path / "arrays.pt")
    assert not fp.verify(tmp_path / "arrays.pt").ok  # a file with the name of a checkpoint was overwritten
    torch.save({"a": torch.arange(5000)}, tmp_path / "model.pt")
    with (
        zipfile.ZipFile(tmp_path / "model.pt") as stored,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with pytest.raises(fp.UnsupportedError, match=r"packed.pt cannot be checked: it is a zip archive with compressed"):
        fp.verify(tmp_path / "packed.pt")


def test_a_damaged_directory_that_says_compressed_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.arange(5000)}, path)
    data = bytearray(path.read_bytes())
    first = data.index(b"PK\x01\x02")
    for place in (first + 8, first + 10):  # the flags, which say whether it is encrypted, and the method
        damaged = data[:]
        damaged[place] |= 0x09 if place == first + 8 else 0x08
        path.write_bytes(damaged)
        assert not fp.verify(path).ok
