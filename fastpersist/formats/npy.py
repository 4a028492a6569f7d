"""The .npy container: header ⇄ bytes. Pure: no I/O of its own, no torch, hostile input expected.

A header is a Python literal, a dict of three keys. This reads the literals that writers of arrays write, by a grammar
of its own that takes linear time and runs nothing. We pad the header that we write to a whole page, so rows can begin
on pages; numpy, np.memmap and other readers take it as any other.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import ConfigError, FormatError, UnsupportedError

__all__ = ["DTYPE_NAMES", "HEADER_BYTES", "Header", "dtype_of", "encode_header", "is_npy", "read_header"]

HEADER_BYTES = BLOCK_BYTES
"""Length of the headers that we write."""

DTYPE_NAMES = {
    "bool": "|b1", "uint8": "|u1", "int8": "|i1", "uint16": "<u2", "int16": "<i2", "uint32": "<u4", "int32": "<i4",
    "uint64": "<u8", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip
"""numpy's name of each torch dtype that it has."""

_TORCH_NAMES = {name[1:]: torch_name for torch_name, name in DTYPE_NAMES.items()}
_REFUSED = {
    "O": "Python objects, which are pickled",
    "S": "strings",
    "U": "strings",
    "a": "strings",
    "M": "dates",
    "m": "time differences",
}
_MAGIC = b"\x93NUMPY"
_LENGTH_WIDTHS = {1: 2, 2: 4, 3: 4}
_HEADER_LIMIT_BYTES = 1 << 16
_SIZE_LIMIT = 1 << 62

_dtype = re.compile(r"([<>|=])([A-Za-z])([0-9]{0,9})").match
_pair = re.compile(r"[ \n]*(['\"])([a-z_]{1,20})\1[ \n]*:[ \n]*").match
_text = re.compile(r"(['\"])([^'\"\\\n]{1,64})\1").match
_bool = re.compile(r"True|False").match
_NUMBER = r"(?:0|[1-9][0-9]{0,18})[ \n]*"
_shape = re.compile(rf"\([ \n]*((?:{_NUMBER},[ \n]*){{0,64}}(?:{_NUMBER})?)\)").match
_next = re.compile(r"[ \n]*(,?)[ \n]*(\}?)").match


@dataclass(frozen=True, slots=True)
class Header:
    """A header.

    Attributes:
        dtype: torch's name of the dtype; "" for elements of a width but no type ("|V2"), as numpy saves bfloat16.
        item_bytes: The width of an element.
        shape: Dimensions, the last one contiguous; () for a scalar.
        offset_bytes: Where the data starts.
    """

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def data_bytes(self) -> int:
        """The length of the data."""
        return math.prod(self.shape) * self.item_bytes


def is_npy(first_bytes: bytes) -> bool:
    """Tell from the first six bytes of a file whether it claims to be .npy."""
    return first_bytes.startswith(_MAGIC)


def encode_header(dtype: str, shape: Sequence[int]) -> bytes:
    """Encode a header of `HEADER_BYTES` bytes for an array in row-major order.

    Args:
        dtype: torch's name of the dtype.
        shape: The dimensions of the array.

    Raises:
        ConfigError: numpy has no such dtype, or the header would be longer.
    """
    if dtype not in DTYPE_NAMES:
        raise ConfigError(f"numpy has no dtype {dtype}, so a .npy file cannot hold it; write a .safetensors file")
    sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    text = f"{{'descr': '{DTYPE_NAMES[dtype]}', 'fortran_order': False, 'shape': ({sizes}), }}".encode()
    padded_bytes = HEADER_BYTES - len(_MAGIC) - 4
    if len(text) >= padded_bytes:
        raise ConfigError(f"a header for {len(shape)} dimensions is over the {HEADER_BYTES} bytes that it has")
    start = _MAGIC + b"\x01\x00" + padded_bytes.to_bytes(2, "little")
    return start + text.ljust(padded_bytes - 1, b" ") + b"\n"


