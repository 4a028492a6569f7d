"""Safetensors: files that the official reader takes, the refusals of the official writer, and a strict parser."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load_file, save_file
from support import leaks
from support.archives import flip_bit
from support.sameness import assert_same
from support.specimens import DTYPES, Network, PlainSubclass, tensor_of
from support.torch_release import TORCH

import fastpersist as fp
from fastpersist.errors import FormatError
from fastpersist.formats.safetensors import CRC_KEY, DTYPE_NAMES, place_tensors, read_header
from fastpersist.transfer.writer import Writer

SAVABLE = [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in DTYPE_NAMES]


nothing_is_left_behind = leaks.nothing_is_left_behind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {
        "whole.pages": torch.randn(64, 64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "half": torch.randn(2, 3, 4).half(),
        "more.pages": torch.arange(1024, dtype=torch.int32),
        "naïve 名前": torch.ones(1, dtype=torch.bool),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def by_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(tensors.items()))


# --------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("checksum", [True, False])
def test_every_reader_gives_the_tensors_back(checksum: bool, path: Path) -> None:
    tensors = state()
    fp.save(tensors, path, checksum=checksum)
    by_torch = [torch.load(path)] if TORCH >= (2, 13) else []
    for loaded in (load_file(path), fp.load(path), *by_torch):
        assert_same(by_name(loaded), by_name(plain(tensors)))


@pytest.mark.parametrize("dtype", SAVABLE, ids=str)
def test_every_dtype_survives(dtype: torch.dtype, path: Path) -> None:
    fp.save({"t": tensor_of(dtype)}, path)
    assert_same(load_file(path), {"t": tensor_of(dtype)})
    assert_same(fp.load(path, verify=True), {"t": tensor_of(dtype)})


def test_files_of_the_official_writer_are_read(path: Path) -> None:
    tensors = plain(state())
    save_file(tensors, path, metadata={"who": "official"})
    assert_same(by_name(fp.load(path)), by_name(tensors))
    manifest = fp.inspect(path)
    assert manifest.metadata == {"who": "official"}
    assert not manifest.has_checksums
    with pytest.raises(fp.UnsupportedError, match="without checksums"):
        fp.load(path, verify=True)


def test_no_tensors_at_all(path: Path) -> None:
    fp.save({}, path)
    assert load_file(path) == {}
    assert fp.load(path) == {}
    assert path.stat().st_size == 4096


def test_model_state_loads_into_a_model(path: Path) -> None:
    network, other = Network(), Network()
    tensors = network.state_dict()
    del tensors["head.weight"]
    fp.save(tensors, path)
    other.load_state_dict(fp.load(path), strict=False)
    assert_same(other.state_dict(), network.state_dict())


def test_metadata_is_kept(path: Path) -> None:
    metadata = {"format": "pt", "ключ": "значение", "": ""}
    fp.save({"t": torch.ones(2)}, path, metadata=metadata)
    with safe_open(path, framework="pt") as file:
        kept = file.metadata()
    assert {key: value for key, value in kept.items() if key != CRC_KEY} == metadata
    assert fp.inspect(path).metadata == metadata


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "meta"])
def test_devices(device: Any, path: Path) -> None:
    fp.save({"t": torch.ones(2, 3)}, path)
    loaded = fp.load(path, map_location=device)["t"]
    assert loaded.device == torch.device(device or "cpu")
    assert loaded.shape == (2, 3)


@pytest.mark.parametrize("wanted", [{"cpu": "cpu"}, lambda storage, location: storage])
def test_map_locations_without_meaning_are_refused(wanted: Any, path: Path) -> None:
    fp.save({"t": torch.ones(2)}, path)
    with pytest.raises(fp.UnsupportedError, match="records no devices"):
        fp.load(path, map_location=wanted)


def test_format_is_told_from_the_bytes_not_the_name(tmp_path: Path) -> None:
    fp.save({"t": torch.ones(2)}, tmp_path / "a.safetensors")
    os.rename(tmp_path / "a.safetensors", tmp_path / "b.pt")
    fp.save({"t": torch.ones(3)}, tmp_path / "a.pt")
    os.rename(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert len(fp.load(tmp_path / "b.pt")["t"]) == 2
    assert len(fp.load(tmp_path / "a.safetensors")["t"]) == 3


# --------------------------------------------------------------------------------------------- layout


def test_whole_pages_come_first_and_every_tensor_keeps_its_alignment(path: Path) -> None:
    fp.save(state(), path)
    tensors = fp.inspect(path).tensors
    assert {t.name for t in tensors if t.offset_bytes % 4096 == 0} >= {"whole.pages", "more.pages"}
    for tensor in tensors:
        itemsize = getattr(torch, tensor.dtype).itemsize
        assert tensor.offset_bytes is not None
        assert tensor.offset_bytes % itemsize == 0
    first = int.from_bytes(path.read_bytes()[:8], "little")
    assert (first + 8) % 4096 == 0


def test_header_is_written_last(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("seek", "append"):
        stock = getattr(Writer, name)

        def recorded(self: Writer, argument: Any, name: str = name, stock: Any = stock) -> None:
            calls.append((name, argument))
            stock(self, argument)

        monkeypatch.setattr(Writer, name, recorded)
    fp.save({"t": torch.ones(2000)}, path)
    assert [name for name, _ in calls] == ["seek", "append", "seek", "append"]
    assert calls[0][1] == 4096
    assert calls[2][1] == 0


def test_same_state_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    tensors = state()
    fp.save(tensors, tmp_path / "a.safetensors")
    fp.save(dict(reversed(tensors.items())), tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPE_NAMES.values())), st.lists(st.integers(0, 70), max_size=3)),
        max_size=30,
    ),
    st.booleans(),
)
def test_header_describes_what_was_placed(tensors: list[tuple[str, list[int]]], checksum: bool) -> None:
    from fastpersist.formats.safetensors import encode_header

    assume(("F4", []) not in tensors)  # has to be refused: see below
    described = [(str(i), dtype, tuple(shape)) for i, (dtype, shape) in enumerate(tensors)]
    plan = place_tensors(described, {"k": "v"}, checksum=checksum)
    header = plan.header
    crcs = list(range(len(tensors))) if checksum else None
    data = encode_header(plan, crcs)
    assert len(data) == header.size_bytes
    data += bytes(sum(entry.size_bytes for entry in header.entries))
    found = read_header(lambda offset, size: data[offset : offset + size], len(data), path="x")
    assert [(e.name, e.offset_bytes, e.shape) for e in found.entries] == [
        (e.name, e.offset_bytes, e.shape) for e in header.entries
    ]
    assert [e.crc for e in found.entries] == (crcs if checksum else [None] * len(tensors))
    assert {name for name, _ in deserialize(data)} == {name for name, _, _ in described}


# --------------------------------------------------------------------------------------------- refusals


def shared() -> dict[str, torch.Tensor]:
    base = torch.arange(10.0)
    return {"left": base[:6], "right": base[4:]}


REFUSED: dict[str, tuple[Callable[[], Any], str, bool]] = {
    # what, the fix that the message names, whether the official writer refuses it too
    "shared memory": (shared, "clone()", True),
    "same tensor twice": (lambda: (lambda t: {"a": t, "b": t})(torch.ones(3)), "tying", True),
    "not contiguous": (lambda: {"t": torch.ones(3, 4).t()}, "contiguous()", True),
    "sparse": (lambda: {"t": torch.eye(3).to_sparse()}, "to_dense()", True),
    "no tensor": (lambda: {"t": torch.ones(1), "n": 3}, ".pt", True),
    "no dict": (lambda: [torch.ones(1)], "state_dict()", True),
    "name that is no text": (lambda: {3: torch.ones(1)}, "text", True),
    "no such dtype": (lambda: {"t": torch.ones(2, dtype=torch.complex128)}, "convert", True),
    "meta": (lambda: {"t": torch.ones(2, device="meta")}, "meta", True),
    "reserved name": (lambda: {"__metadata__": torch.ones(1)}, "metadata=", False),
    "subclass": (lambda: {"t": torch.ones(1).as_subclass(PlainSubclass)}, "plain tensor", False),
    "surrogates in a name": (lambda: {"\ud800": torch.ones(1)}, "", True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_the_official_writer_refuses_and_names_the_fix(name: str, path: Path) -> None:
    fp.save({"old": torch.ones(1)}, path)
    before = path.read_bytes()
    make, fix, officially = REFUSED[name]
    if officially:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of several classes, for one reason
            save_file(make(), path.with_name("official.safetensors"))
    with pytest.raises(fp.ConfigError) as raised:
        fp.save(make(), path)
    assert fix in str(raised.value)
    assert path.read_bytes() == before


def test_disjoint_views_of_one_storage_are_savable(path: Path) -> None:
    base = torch.arange(10.0)
    fp.save({"left": base[:5], "right": base[5:]}, path)
    assert_same(load_file(path), {"left": torch.arange(5.0), "right": torch.arange(5.0, 10)})


def test_conjugate_and_negative_views_are_resolved(path: Path) -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    fp.save({"conj": numbers.conj()}, path)
    assert torch.equal(load_file(path)["conj"], numbers.conj().resolve_conj())


@pytest.mark.parametrize("metadata", [{"k": 1}, {1: "v"}, {CRC_KEY: "00"}])
def test_metadata_that_is_no_text_is_refused(metadata: Any, path: Path) -> None:
    with pytest.raises(fp.ConfigError):
        fp.save({"t": torch.ones(1)}, path, metadata=metadata)
    assert not path.exists()


# --------------------------------------------------------------------------------------------- damage


def test_flipped_bit_in_any_tensor_is_found_by_name(path: Path) -> None:
    fp.save(state(), path)
    good = path.read_bytes()
    for tensor in fp.inspect(path).tensors:
        if not tensor.size_bytes:
            continue
        assert tensor.offset_bytes is not None
        flip_bit(path, tensor.offset_bytes + tensor.size_bytes - 1)
        with pytest.raises(fp.ChecksumError, match=tensor.name) as raised:
            fp.load(path, verify=True)
        assert raised.value.offset_bytes == tensor.offset_bytes
        (damage,) = fp.verify(path).damages
        assert damage.tensors == (tensor.name,)
        path.write_bytes(good)
    assert fp.verify(path).ok


def test_edited_checksums_count_as_none(path: Path) -> None:
    fp.save({"t": torch.ones(2)}, path)
    data = path.read_bytes()
    digits = data.index(CRC_KEY.encode()) + len(CRC_KEY) + 3
    path.write_bytes(data[:digits] + b"?" + data[digits + 1 :])
    assert fp.load(path)["t"].tolist() == [1, 1]
    assert not fp.inspect(path).has_checksums
    with pytest.raises(fp.UnsupportedError, match="without checksums"):
        fp.load(path, verify=True)


# --------------------------------------------------------------------------------------------- the parser


def file_of(header: Any, data_bytes: int = 8, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data_bytes)


def tensor(dtype: str = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


BAD_FILES: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": bytes(7),
    "zeros": bytes(100),
    "header longer than the file": file_of({"t": tensor()}, length=10_000),
    "header over the limit": file_of({"t": tensor()}, length=100_000_001),
    "header of 2^64 - 1": file_of({"t": tensor()}, length=(1 << 64) - 1),
    "no JSON": file_of(b'{"t": '),
    "no UTF-8": file_of(b'{"\xff": 1}'),
    "UTF-16": file_of(json.dumps({"t": tensor()}).encode("utf-16-le")),
    "surrogate in a name": file_of(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "a list": file_of([]),
    "a number": file_of(b"7", 0),
    "nesting of 100,000": file_of(b'{"t":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "name twice": file_of(b'{"t":%b,"t":%b}' % ((json.dumps(tensor()).encode(),) * 2)),
    "key twice": file_of(b'{"t":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "trailing bytes": file_of({"t": tensor()}, 9),
    "missing bytes": file_of({"t": tensor()}, 7),
    "data without tensors": file_of({}, 8),
    "hole at the start": file_of({"t": tensor(begin=8, end=16)}, 16),
    "hole between": file_of({"a": tensor(), "b": tensor(begin=16, end=24)}, 24),
    "overlap": file_of({"a": tensor(), "b": tensor(begin=4, end=12)}, 12),
    "same place": file_of({"a": tensor(), "b": tensor()}, 8),
    "end before begin": file_of({"t": tensor(begin=8, end=0)}),
    "size too small for the shape": file_of({"t": tensor(shape=[3])}),
    "negative shape": file_of({"t": tensor(shape=[-2])}),
    "negative offset": file_of({"t": tensor(begin=-8, end=0)}),
    "negative zero": file_of({"t": tensor()}).replace(b'"data_offsets": [0', b'"data_offsets":[-0'),
    "float shape": file_of({"t": tensor(shape=[2.0])}),
    "float offset": file_of({"t": tensor(begin=0.0, end=8.0)}),
    "bool in the shape": file_of({"t": tensor(shape=[True, 2])}),
    "shape that overflows": file_of({"t": tensor(shape=[1 << 33, 1 << 33])}),
    "shape that overflows and is empty": file_of({"t": tensor(shape=[1 << 62, 1 << 62, 0], end=0)}, 0),
    "unknown dtype": file_of({"t": tensor(dtype="F33")}),
    "lower case dtype": file_of({"t": tensor(dtype="f32")}),
    "dtype that is no text": file_of({"t": tensor(dtype=32)}),  # type: ignore[arg-type]
    "no dtype": file_of({"t": {"shape": [2], "data_offsets": [0, 8]}}),
    "three offsets": file_of({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}),
    "tensor that is no object": file_of({"t": 3}),
    "metadata that is no object": file_of({"__metadata__": [], "t": tensor()}),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}, "t": tensor()}),
    "number of 5,000 digits": file_of(b'{"t":{"dtype":"F32","shape":[%b],"data_offsets":[0,8]}}' % (b"9" * 5000)),
    "not a number": file_of(b'{"t":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'),
}


# Of two tensors with one name the official parser keeps one, so its readers disagree on what the file holds.
STRICTER = {"name twice"}


@pytest.mark.parametrize("name", BAD_FILES)
def test_parser_refuses_what_the_official_one_refuses(name: str, path: Path) -> None:
    data = BAD_FILES[name]
    if name not in STRICTER:
        with pytest.raises(SafetensorError):
            deserialize(data)
    with pytest.raises(FormatError):
        read_header(lambda offset, size: data[offset : offset + size], len(data), path="x")
    path.write_bytes(data)
    assert not fp.verify(path).ok
    with pytest.raises(fp.FastPersistError):
        fp.inspect(path)


@pytest.mark.parametrize(
    "data",
    [
        file_of({"t": tensor()}),
        file_of({"t": tensor(shape=[], end=4)}, 4),
        file_of({"t": tensor(shape=[2, 1, 1])}),
        file_of(b'{"t":{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}}    '),
        file_of({"__metadata__": {}, "b": tensor(begin=8, end=16), "a": tensor()}, 16),
        file_of({"a": tensor(shape=[0], end=0), "b": tensor(), "c": tensor(shape=[0], begin=8)}, 8),
    ],
)
def test_parser_takes_what_the_official_one_takes(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    assert_same(by_name(fp.load(path)), by_name(load_file(path)))


def spaced(draw: st.DrawFn, tokens: list[str]) -> str:
    """Join tokens of JSON by whitespace."""
    return "".join(token + draw(st.text(" \t\n\r", max_size=2)) for token in tokens)


@st.composite
def spelt_headers(draw: st.DrawFn) -> tuple[bytes, dict[str, Any], dict[str, str]]:
    """Draw a header in any spelling that JSON allows, with its tensors and its metadata."""
    names = draw(st.lists(st.text(max_size=6), unique=True, max_size=4).filter(lambda n: "__metadata__" not in n))
    metadata = draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
    tensors: dict[str, Any] = {}
    members = []
    end = 0
    for name in names:
        shape = draw(st.lists(st.integers(0, 3), max_size=4))
        begin, end = end, end + math.prod(shape)
        tensors[name] = (shape, begin, end)
        values = {"dtype": '"U8"', "shape": json.dumps(shape), "data_offsets": json.dumps([begin, end])}
        inner = [f'"{key}":{values[key]}' for key in draw(st.permutations(list(values)))]
        spelt = json.dumps(name, ensure_ascii=draw(st.booleans()))
        members.append(spaced(draw, [spelt, ":", "{", *", ".join(inner).split(" "), "}"]))
    if metadata or draw(st.booleans()):
        text = json.dumps(metadata, ensure_ascii=draw(st.booleans()))
        members.insert(draw(st.integers(0, len(members))), spaced(draw, ['"__metadata__"', ":", text]))
    text = spaced(draw, ["{", ",".join(members), "}"])
    return file_of(text.encode(), end), tensors, metadata


@given(spelt_headers())
def test_header_means_the_same_in_every_spelling(spelt: tuple[bytes, dict[str, Any], dict[str, str]]) -> None:
    data, tensors, metadata = spelt
    header = read_header(lambda offset, size: data[offset : offset + size], len(data), path="x")
    start = header.size_bytes
    found = {
        e.name: (list(e.shape), e.offset_bytes - start, e.offset_bytes + e.size_bytes - start) for e in header.entries
    }
    assert found == tensors
    assert header.metadata == metadata
    assert {name for name, _ in deserialize(data)} == set(tensors)


LONG = 4_000_000

# Each of them took up to thirty times its length before it was refused.
LONG_AND_BAD: dict[str, bytes] = {
    "numbers": b'{"t":{"dtype":"F32","shape":[' + b"1," * (LONG // 2) + b'1],"data_offsets":[0,4]}}',
    "nesting": b'{"t":' + b"[" * (LONG // 2) + b"]" * (LONG // 2) + b"}",
    "lists": b'{"t":[' + b"[]," * (LONG // 3) + b"[]]}",
    "objects": b'{"t":[' + b"{}," * (LONG // 3) + b"{}]}",
    "objects in a tensor": b'{"t":{"dtype":' + b'{"a":' * (LONG // 5) + b"1" + b"}" * (LONG // 5) + b"}}",
    "tensors that are numbers": b"{" + b",".join(b'"%07d":0' % index for index in range(LONG // 12)) + b"}",
    "metadata of lists": b'{"__metadata__":{"a":[' + b"0," * (LONG // 2) + b"0]}}",
    "metadata of numbers": b'{"__metadata__":{' + b",".join(b'"%07d":0' % index for index in range(LONG // 12)) + b"}}",
    "quotes": b'{"' * (LONG // 2),
    "spaces": b"{" + b" " * LONG + b"]",
}


@pytest.mark.parametrize("name", LONG_AND_BAD)
def test_long_header_is_refused_before_it_is_built(name: str) -> None:
    data = file_of(LONG_AND_BAD[name], 4)
    pieces = [data[:8], data[8:-4]]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read_header(lambda offset, size: pieces[offset // 8], len(data), path="x")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(data) + (1 << 20)  # its text, and what a tensor may take


# --------------------------------------------------------------------------------------------- two values a byte


FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
needs_float4 = pytest.mark.skipif(FLOAT4 is None, reason="this torch has no float4")


def float4(*shape: int) -> torch.Tensor:
    """Return a tensor of which no two bytes next to each other are equal."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251).to(torch.uint8).reshape(shape).view(FLOAT4)


