"""Bytes of stored tensors: every byte once, in order, in bounded pieces, wherever tensors lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.sameness import assert_same_values

import fastpersist as fp
from fastpersist.contents.pieces import read_pieces
from fastpersist.contents.stored import open_contents


def read_all(path: Path) -> dict[str, torch.Tensor]:
    """Put the pieces of each tensor together."""
    with open_contents(str(path)) as contents:
        tensors = list(contents.tensors.values())
        found: list[list[torch.Tensor]] = [[] for _ in tensors]
        last = (-1, 0)
        for batch in read_pieces(tensors):
            assert sum(one.data.numel() for one in batch) <= 4 << 20
            for piece in batch:
                assert (piece.number, piece.from_bytes) >= last
                assert piece.from_bytes == sum(one.numel() * one.itemsize for one in found[piece.number])
                last = piece.number, piece.from_bytes + piece.data.numel()
                found[piece.number].append(piece.values(tensors[piece.number].dtype).clone())
        return {
            tensor.name: torch.cat(pieces).reshape(tensor.shape)
            if pieces
            else torch.empty(tensor.shape, dtype=tensor.dtype)
            for tensor, pieces in zip(tensors, found, strict=True)
        }


def tensors_of_all_sizes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [0, 1, 2, 3, 1000, 1024, 4095, 4096, 4097, 1 << 20, (4 << 20) - 8192, 4 << 20, (9 << 20) + 5]
    return {f"t{size}": torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator) for size in sizes} | {
        f"s{n}": torch.full((n % 7,), n, dtype=torch.int16) for n in range(900)
    }


@pytest.mark.parametrize("writer", ["fp.pt", "torch.pt", "fp.safetensors", "hf.safetensors"])
def test_every_byte_once(tmp_path: Path, writer: str) -> None:
    path = tmp_path / writer
    expected = tensors_of_all_sizes()
    if writer == "torch.pt":
        torch.save(expected, path)
    elif writer == "hf.safetensors":
        save_file(expected, path)
    else:
        fp.save(expected, path)
    assert_same_values(read_all(path), expected)


def test_elements_at_odd_offsets(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = (
        b'{"odd":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"w":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    )
    data = torch.tensor([1.5, -2.0]).numpy().tobytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abc" + data)
    assert read_all(path)["w"].tolist() == [1.5, -2.0]


def test_views_of_any_stride(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    base = torch.arange(1 << 21, dtype=torch.float32).reshape(1 << 10, 1 << 11)
    expected = {
        "base": base,
        "transposed": base.t(),
        "column": base[:, 7],
        "every third": base[::3, ::2],
        "row": base[5],
        "expanded": base[0, :4].expand(3, 4),
        "permuted": base.reshape(64, 16, 2048).permute(2, 0, 1),
    }
    fp.save(expected, path)
    assert_same_values(read_all(path), expected)


def test_conjugate_and_negative_views(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    value = torch.tensor([1 + 2j, 3 - 4j])
    expected = {"conj": value.conj(), "neg": value.clone().conj().imag}
    assert expected["neg"].is_neg()
    torch.save(expected, path)
    found = read_all(path)
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert found["neg"].tolist() == [-2.0, 4.0]


def test_files_read_side_by_side_are_cut_alike(tmp_path: Path) -> None:
    expected = tensors_of_all_sizes()
    fp.save(expected, tmp_path / "a.pt")
    save_file(expected, tmp_path / "b.safetensors")
    with open_contents(str(tmp_path / "a.pt")) as a, open_contents(str(tmp_path / "b.safetensors")) as b:
        both = [[one.tensors[name] for name in expected] for one in (a, b)]
        for ours, theirs in zip(*map(read_pieces, both), strict=True):
            assert [piece[:2] for piece in ours] == [piece[:2] for piece in theirs]


def test_a_file_that_is_cut_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    fp.save({"w": torch.ones(16 << 20, dtype=torch.uint8)}, path)
    with open_contents(str(path)) as contents:
        with path.open("r+b") as file:
            file.truncate(1 << 20)
        with pytest.raises(fp.StorageError):
            list(read_pieces(list(contents.tensors.values())))


def test_an_iterator_that_is_given_up_leaves_nothing_under_way(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    fp.save({"w": torch.ones(64 << 20, dtype=torch.uint8)}, path)
    with open_contents(str(path)) as contents:
        pieces = read_pieces(list(contents.tensors.values()))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
