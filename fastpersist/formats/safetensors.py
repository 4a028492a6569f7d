"""The safetensors container: header ⇄ bytes. Pure: no I/O of its own, no torch, hostile input expected.

We pad the header with spaces to a whole page, and place the tensors whose length is a multiple of a page first. So
most of the data is page aligned, though the format allows neither holes nor trailing bytes. The header's length depends
only on names, shapes and dtypes, because CRCs have a fixed width in it; so it can be written last.

Source: https://github.com/huggingface/safetensors (README, "Format"; safetensors/src/tensor.rs, validate).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import NamedTuple

from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import ConfigError, FormatError
from fastpersist.formats.layout import align_up

__all__ = [
    "CRC_KEY",
    "INDEX_NAME",
    "SINGLE_NAME",
    "WEIGHTS_NAME",
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

SINGLE_NAME = "model.safetensors"
"""The file of a model that lies in one, in a directory of HuggingFace's."""

INDEX_NAME = "model.safetensors.index.json"
"""The index of a model that lies in several files: `weight_map` tells which tensor is in which."""

WEIGHTS_NAME = re.compile(r"(?:sharded/)?(?:shard-\d+-)?model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?")
"""Names of a model's files, whichever program wrote them: a new model replaces them."""

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
    "float4_e2m1fn_x2": "F4",
}  # fmt: skip
"""safetensors' name of each torch dtype that it can hold."""

_PACKED = "F4"
"""One element of torch holds two values of this dtype, so the last dimension is twice as long in the file."""

TORCH_NAMES = {name: torch_name for torch_name, name in DTYPE_NAMES.items()}
"""torch's name of each safetensors dtype that torch has."""


