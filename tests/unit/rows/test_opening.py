"""Where rows lie in .npy, safetensors, raw files and pieces of them; every inconsistency is an error with a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.row_tables import make_rows, read_rows

import fastpersist as fp
from fastpersist.errors import CheckpointNotFoundError, ConfigError, FormatError, StorageError, UnsupportedError
from fastpersist.rows.opening import open_rows

ROWS = make_rows(10, 4)


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    np.save(tmp_path / "table.npy", ROWS.numpy())
    return tmp_path / "table.npy"


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    path = tmp_path / "table.safetensors"
    save_file({"x": ROWS, "y": ROWS.double() + 1, "scalar": torch.tensor(1.0), "flat": ROWS[:, 0].contiguous()}, path)
    return path


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / "table.bin"
    path.write_bytes(b"seven b" + ROWS.numpy().tobytes())
    return path


def test_npy(npy: Path) -> None:
    source = open_rows(npy)
    (piece,) = source.pieces
    assert (source.row_count, source.row_shape, source.dtype, source.row_bytes) == (10, (4,), torch.int32, 16)
    assert (piece.path, piece.row_count) == (str(npy), 10)
    assert source.position_of_row is None
    assert torch.equal(read_rows(source), ROWS)


def test_first_bytes_decide_and_not_the_name(npy: Path, tensors: Path) -> None:
    assert torch.equal(read_rows(open_rows(npy.rename(npy.with_suffix(".bin")))), ROWS)
    assert torch.equal(read_rows(open_rows(tensors.rename(tensors.with_suffix(".npy")), tensor="x")), ROWS)


def test_tensor_of_safetensors(tensors: Path, tmp_path: Path) -> None:
    assert torch.equal(read_rows(open_rows(tensors, tensor="x")), ROWS)
    assert torch.equal(read_rows(open_rows(tensors, tensor="y")), ROWS.double() + 1)
    flat = open_rows(tensors, tensor="flat")
    assert flat.row_shape == ()
    assert flat.row_bytes == 4
    assert torch.equal(read_rows(flat), ROWS[:, 0])
    save_file({"only": ROWS.bfloat16()}, tmp_path / "one.safetensors")
    assert torch.equal(read_rows(open_rows(tmp_path / "one.safetensors")), ROWS.bfloat16())


@pytest.mark.parametrize("shape", [(10, 4), (-1, 4), (10, 2, 2)])
def test_raw(raw: Path, shape: tuple[int, ...]) -> None:
    source = open_rows(raw, shape=shape, dtype=torch.int32, offset_bytes=7)
    assert torch.equal(read_rows(source), ROWS.view(10, *shape[1:]))


def test_raw_bytes_that_look_like_a_header_are_rows(tmp_path: Path) -> None:
    rows = torch.tensor([5, 0, 123, 7], dtype=torch.int32)  # 123 is "{"
    (tmp_path / "raw.bin").write_bytes(rows.numpy().tobytes())
    assert torch.equal(read_rows(open_rows(tmp_path / "raw.bin", shape=[-1], dtype=torch.int32)), rows)


def test_pieces_are_joined(tmp_path: Path, npy: Path, tensors: Path) -> None:
    (tmp_path / "disk2").mkdir()
    np.save(tmp_path / "disk2" / "more.npy", make_rows(3, 4, first=10).numpy())
    source = open_rows([npy, (tensors, "x"), str(tmp_path / "disk2" / "more.npy")])
    assert [piece.row_count for piece in source.pieces] == [10, 10, 3]
    assert source.row_count == 23
    assert torch.equal(read_rows(source), torch.cat([ROWS, ROWS, make_rows(3, 4, first=10)]))


def test_dtype_takes_elements_for_others_of_their_width(tmp_path: Path) -> None:
    rows = torch.randn(5, 3).bfloat16()
    np.save(tmp_path / "u2.npy", rows.view(torch.uint16).numpy())
    np.save(tmp_path / "v2.npy", rows.view(torch.uint16).numpy().view("V2"))
    np.save(tmp_path / "u1.npy", np.arange(6, dtype=np.uint8).reshape(2, 3))
    for name in ("u2.npy", "v2.npy"):
        assert torch.equal(read_rows(open_rows(tmp_path / name, dtype=torch.bfloat16)), rows)
    assert open_rows(tmp_path / "u1.npy", dtype=torch.float8_e4m3fn).dtype == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match=r"2 bytes.*torch.float32 of 4"):
        open_rows(tmp_path / "u2.npy", dtype=torch.float32)
    with pytest.raises(ConfigError, match="without a type"):
        open_rows(tmp_path / "v2.npy")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"tensor": "x"}, "without a name"),
        ({"shape": (10, 4), "dtype": torch.int32}, "says itself"),
        ({"offset_bytes": 4}, "says itself"),
        ({"dtype": "int32"}, "torch.dtype"),
    ],
)
def test_arguments_that_do_not_fit_npy(npy: Path, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        open_rows(npy, **arguments)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "name one with tensor="),
        ({"tensor": "z"}, "no tensor 'z'.*flat"),
        ({"tensor": "scalar"}, "scalar"),
        ({"tensor": "x", "shape": (10, 4), "dtype": torch.int32}, "says itself"),
    ],
)
def test_arguments_that_do_not_fit_safetensors(tensors: Path, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        open_rows(tensors, **arguments)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "neither .npy nor safetensors"),
        ({"shape": (-1, 4)}, "needs dtype="),
        ({"shape": 5, "dtype": torch.int32}, "sequence of numbers.*it is 5"),
        ({"shape": (1.5, 2), "dtype": torch.int32}, r"sequence of numbers.*it is \(1\.5, 2\)"),
        ({"shape": (None, 3), "dtype": torch.int32}, "sequence of numbers"),
        ({"shape": (), "dtype": torch.int32}, "no dimension"),
        ({"shape": (-2, 4), "dtype": torch.int32, "offset_bytes": 7}, "begins with -2"),
        ({"shape": (-1, 0), "dtype": torch.int32}, "nothing to read"),
        ({"shape": (-1, "a"), "dtype": torch.int32}, "sequence of numbers"),
        ({"shape": (-1, 4), "dtype": torch.int32}, "no whole rows of 16"),
        ({"shape": (-1, 4), "dtype": torch.int32, "offset_bytes": 1000}, "no whole rows"),
        ({"shape": (-1, 4), "dtype": torch.int32, "offset_bytes": -1}, "offset_bytes is -1"),
        ({"shape": (-1, 4), "dtype": torch.int32, "tensor": "x"}, "raw one"),
    ],
)
def test_arguments_that_do_not_fit_raw_files(raw: Path, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        open_rows(raw, **arguments)


def test_files_shorter_than_they_say(npy: Path, tensors: Path, raw: Path) -> None:
    with pytest.raises(FormatError, match="11 rows of 16 bytes do not fit"):
        open_rows(raw, shape=(11, 4), dtype=torch.int32, offset_bytes=7)
    for path in (npy, tensors):
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 1)
        with pytest.raises(FormatError) as caught:
            open_rows(path, tensor="x" if path == tensors else None)
        assert str(path) in str(caught.value)


def test_what_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no table at"):
        open_rows(tmp_path / "none.npy")
    with pytest.raises(StorageError, match="directory"):
        open_rows(tmp_path)
    (tmp_path / "empty.npy").touch()
    with pytest.raises(FormatError, match="empty"):
        open_rows(tmp_path / "empty.npy")
    torch.save(ROWS, tmp_path / "rows.pt")
    with pytest.raises(UnsupportedError, match=r"torch\.save"):
        open_rows(tmp_path / "rows.pt")
    np.savez(tmp_path / "rows.npz", rows=np.ones((2, 3)))
    with pytest.raises(FormatError, match="it is an npz file of NumPy"):
        open_rows(tmp_path / "rows.npz")
    np.save(tmp_path / "scalar.npy", np.float32(1))
    with pytest.raises(ConfigError, match="scalar"):
        open_rows(tmp_path / "scalar.npy")
    np.save(tmp_path / "no_bytes.npy", np.zeros((3, 0)))
    with pytest.raises(ConfigError, match="no bytes"):
        open_rows(tmp_path / "no_bytes.npy")
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.ones((2, 3))))
    with pytest.raises(UnsupportedError, match=r"fortran\.npy.*Fortran"):
        open_rows(tmp_path / "fortran.npy")


def test_no_rows_are_a_table(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.zeros((0, 3), np.float16))
    source = open_rows(tmp_path / "none.npy")
    assert (source.row_count, source.row_shape) == (0, (3,))


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ([], "at least one"),
        (7, "a path, or a list"),
        ([7], "a piece is a path"),
        ([("a", "b", "c")], "a piece is a path"),
        (b"bytes", "a piece is a path"),
        ("https://host/table.npy", "URL"),
    ],
)
def test_sources_that_make_no_sense(source: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        open_rows(source)


def test_pieces_of_different_rows_name_both(npy: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", make_rows(2, 5).numpy())
    with pytest.raises(ConfigError, match=r"table\.npy.*\(4,\).*wide\.npy.*\(5,\)"):
        open_rows([npy, tmp_path / "wide.npy"])
    with pytest.raises(ConfigError, match="about one file"):
        open_rows([npy], tensor="x")


def test_errors_are_those_of_the_package(npy: Path) -> None:
    with pytest.raises(fp.FastPersistError):
        open_rows(npy, tensor="x")