def described(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes as they are in the file."""
    return {name: (item["dtype"], item["shape"], bytes(item["data"])) for name, item in deserialize(path.read_bytes())}


@needs_float4
@pytest.mark.parametrize("checksum", [True, False])
def test_float4_is_what_the_package_makes_of_it(checksum: bool, path: Path, tmp_path: Path) -> None:
    """Its last dimension is twice as long in the file: two values are one element."""
    tensors = {
        "pages": float4(64, 256),
        "odd": float4(3, 5),
        "one": float4(1),
        "none": float4(3, 0),
        "w": torch.ones(7),
    }
    fp.save(tensors, path, checksum=checksum)
    of_package = tmp_path / "package.safetensors"
    save_file(tensors, of_package)
    assert described(path) == described(of_package)
    for file in (path, of_package):
        for loaded in (fp.load(file), load_file(file)):
            assert {name: (tensor.dtype, tensor.shape) for name, tensor in loaded.items()} == {
                name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()
            }
            for name, tensor in tensors.items():
                assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name
        target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        fp.load_into(file, target)
        assert all(torch.equal(target[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
        shown = {tensor.name: (tensor.dtype, tensor.shape) for tensor in fp.inspect(file).tensors}
        assert shown["odd"] == ("float4_e2m1fn_x2", (3, 5))
    assert fp.verify(path).ok


@needs_float4
def test_float4_without_dimensions_is_refused(path: Path) -> None:
    with pytest.raises(fp.ConfigError, match=r"'t' cannot .*reshape\(1\)"):
        fp.save({"t": float4(1).reshape(())}, path)


def test_float4_whose_rows_end_within_a_byte_is_no_tensor_of_torch(path: Path) -> None:
    path.write_bytes(file_of({"t": tensor(dtype="F4", shape=[2, 3], end=3)}, 3))
    with pytest.raises(fp.UnsupportedError, match=r"F4 and shape \[2, 3\]"):
        fp.load(path)
    (found,) = fp.inspect(path).tensors
    assert (found.dtype, found.shape) == ("F4", (2, 3))
    assert fp.verify(path).ok


def test_dtype_that_torch_lacks_is_named(path: Path) -> None:
    path.write_bytes(file_of({"t": tensor(dtype="F6_E2M3", shape=[4], end=3)}, 3))
    with pytest.raises(fp.UnsupportedError, match="F6_E2M3"):
        fp.load(path)
    assert fp.inspect(path).tensors[0].dtype == "F6_E2M3"
    assert fp.verify(path).ok


def test_shape_that_torch_cannot_make_is_our_error(path: Path) -> None:
    path.write_bytes(file_of({"t": tensor(shape=[0, 1 << 40, 1 << 40], end=0)}, 0))
    with pytest.raises(fp.FastPersistError):
        fp.load(path)


@pytest.mark.parametrize("shape", [(0, 1 << 62), ((1 << 63) - 1, 0), (1 << 31, 0, 1 << 32)])
def test_whatever_empty_tensor_torch_can_make_is_loaded(path: Path, shape: tuple[int, ...]) -> None:
    fp.save({"t": torch.empty(shape, dtype=torch.float64)}, path)
    assert fp.load(path)["t"].shape == load_file(path)["t"].shape == shape
    assert fp.verify(path).ok
    edited = path.read_bytes().replace(b'"shape":', b'"shape": ', 1)[:4096]  # as other software writes it
    path.write_bytes(edited)
    assert fp.load(path)["t"].shape == shape
