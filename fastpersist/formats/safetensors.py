"""The safetensors container: header ⇄ bytes. Pure: no I/O of its own, no torch, hostile input expected.

We write the header padded with spaces to a whole page and the tensors whose length is a multiple of a page first, so
that the bulk of the data is page aligned without leaving the format, which allows neither holes nor trailing bytes.
The header's length depends on names, shapes and dtypes alone; it is written last. CRCs have a fixed width in it.

Source: https://github.com/huggingface/safetensors (README, "Format"; safetensors/src/tensor.rs, validate).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import ConfigError, FormatError
from fastpersist.layout import align_up

__all__ = [
    "CRC_KEY",
    "Entry",
    "Header",
    "HeaderPlan",
    "encode_header",
    "is_safetensors",
    "place_tensors",
    "read_header",
]

CRC_KEY = "fastpersist.crc32"
"""Metadata key: eight hexadecimal digits per tensor, in the order of the data."""

_LENGTH_BYTES = 8
_HEADER_LIMIT_BYTES = 100_000_000
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

DTYPE_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16", "uint16": "U16", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32",
    "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64", "complex64": "C64",
}  # fmt: skip
"""safetensors' name of each torch dtype that it can hold."""

TORCH_NAMES = {name: torch_name for torch_name, name in DTYPE_NAMES.items()}
"""torch's name of each safetensors dtype that torch has."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor and where it lies.

    Attributes:
        name: Its key.
        dtype: safetensors' dtype name, such as "BF16".
        shape: Dimensions; () for a scalar.
        offset_bytes: Where its data starts, from the file's start.
        size_bytes: Length of its data, row-major and contiguous.
        crc: Recorded CRC-32, None where none was recorded.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    crc: int | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """A header.

    Attributes:
        size_bytes: Its length, with the 8 bytes before it: where the data starts.
        entries: The tensors in the order of the data.
        metadata: Without our checksums.
    """

    size_bytes: int
    entries: tuple[Entry, ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class HeaderPlan:
    """A header that is complete but for the checksums.

    Attributes:
        header: Where everything lies.
        text: Its JSON, with zeros for the checksums.
    """

    header: Header
    text: bytes


# ------------------------------------------------------------------------------------------------------- writing


def place_tensors(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], *, checksum: bool
) -> HeaderPlan:
    """Order and place tensors: whole pages first, then by falling item size, so that each keeps its natural alignment.

    Args:
        tensors: Name, safetensors dtype and shape of each.
        metadata: Kept as it is under `__metadata__`.
        checksum: Leave room for a CRC per tensor.

    Raises:
        ConfigError: Metadata is not str → str, a name cannot be encoded, or the header would be longer than the
            format allows.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"safetensors metadata maps str to str, but {key!r} maps to {type(value).__name__}")
        if not _is_text(key) or not _is_text(value):
            raise ConfigError(f"the metadata {key!r} is no text that UTF-8 can hold")
        if key == CRC_KEY:
            raise ConfigError(f"the metadata key {CRC_KEY!r} is where checksums are kept; choose another")
    for name, _, _ in tensors:
        if not _is_text(name):
            raise ConfigError(f"the name {name!r} is no text that UTF-8 can hold")
    sized = [(name, dtype, shape, math.prod(shape) * _DTYPE_BITS[dtype] // 8) for name, dtype, shape in tensors]
    sized.sort(key=lambda item: (item[3] % BLOCK_BYTES != 0, -_DTYPE_BITS[item[1]], item[0]))
    text = _header_text(sized, metadata, checksum)
    size_bytes = align_up(_LENGTH_BYTES + len(text), BLOCK_BYTES)
    if size_bytes - _LENGTH_BYTES > _HEADER_LIMIT_BYTES:
        raise ConfigError(
            f"a header of {size_bytes} bytes for {len(sized)} tensors is over the {_HEADER_LIMIT_BYTES} bytes that "
            "safetensors allows; save to a .pt path instead"
        )
    entries = []
    offset_bytes = size_bytes
    for name, dtype, shape, tensor_bytes in sized:
        entries.append(Entry(name, dtype, shape, offset_bytes, tensor_bytes))
        offset_bytes += tensor_bytes
    return HeaderPlan(Header(size_bytes, tuple(entries), dict(metadata)), text)


def encode_header(plan: HeaderPlan, crcs: Sequence[int] | None) -> bytes:
    """Encode length and header, padded to whole blocks.

    Args:
        plan: From `place_tensors`.
        crcs: The CRC of each entry, in order; None exactly when it was placed without checksums.
    """
    text = plan.text
    if crcs:
        # The first run of zeros that long is ours: the metadata stands first, and our key first in it.
        digits = "".join(f"{crc:08x}" for crc in crcs).encode()
        text = text.replace(b"0" * len(digits), digits, 1)
    padded_bytes = plan.header.size_bytes - _LENGTH_BYTES
    return padded_bytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded_bytes, b" ")


def _is_text(value: str) -> bool:
    """Tell whether a str can be encoded: Python allows half a surrogate pair, UTF-8 does not."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _header_text(
    sized: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str], checksum: bool
) -> bytes:
    all_metadata = {CRC_KEY: "0" * 8 * len(sized), **metadata} if checksum and sized else dict(metadata)
    content: dict[str, object] = {"__metadata__": all_metadata} if all_metadata else {}
    start = 0  # offsets count from the header's end, so they do not depend on its length
    for name, dtype, shape, size_bytes in sized:
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, start + size_bytes)}
        start += size_bytes
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


# ------------------------------------------------------------------------------------------------------- reading


def is_safetensors(first_bytes: bytes) -> bool:
    """Tell from the first nine bytes of a file whether it claims to be safetensors."""
    length = int.from_bytes(first_bytes[:_LENGTH_BYTES], "little")
    return first_bytes[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and length <= _HEADER_LIMIT_BYTES


def read_header(read_at: Callable[[int, int], bytes], file_bytes: int, *, path: str) -> Header:
    """Parse and prove a header: every byte of the data belongs to exactly one tensor.

    Args:
        read_at: read_at(offset_bytes, size_bytes) reads from the file.
        file_bytes: Length of the file.
        path: For messages.

    Raises:
        FormatError: Anything that the format forbids.
    """
    if file_bytes < _LENGTH_BYTES:
        raise FormatError(f"{file_bytes} bytes are too few for a safetensors file", path=path)
    length = int.from_bytes(read_at(0, _LENGTH_BYTES), "little")
    if length == 0:
        raise FormatError("the header is empty: the save of this file never finished", path=path, offset_bytes=0)
    if length > min(_HEADER_LIMIT_BYTES, file_bytes - _LENGTH_BYTES):
        raise FormatError(f"a header of {length} bytes does not fit", path=path, offset_bytes=0)
    try:
        # Decoded here: json.loads would also take UTF-16, which the format does not.
        text = read_at(_LENGTH_BYTES, length).decode()
        content = json.loads(text, object_pairs_hook=_unique_keys, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is no JSON: {error}", path=path, offset_bytes=_LENGTH_BYTES) from None
    if not isinstance(content, dict):
        raise FormatError("the header is no JSON object", path=path, offset_bytes=_LENGTH_BYTES)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("the metadata does not map text to text", path=path, offset_bytes=_LENGTH_BYTES)
    start = _LENGTH_BYTES + length
    entries = sorted((_entry(name, value, start, path) for name, value in content.items()), key=_data_order)
    end = start
    for entry in entries:
        if entry.offset_bytes != end:
            raise FormatError(
                f"tensor {entry.name!r} leaves a hole or overlaps another",
                path=path,
                offset_bytes=entry.offset_bytes,
            )
        end += entry.size_bytes
    if end != file_bytes:
        raise FormatError(f"the tensors end at {end}, the file at {file_bytes}", path=path, offset_bytes=end)
    return Header(start, _with_crcs(entries, metadata.pop(CRC_KEY, None)), metadata)


def _data_order(entry: Entry) -> tuple[int, int]:
    return entry.offset_bytes, entry.size_bytes


def _whole_number(digits: str) -> int:
    """Read a number of a header; none is negative, and "-0" is none of the official parser's."""
    if digits.startswith("-"):
        raise ValueError(f"{digits[:20]} is negative")
    return int(digits)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    for name, value in pairs:
        name.encode()  # escapes can spell half a surrogate pair, which is no text
        if isinstance(value, str):
            value.encode()
    return content


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _entry(name: str, value: object, start: int, path: str) -> Entry:
    if not isinstance(value, dict):
        value = {}
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if len(value) == 3:
            pass
        case _:
            raise FormatError(f"tensor {name!r} is not described by dtype, shape and data_offsets", path=path)
    if dtype not in _DTYPE_BITS:
        raise FormatError(f"tensor {name!r} has the unknown dtype {dtype!r}", path=path)
    if not (_is_size(begin) and _is_size(end) and all(_is_size(size) for size in shape)):
        raise FormatError(f"tensor {name!r} has an impossible shape or offset", path=path)
    bits = _DTYPE_BITS[dtype]
    strides = 1  # also a tensor without elements has strides, which must be numbers that a machine can hold
    for size in shape:
        bits *= size
        strides *= max(size, 1)
        if strides * _DTYPE_BITS[dtype] >= 1 << 66:
            raise FormatError(f"tensor {name!r} has an impossible shape", path=path)
    if bits % 8 or bits // 8 != end - begin:
        raise FormatError(
            f"tensor {name!r} of dtype {dtype} and shape {shape} does not have {end - begin} bytes",
            path=path,
            offset_bytes=start + begin,
        )
    return Entry(name, dtype, tuple(shape), start + begin, end - begin)


def _with_crcs(entries: list[Entry], digits: str | None) -> tuple[Entry, ...]:
    """Attach the recorded CRCs; metadata that is not ours or was edited counts as none recorded."""
    if digits is None or len(digits) != 8 * len(entries) or not all(c in "0123456789abcdef" for c in digits):
        return tuple(entries)
    return tuple(
        Entry(e.name, e.dtype, e.shape, e.offset_bytes, e.size_bytes, int(digits[8 * i : 8 * i + 8], 16))
        for i, e in enumerate(entries)
    )