def read_header(read_at: Callable[[int, int], bytes], file_bytes: int, *, path: str) -> Header:
    """Parse and prove a header: all of the array lies in the file.

    Args:
        read_at: read_at(offset_bytes, size_bytes) reads from the file.
        file_bytes: Length of the file.
        path: The path of the file, for messages.

    Raises:
        FormatError: The file is damaged or cut off.
        UnsupportedError: A valid array of a kind that has no rows of numbers; the message names the kind.
    """
    start_bytes = len(_MAGIC) + 2
    if file_bytes < start_bytes + 4:
        raise FormatError(f"{file_bytes} bytes are too few for a .npy file", path=path)
    first = read_at(0, start_bytes + 4)
    if not is_npy(first):
        raise FormatError("it does not begin as a .npy file", path=path, offset_bytes=0)
    width = _LENGTH_WIDTHS.get(first[6])
    if width is None or first[7] != 0:
        raise FormatError(f"version {first[6]}.{first[7]} of .npy is unknown", path=path, offset_bytes=6)
    length = int.from_bytes(first[start_bytes : start_bytes + width], "little")
    offset_bytes = start_bytes + width + length
    if length > _HEADER_LIMIT_BYTES or offset_bytes > file_bytes:
        raise FormatError(f"a header of {length} bytes does not fit", path=path, offset_bytes=start_bytes)
    text = read_at(start_bytes + width, length)
    try:
        pairs = _parse(text.decode("utf-8" if first[6] == 3 else "latin-1"))
        dtype, item_bytes = dtype_of(pairs["descr"])
        shape = _shape_of(pairs["shape"], item_bytes)
    except ValueError as error:
        raise FormatError(f"the header is damaged: {error}", path=path, offset_bytes=start_bytes + width) from None
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from None
    # An order of dimensions makes a difference only if two of them have one.
    if pairs["fortran_order"] == "True" and 0 not in shape and sum(size > 1 for size in shape) > 1:
        raise UnsupportedError(
            f"{path} is in Fortran order: its rows do not lie in one piece; save numpy.ascontiguousarray(array)"
        )
    header = Header(dtype, item_bytes, shape, offset_bytes)
    if header.data_bytes > file_bytes - offset_bytes:
        raise FormatError(
            f"the array should have {header.data_bytes} bytes, and {file_bytes - offset_bytes} are there",
            path=path,
            offset_bytes=offset_bytes,
        )
    return header


def dtype_of(name: str) -> tuple[str, int]:
    """Return torch's name of a dtype of numpy ("" for a width without a type), and the width of an element in bytes.

    Raises:
        ValueError: The text is no name of a dtype.
        UnsupportedError: torch has no such elements; the message names them.
    """
    if not name or name[0] in "[({":
        raise UnsupportedError("its elements are structured; save each field as an array of its own")
    match = _dtype(name)
    if match is None or (match.end() != len(name) and match[2] not in "Mm"):  # dates have a unit behind
        raise ValueError(f"{name[:64]!r} is no dtype")
    order, kind, digits = match.groups()
    if kind in _REFUSED:
        raise UnsupportedError(f"its elements are {_REFUSED[kind]} ({name}), which are no numbers")
    if not digits or int(digits) == 0:
        raise ValueError(f"{name!r} is no dtype")
    if kind == "V":
        return "", int(digits)
    torch_name = _TORCH_NAMES.get(kind + digits)
    if torch_name is None:
        raise UnsupportedError(f"its dtype {name} is none of torch's")
    if order == ">" and digits != "1":
        raise UnsupportedError(
            f"its elements are big-endian ({name}), and here they are little-endian; "
            "save array.astype(array.dtype.newbyteorder('<'))"
        )
    return torch_name, int(digits)


def _parse(text: str) -> dict[str, str]:
    """Return the text of the three values of a header; that of a structured dtype is cut to its first character.

    Raises:
        ValueError: The text is no header.
    """
    values: dict[str, str] = {}
    text = text.strip(" \n")
    position = 1
    readers = {"descr": _text, "fortran_order": _bool, "shape": _shape}
    if not text.startswith("{"):
        raise ValueError("it is no dict")
    while True:
        pair = _pair(text, position)
        if pair is None:
            raise ValueError(f"there is no key at character {position}")
        key = pair[2]
        if key not in readers or key in values:
            raise ValueError(f"the key {key!r} is unknown, or occurs twice")
        if key == "descr" and text[pair.end() : pair.end() + 1] in ("[", "(", "{"):
            return {"descr": "[", "fortran_order": "False", "shape": "()"}
        value = readers[key](text, pair.end())
        if value is None:
            raise ValueError(f"{key!r} has an impossible value")
        values[key] = value[value.re.groups] if value.re.groups else value[0]
        behind = _next(text, value.end())
        if behind is None or not (behind[1] or behind[2]):
            raise ValueError(f"the dict does not go on at character {value.end()}")
        position = behind.end()
        if behind[2]:
            break
    if position != len(text) or len(values) != len(readers):
        raise ValueError(f"keys are missing, or {text[position : position + 10]!r} follows the dict")
    return values


def _shape_of(numbers: str, item_bytes: int) -> tuple[int, ...]:
    """Read the dimensions.

    Raises:
        ValueError: No machine can hold the array, or it is a number in parentheses.
    """
    sizes = [part.strip(" \n") for part in numbers.split(",")]
    if len(sizes) == 1 and sizes[0]:
        raise ValueError("'shape' is a number, not a tuple")
    shape = tuple(int(size) for size in sizes if size)
    if math.prod(max(size, 1) for size in shape) * item_bytes >= _SIZE_LIMIT:
        raise ValueError("'shape' is that of no possible array")
    return shape
