"""What files that are no checkpoint are called, from their first bytes: the near misses, and any bytes at all."""

from __future__ import annotations

import io
import pickle
import random
import tarfile

import pytest

from fastpersist.formats.foreign import LOOK_BYTES, is_older_torch_file, looks_like


def tar_of(name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()[:LOOK_BYTES]


TORCH_NUMBER = 0x1950A86A20F9469CFC6C


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer; `git lfs pull` downloads the file itself",
        ),
        (b"GGUF\3\0\0\0", "a GGUF file of llama.cpp"),
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
        (
            b"\x93NUMPY\1\0",
            "an array of NumPy (.npy), for `fastpersist rows info` and `rows verify`",
        ),
        (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
        (b"\x1f\x8b\x08", "a gzip file; unpack it first"),
        (b"\xfd7zXZ\x00", "an xz file; unpack it first"),
        (b"BZh9", "a bzip2 file; unpack it first"),
        (b"\x28\xb5\x2f\xfd", "a zstd file; unpack it first"),
        (b"Rar!\x1a\x07\x01", "a RAR archive; unpack it first"),
        (b"PK\x05\x06" + bytes(18), "an empty zip archive"),
        (b"%PDF-1.7", "a PDF document"),
        (tar_of("weights.npy"), "a tar archive; unpack it first"),
        (b"\xef\xbb\xbf\n  <HTML><body>", "an HTML or XML page: what was downloaded is perhaps an error message"),
        (b" [1, 2]", "JSON"),
        (b"{not json at all", "JSON"),
        (b"\x1b[31mred\x1b[0m", "text"),
        ("weights: größer".encode(), "text"),
    ],
)
def test_names_of_formats(first: bytes, kind: str) -> None:
    assert looks_like(first) == kind
    assert not is_older_torch_file(first)


@pytest.mark.parametrize(
    "first", [b"", b" \n", b"\0", b"PK\x03\x04", b"GGU\xff", b"\x80\x01.", b"\x80", b"text\0", b"\xc3("]
)
def test_what_nobody_knows_has_no_name(first: bytes) -> None:
    assert looks_like(first) is None


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_are_told_from_older_files_of_torch(protocol: int) -> None:
    plain = pickle.dumps({"a": 1}, protocol)
    assert looks_like(plain) == "a pickle that torch.save did not write"
    assert not is_older_torch_file(plain)
    assert is_older_torch_file(pickle.dumps(TORCH_NUMBER, protocol))
    late = pickle.dumps([b"x" * 40, TORCH_NUMBER], protocol)  # the number is in it, and not where torch writes it
    assert not is_older_torch_file(late[:LOOK_BYTES])


@pytest.mark.parametrize("protocol", [0, 1])
def test_older_files_of_the_text_protocols_are_known_by_their_digits(protocol: int) -> None:
    assert is_older_torch_file(pickle.dumps(TORCH_NUMBER, protocol))
    assert not is_older_torch_file(pickle.dumps(TORCH_NUMBER + 1, protocol))


def test_tar_archives_are_torch_s_by_their_first_member() -> None:
    for name in ("sys_info", "pickle", "tensors", "storages"):
        assert is_older_torch_file(tar_of(name))
        assert is_older_torch_file(tar_of(f"./{name}"))
    for name in ("sys_info2", "storage", "model/tensors", "pickles"):
        assert not is_older_torch_file(tar_of(name))


def test_text_that_is_cut_inside_a_character_stays_text() -> None:
    text = "ö€😀" * 60
    for length in range(1, LOOK_BYTES):
        assert looks_like(text.encode()[:length]) == "text"
    assert looks_like(b"ab\xe2\x82 and more") is None  # a character that is broken in the middle is none


def test_any_bytes_can_be_looked_at() -> None:
    chance = random.Random(1)
    beginnings = [b"", b"\x80\x02", b"<", b"{", tar_of("pickle"), b"GGUF", b"BZ", b"\xef\xbb\xbf"]
    for _ in range(2000):
        first = (chance.choice(beginnings) + chance.randbytes(chance.randrange(40)))[:LOOK_BYTES]
        assert isinstance(looks_like(first), str | None)
        assert isinstance(is_older_torch_file(first), bool)