class Entry(NamedTuple):
    """One tensor and where it lies.

    Attributes:
        name: The tensor's key in the header.
        dtype: safetensors' dtype name, such as "BF16".
        shape: Dimensions in the file; () for a scalar.
        offset_bytes: Where the tensor's data starts, from the file's start.
        size_bytes: The length of its data, row-major and contiguous.
        crc: Recorded CRC-32, None where none was recorded.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    crc: int | None = None

    @property
    def torch_dtype(self) -> str | None:
        """The name of torch's dtype; None if torch has none, or rows of the tensor would end within its elements."""
        if self.dtype == _PACKED and (not self.shape or self.shape[-1] % 2):
            return None
        return TORCH_NAMES.get(self.dtype)

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The dimensions of the tensor as torch has them, if it has the dtype."""
        if self.dtype != _PACKED or self.torch_dtype is None:
            return self.shape
        return *self.shape[:-1], self.shape[-1] // 2


@dataclass(frozen=True, slots=True)
class Header:
    """A header.

    Attributes:
        size_bytes: The length of the header, with the 8 bytes before it: where the data starts.
        entries: The tensors in the order of the data.
        metadata: The file's metadata, without our checksums.
    """

    size_bytes: int
    entries: tuple[Entry, ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class HeaderPlan:
    """A header that is complete except for the checksums.

    Attributes:
        header: Where everything lies.
        text: The header's JSON, with zeros for the checksums.
    """

    header: Header
    text: bytes


# ------------------------------------------------------------------------------------------------------- writing


def place_tensors(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], *, checksum: bool
) -> HeaderPlan:
    """Order and place tensors: whole pages first, then by falling item size, so that each keeps its natural alignment.

    Args:
        tensors: Name, safetensors dtype and shape of each, as torch has it.
        metadata: Written as it is under `__metadata__`.
        checksum: Reserve space for a CRC per tensor.

    Raises:
        ConfigError: Metadata is not str → str, a name cannot be encoded, or the header would be longer than the
            format allows, or a tensor of "F4" has no dimension.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"safetensors metadata maps str to str, but {key!r} maps to {type(value).__name__}")
        if not _is_text(key) or not _is_text(value):
            raise ConfigError(f"the metadata {key!r} is no text that UTF-8 can hold")
        if key == CRC_KEY:
            raise ConfigError(f"the metadata key {CRC_KEY!r} is where checksums are kept; choose another")
    for name, dtype, shape in tensors:
        if not isinstance(name, str) or name == "__metadata__":
            raise ConfigError(f"a tensor of a safetensors file cannot have the name {name!r}")
        if not _is_text(name):
            raise ConfigError(f"the name {name!r} is no text that UTF-8 can hold")
        if dtype == _PACKED and not shape:
            raise ConfigError(
                f"{name!r} cannot go into a safetensors file: an element of it is two values, and it has no dimension "
                "that could say so; save tensor.reshape(1)"
            )
    shaped = [(name, dtype, _shape_in_file(dtype, shape)) for name, dtype, shape in tensors]
    sized = [(name, dtype, shape, math.prod(shape) * _DTYPE_BITS[dtype] // 8) for name, dtype, shape in shaped]
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
        plan: A plan that `place_tensors` returned.
        crcs: The CRC of each entry, in order; None for a plan without checksums, and only then.
    """
    text = plan.text
    if crcs:
        # The first run of zeros that long is ours: the metadata stands first, and our key first in it.
        digits = "".join(f"{crc:08x}" for crc in crcs).encode()
        text = text.replace(b"0" * len(digits), digits, 1)
    padded_bytes = plan.header.size_bytes - _LENGTH_BYTES
    return padded_bytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded_bytes, b" ")


def _shape_in_file(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], 2 * shape[-1]) if dtype == _PACKED else shape


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
        path: The path of the file, for messages.

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
        # Decode first: json.loads would also take UTF-16, which the format does not allow.
        entries, metadata = _parse(read_at(_LENGTH_BYTES, length).decode(), _LENGTH_BYTES + length)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is damaged: {error}", path=path, offset_bytes=_LENGTH_BYTES) from None
    entries.sort(key=_data_order)
    start = end = _LENGTH_BYTES + length
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


# The parser goes through the header once and knows what must come next. It refuses what the format forbids as
# soon as it meets it, before it spends memory on more. For a valid tensor it calls only C code, a few times.

_SPACE = r"[ \t\n\r]*"
_NUMBER = r"(?:0|[1-9][0-9]{0,19})"
_NUMBERS = rf"(?:{_NUMBER}(?:{_SPACE},{_SPACE}{_NUMBER}){{0,63}})?"
_space = re.compile(_SPACE).match
_opening = re.compile(rf"{_SPACE}\{{{_SPACE}(\}})?").match
_colon = re.compile(rf"{_SPACE}:{_SPACE}").match
_next = re.compile(rf"{_SPACE}([,}}]){_SPACE}").match
# A tensor as all writers write it; other spellings that the format allows take a longer way.
_tensor = re.compile(
    rf'\{{{_SPACE}"dtype"{_SPACE}:{_SPACE}"(\w{{1,32}})"{_SPACE},{_SPACE}"shape"{_SPACE}:{_SPACE}\[{_SPACE}({_NUMBERS})'
    rf'{_SPACE}\]{_SPACE},{_SPACE}"data_offsets"{_SPACE}:{_SPACE}\[{_SPACE}({_NUMBER}){_SPACE},{_SPACE}({_NUMBER})'
    rf"{_SPACE}\]{_SPACE}\}}"
).match
_TENSOR_CHARACTERS_MAX = 1 << 16


def _parse(text: str, start: int) -> tuple[list[Entry], dict[str, str]]:
    """Parse a header.

    Args:
        text: The header's JSON.
        start: Where the data starts.

    Returns:
        The tensors, in the order of the header, and the metadata.

    Raises:
        ValueError, RecursionError: The text is no JSON, or not of this form.
    """
    entries: list[Entry] = []
    metadata: dict[str, str] | None = None
    names: set[str] = set()
    position, is_last = _first_name(text, 0)
    while not is_last:
        name, position = _name(text, position)
        if name == "__metadata__":
            if metadata is not None:
                raise ValueError("the metadata occur twice")
            metadata, position = _parse_metadata(text, position)
        else:
            if name in names:
                raise ValueError(f"tensor {name!r} occurs twice")
            names.add(name)
            entry, position = _parse_tensor(name, text, position, start)
            entries.append(entry)
        position, is_last = _behind(text, position)
    if position != len(text):
        raise ValueError(f"{text[position : position + 10]!r} follows it")
    return entries, metadata or {}


def _parse_metadata(text: str, position: int) -> tuple[dict[str, str], int]:
    metadata: dict[str, str] = {}
    position, is_last = _first_name(text, position)
    while not is_last:
        key, position = _name(text, position)
        if text[position : position + 1] != '"':
            raise ValueError("the metadata does not map text to text")
        value, position = scanstring(text, position + 1)
        if key in metadata:
            raise ValueError(f"the metadata {key!r} occurs twice")
        metadata[key] = _checked(value)
        position, is_last = _behind(text, position)
    return metadata, position


def _first_name(text: str, position: int) -> tuple[int, bool]:
    """Enter an object; return the position of its first name, and whether it has no names."""
    match = _opening(text, position)
    if match is None:
        raise ValueError(f"there is no object at character {position}")
    if match[1] is None:
        return match.end(), False
    rest = _space(text, match.end())
    return rest.end() if rest else match.end(), True


def _name(text: str, position: int) -> tuple[str, int]:
    """Read a name; return it and the position of its value."""
    if text[position : position + 1] != '"':
        raise ValueError(f"there is no name at character {position}")
    name, position = scanstring(text, position + 1)
    match = _colon(text, position)
    if match is None:
        raise ValueError(f"there is no value at character {position}")
    return _checked(name), match.end()


def _behind(text: str, position: int) -> tuple[int, bool]:
    """Skip the separator after a value; return where the next name begins, and whether the object ends instead."""
    match = _next(text, position)
    if match is None:
        raise ValueError(f"the object does not go on at character {position}")
    return match.end(), match[1] == "}"


def _checked(value: str) -> str:
    if not value.isascii():
        value.encode()  # escapes can spell half a surrogate pair, which is no text
    return value


def _parse_tensor(name: str, text: str, position: int, start: int) -> tuple[Entry, int]:
    match = _tensor(text, position)
    if match is not None:
        dtype, sizes, begin, end = match.groups()
        shape = tuple(map(int, sizes.split(","))) if sizes else ()
        return _entry(name, dtype, shape, int(begin), int(end), start), match.end()
    behind = text.find("}", position, position + _TENSOR_CHARACTERS_MAX) + 1  # no value in it holds a brace
    value: object = None
    if behind and text[position] == "{":
        try:
            value = json.loads(text[position:behind], object_pairs_hook=_unique_keys, parse_int=_whole_number)
        except ValueError as error:
            raise ValueError(f"tensor {name!r} is no JSON object: {error}") from None
    match value:
        case {"dtype": str(dtype), "shape": list(listed), "data_offsets": [begin, end], **others} if not others:
            if not (_is_size(begin) and _is_size(end) and all(_is_size(size) for size in listed)):
                raise ValueError(f"tensor {name!r} has an impossible shape or offset")
            return _entry(name, dtype, tuple(listed), begin, end, start), behind
    raise ValueError(f"tensor {name!r} is not described by dtype, shape and data_offsets")


def _whole_number(digits: str) -> int:
    """Read a number of a header, which is not negative; the official parser refuses "-0" too."""
    if digits.startswith("-"):
        raise ValueError(f"{digits[:20]} is negative")
    return int(digits)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, start: int) -> Entry:
    bits = _DTYPE_BITS.get(dtype)
    if bits is None:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    bits_max = bits << 64  # the official parser multiplies from the left
    first_stride = 1  # also a tensor without elements has strides, which must be numbers that torch can hold
    for dimension, size in enumerate(shape):
        bits *= size
        first_stride *= max(size, 1) if dimension else 1
        if max(size, first_stride) >= 1 << 63 or bits >= bits_max:
            raise ValueError(f"tensor {name!r} has an impossible shape")
    if begin >= 1 << 62 or bits % 8 or bits // 8 != end - begin:
        raise ValueError(f"tensor {name!r} of dtype {dtype} and shape {list(shape)} does not have {end - begin} bytes")
    return Entry(name, dtype, shape, start + begin, end - begin)


def _with_crcs(entries: list[Entry], digits: str | None) -> tuple[Entry, ...]:
    """Attach the recorded CRCs; if the metadata was edited or is not ours, there are none."""
    if digits is None or len(digits) != 8 * len(entries) or not all(c in "0123456789abcdef" for c in digits):
        return tuple(entries)
    return tuple(e._replace(crc=int(digits[8 * i : 8 * i + 8], 16)) for i, e in enumerate(entries))
