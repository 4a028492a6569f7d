"""Guesses from its first bytes what a file is that is no checkpoint; only for error messages.

Source: the magic numbers in the documents of each format; torch/serialization.py for its own older formats.
"""

from __future__ import annotations

import codecs
from typing import Final

__all__ = ["LOOK_BYTES", "is_older_torch_file", "looks_like"]

LOOK_BYTES: Final = 512
"""How much of a file to show: a tar archive has its magic number behind the first member's fields."""

_TAR_MAGIC: Final = slice(257, 262)
_MAGICS: Final = (
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer; `git lfs pull` downloads the file itself"),
    (b"GGUF", "a GGUF file of llama.cpp"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "an array of NumPy (.npy), for `fastpersist rows info` and `rows verify`"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"\x1f\x8b", "a gzip file; unpack it first"),
    (b"\xfd7zXZ\x00", "an xz file; unpack it first"),
    (b"BZh", "a bzip2 file; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; unpack it first"),
    (b"Rar!\x1a\x07", "a RAR archive; unpack it first"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"%PDF", "a PDF document"),
)
_PAGES: Final = (b"<!doctype html", b"<html", b"<head", b"<?xml", b"<script")
_TEXT_CONTROLS: Final = frozenset(b"\t\n\r\f\x1b")

# The long number that every older file of torch.save begins with: as protocols 2 to 5 pickle it, and as 0 and 1 do.
_TORCH_NUMBER: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TORCH_NUMBER_IN_DIGITS: Final = b"L119547037146038801333356L"
# And the first members of the tar archives that it wrote before.
_TORCH_TAR_MEMBERS: Final = (b"sys_info\0", b"pickle\0", b"tensors\0", b"storages\0")


def is_older_torch_file(first: bytes) -> bool:
    """Tell from the first LOOK_BYTES of a file whether torch.save may have written it before it wrote zips."""
    if first[_TAR_MAGIC] == b"ustar":
        return first.removeprefix(b"./").startswith(_TORCH_TAR_MEMBERS)
    # The number follows the protocol, and from protocol 4 on the length of a frame.
    return first.startswith(_TORCH_NUMBER_IN_DIGITS) or (first[:1] == b"\x80" and _TORCH_NUMBER in first[:32])


def looks_like(first: bytes) -> str | None:
    """Say what a file looks like, with an article, from its first LOOK_BYTES; None if it is not known."""
    for magic, kind in _MAGICS:
        if first.startswith(magic):
            return kind
    if first[_TAR_MAGIC] == b"ustar":
        return "a tar archive; unpack it first"
    if first[:1] == b"\x80" and first[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "a pickle that torch.save did not write"
    start = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(_PAGES):
        return "an HTML or XML page: what was downloaded is perhaps an error message"
    if not _is_text(first):
        return None
    return "JSON" if start[:1] in (b"{", b"[") else "text"


def _is_text(first: bytes) -> bool:
    """Tell whether bytes are UTF-8 without control characters."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(first)  # which lets the last character be cut off
    except UnicodeDecodeError:
        return False
    return all(byte >= 32 or byte in _TEXT_CONTROLS for byte in first) and bool(first.strip())
