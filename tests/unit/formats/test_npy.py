"""Headers of .npy against numpy's own reader and writer, and what is refused by name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as numpy_format

from fastpersist.errors import ConfigError, FormatError, UnsupportedError
from fastpersist.formats import npy

shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)


def written(array: Any, version: tuple[int, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    numpy_format.write_array(buffer, array, version=version, allow_pickle=True)
    return buffer.getvalue()


def read(data: bytes) -> npy.Header:
    def read_at(offset_bytes: int, size_bytes: int) -> bytes:
        assert offset_bytes + size_bytes <= len(data)
        return data[offset_bytes : offset_bytes + size_bytes]

    return npy.read_header(read_at, len(data), path="table.npy")


def file_of(text: str, data_bytes: int = 0, version: int = 1) -> bytes:
    width = 2 if version == 1 else 4
    header = text.encode()
    return b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(width, "little") + header + bytes(data_bytes)


@given(st.sampled_from(sorted(npy.DTYPE_NAMES)), shapes)
def test_numpy_reads_what_is_written(dtype: str, shape: tuple[int, ...]) -> None:
    header = npy.encode_header(dtype, shape)
    assert len(header) == npy.HEADER_BYTES == 4096
    array = np.zeros(shape, npy.DTYPE_NAMES[dtype])
    found = np.load(io.BytesIO(header + array.tobytes()))
    assert found.dtype == array.dtype
    assert found.shape == shape
    assert read(header + array.tobytes()) == npy.Header(dtype, array.dtype.itemsize, shape, 4096)


@given(st.sampled_from(sorted(npy.DTYPE_NAMES)), shapes, st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_what_numpy_writes_is_read(dtype: str, shape: tuple[int, ...], version: tuple[int, int]) -> None:
    array = np.ones(shape, npy.DTYPE_NAMES[dtype])
    data = written(array, version)
    header = read(data)
    assert (header.dtype, header.shape) == (dtype, shape)
    assert data[header.offset_bytes :] == array.tobytes()
    assert header.data_bytes == array.nbytes


def test_memmap_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    path.write_bytes(npy.encode_header("float32", (3, 2)) + np.arange(6, dtype="<f4").tobytes())
    found = np.load(path, mmap_mode="r")
    assert found.offset == 4096
    assert found.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (np.asfortranarray(np.ones((2, 3))), "Fortran order"),
        (np.ones(3, ">f4"), "big-endian"),
        (np.array([None, {}], object), "Python objects"),
        (np.array(["a", "bc"]), "strings"),
        (np.array([b"a", b"bc"]), "strings"),
        (np.zeros(2, [("x", "<f4"), ("y", "<i8")]), "structured"),
        (np.zeros(2, "<M8[ns]"), "dates"),
        (np.zeros(2, "<m8[s]"), "time differences"),
        (np.zeros(2, np.longdouble), "none of torch's"),
    ],
)
def test_other_arrays_are_refused_by_name(array: Any, word: str) -> None:
    with pytest.raises(UnsupportedError, match=word) as caught:
        read(written(array))
    assert "table.npy" in str(caught.value)


@pytest.mark.parametrize("array", [np.arange(5), np.ones((1, 4)), np.ones((4, 1)), np.ones((0, 3)), np.float64(2)])
def test_an_order_of_one_dimension_makes_no_difference(array: Any) -> None:
    data = written(array).replace(b"'fortran_order': False", b"'fortran_order': True ")
    assert read(data).shape == array.shape


def test_one_byte_has_no_order() -> None:
    assert read(file_of("{'descr': '>i1', 'fortran_order': False, 'shape': (2,)}", 2)).dtype == "int8"


def test_elements_without_a_type_keep_their_width() -> None:
    assert read(written(np.zeros((4, 2), "V2"))) == npy.Header("", 2, (4, 2), 128)


@pytest.mark.parametrize(
    "text",
    [
        "{'shape': (2, 3), 'descr': '|u1', 'fortran_order': False}",  # any order, no comma at the end
        "{'descr':'|u1','fortran_order':False,'shape':(2,3)}\n",
        '{"descr": "|u1", "fortran_order": False, "shape": (2, 3), }   \n',
        "{'descr': '|u1', 'fortran_order': False, 'shape': ( 2 , 3, ) , }",
    ],
)
def test_spellings_of_other_writers(text: str) -> None:
    data = file_of(text, 6)
    assert read(data).shape == np.load(io.BytesIO(data)).shape == (2, 3)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "too few"),
        (b"\x93NUMPY\x01\x00v\x00", "too few"),
        (b"PK\x03\x04" + bytes(40), "does not begin"),
        (b"\x93NUMPY\x04\x00" + bytes(40), "version 4.0"),
        (b"\x93NUMPY\x01\x01" + bytes(40), "version 1.1"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(40), "does not fit"),
        (b"\x93NUMPY\x01\x00\xff\x00" + bytes(40), "does not fit"),
        (file_of("{'descr': '|u1', 'fortran_order': False, 'shape': (2, 3)}", 5), "6 bytes, and 5"),
        (file_of("[1, 2, 3]"), "no dict"),
        (file_of("{'descr': '|u1', 'fortran_order': False}"), "missing"),
        (file_of("{'descr': '|u1', 'fortran_order': False, 'shape': (0,), 'x': 1}"), "unknown"),
        (file_of("{'descr': '|u1', 'descr': '|u1', 'shape': (0,)}"), "twice"),
        (file_of("{'descr': '|u1', 'fortran_order': 0, 'shape': (0,)}"), "impossible value"),
        (file_of("{'descr': '|u1', 'fortran_order': False, 'shape': (-1,)}"), "impossible value"),
        (file_of("{'descr': '|u1', 'fortran_order': False, 'shape': (1)}"), "not a tuple"),
        (file_of("{'descr': '|u1', 'fortran_order': False, 'shape': (01,)}"), "impossible value"),
        (file_of("{'descr': '|u1', 'fortran_order': False, 'shape': (0,)} x"), "follows"),
        (file_of("{'descr': '|u1', 'fortran_order': False 'shape': (0,)}"), "go on"),
        (file_of("{'descr': 'float', 'fortran_order': False, 'shape': (0,)}"), "no dtype"),
        (file_of("{'descr': '<f0', 'fortran_order': False, 'shape': (0,)}"), "no dtype"),
        (file_of("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 9999999999999999999)}"), "no possible array"),
        (file_of("{'descr': __import__('os'), 'fortran_order': False, 'shape': (0,)}"), "impossible value"),
        (file_of("{" * 60_000), "no key"),
        (file_of("{'descr': '|u1', 'fortran_order': False, 'shape': (" + "1," * 20_000), "impossible value"),
        (file_of("{'d\xff", version=3)[:-1] + b"\xff", "damaged"),
    ],
)
def test_damage_is_named(data: bytes, word: str) -> None:
    with pytest.raises(FormatError, match=word):
        read(data)


def test_what_numpy_lacks_is_not_written() -> None:
    with pytest.raises(ConfigError, match=r"bfloat16.*safetensors"):
        npy.encode_header("bfloat16", (1, 2))
    with pytest.raises(ConfigError, match="dimensions"):
        npy.encode_header("float32", (1,) * 2000)
