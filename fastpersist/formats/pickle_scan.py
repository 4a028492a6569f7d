"""Say what a pickle holds without resolving a global and without running any of its code.

`scan_pickle` evaluates the opcodes of `data.pkl`, the pickle inside a torch.save file, symbolically: a global
stays a name (`Global`), a call stays a call (`Call`), a storage stays a promise (`PersistentId`). Which
storages and tensors those are is for pickle_tensors to say, whose public names can be imported from here too.
Where the storages lie in the file, whether a tensor fits its storage, and building the objects are left to
others.

The input is hostile until proven otherwise. Invariants:

- Memory and time are linear in the pickle's length: no container is ever copied, no value of the pickle is
  hashed except flat scalars, a memo index is a dict key and not an array index, a length is compared with the
  bytes that are left before anything is allocated. So a list whose 100 levels each hold the next one twice,
  2^100 leaves, is as cheap as the bytes it took.
- Nothing recurses, so nesting is limited by the input's length alone. Cycles (a list in itself) are legal.
- Whatever is no well-formed pickle is a `FormatError`; what is well formed but cannot be modelled without
  running code is an `UnsupportedPickle`, and the caller leaves the file to the stock torch.load.

Source: Lib/pickletools.py of CPython.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from fastpersist.errors import FormatError
from fastpersist.formats.pickle_nodes import (
    Call,
    Global,
    PersistentId,
    PickleScan,
    SymbolicDict,
    SymbolicSet,
    Unmodelled,
    UnsupportedPickle,
)
from fastpersist.formats.pickle_tensors import (
    DTYPE_ITEMSIZE_BYTES,
    StorageReference,
    SymbolicTensor,
    iter_tensors,
    storage_references,
)

__all__ = [
    "DTYPE_ITEMSIZE_BYTES",
    "Call",
    "Global",
    "PersistentId",
    "PickleScan",
    "StorageReference",
    "SymbolicDict",
    "SymbolicSet",
    "SymbolicTensor",
    "UnsupportedPickle",
    "iter_tensors",
    "scan_pickle",
    "storage_references",
]


_MARK: Final = ord("(")
_STOP: Final = ord(".")
_POP: Final = ord("0")
_POP_MARK: Final = ord("1")
_DUP: Final = ord("2")
_FLOAT: Final = ord("F")
_INT: Final = ord("I")
_BININT: Final = ord("J")
_BININT1: Final = ord("K")
_LONG: Final = ord("L")
_BININT2: Final = ord("M")
_NONE: Final = ord("N")
_PERSID: Final = ord("P")
_BINPERSID: Final = ord("Q")
_REDUCE: Final = ord("R")
_STRING: Final = ord("S")
_BINSTRING: Final = ord("T")
_SHORT_BINSTRING: Final = ord("U")
_UNICODE: Final = ord("V")
_BINUNICODE: Final = ord("X")
_APPEND: Final = ord("a")
_BUILD: Final = ord("b")
_GLOBAL: Final = ord("c")
_DICT: Final = ord("d")
_EMPTY_DICT: Final = ord("}")
_APPENDS: Final = ord("e")
_GET: Final = ord("g")
_BINGET: Final = ord("h")
_INST: Final = ord("i")
_LONG_BINGET: Final = ord("j")
_LIST: Final = ord("l")
_EMPTY_LIST: Final = ord("]")
_OBJ: Final = ord("o")
_PUT: Final = ord("p")
_BINPUT: Final = ord("q")
_LONG_BINPUT: Final = ord("r")
_SETITEM: Final = ord("s")
_TUPLE: Final = ord("t")
_EMPTY_TUPLE: Final = ord(")")
_SETITEMS: Final = ord("u")
_BINFLOAT: Final = ord("G")
_PROTO: Final = 0x80
_NEWOBJ: Final = 0x81
_EXT1: Final = 0x82
_EXT2: Final = 0x83
_EXT4: Final = 0x84
_TUPLE1: Final = 0x85
_TUPLE2: Final = 0x86
_TUPLE3: Final = 0x87
_NEWTRUE: Final = 0x88
_NEWFALSE: Final = 0x89
_LONG1: Final = 0x8A
_LONG4: Final = 0x8B
_BINBYTES: Final = ord("B")
_SHORT_BINBYTES: Final = ord("C")
_SHORT_BINUNICODE: Final = 0x8C
_BINUNICODE8: Final = 0x8D
_BINBYTES8: Final = 0x8E
_EMPTY_SET: Final = 0x8F
_ADDITEMS: Final = 0x90
_FROZENSET: Final = 0x91
_NEWOBJ_EX: Final = 0x92
_STACK_GLOBAL: Final = 0x93
_MEMOIZE: Final = 0x94
_FRAME: Final = 0x95
_BYTEARRAY8: Final = 0x96
_NEXT_BUFFER: Final = 0x97
_READONLY_BUFFER: Final = 0x98

_HIGHEST_PROTOCOL: Final = 5

# Opcodes that push a constant.
_CONSTANTS: Final[dict[int, object]] = {_NONE: None, _NEWTRUE: True, _NEWFALSE: False, _EMPTY_TUPLE: ()}

# Well-formed opcodes whose meaning lies outside the pickle, and why.
_UNMODELLED: Final = {
    _PERSID: "a persistent id in text form",
    _STRING: "an escaped byte string of Python 2",
    _EXT1: "a code of the extension registry",
    _EXT2: "a code of the extension registry",
    _EXT4: "a code of the extension registry",
    _NEXT_BUFFER: "an out-of-band buffer",
    _READONLY_BUFFER: "an out-of-band buffer",
}

# The pickler numbers memo entries from 0, so no pickle under 4 GiB needs more; LONG_BINPUT cannot say more.
_MEMO_INDEX_MAX: Final = (1 << 32) - 1

# Python itself refuses longer decimal ints since 3.11, and the older ones take quadratic time.
_NUMBER_CHARACTERS_MAX: Final = 4300

# STACK_GLOBAL names a global by two memoized strings in five bytes, so the input does not bound its length.
_GLOBAL_CHARACTERS_MAX: Final = 512

_MESSAGE_CHARACTERS_MAX: Final = 200


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _decoded_python2_text(raw: bytes) -> str:
    """Decode a `str` of Python 2 as torch.load does by default; other encodings are its caller's choice."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Unmodelled("a byte string of Python 2 that is not UTF-8") from None


def _decoded_long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


# Opcodes followed by a length and that many bytes, the frequent ones excepted.
_COUNTED: Final[dict[int, tuple[struct.Struct, Callable[[bytes], object]]]] = {
    _BINSTRING: (struct.Struct("<i"), _decoded_python2_text),
    _SHORT_BINSTRING: (struct.Struct("<B"), _decoded_python2_text),
    _LONG1: (struct.Struct("<B"), _decoded_long),
    _LONG4: (struct.Struct("<i"), _decoded_long),
    _BINBYTES: (struct.Struct("<I"), bytes),
    _SHORT_BINBYTES: (struct.Struct("<B"), bytes),
    _BINUNICODE8: (struct.Struct("<Q"), _text),
    _BINBYTES8: (struct.Struct("<Q"), bytes),
    _BYTEARRAY8: (struct.Struct("<Q"), bytearray),
}


def _decimal(line: bytes) -> int:
    """Read the argument of a text opcode; bounded, because long decimals take quadratic time."""
    if len(line) > _NUMBER_CHARACTERS_MAX:
        raise Unmodelled(f"a number of {len(line)} characters")
    return int(line, 0)


def _int_or_bool(line: bytes) -> int:
    if line == b"00":
        return False
    if line == b"01":
        return True
    return _decimal(line)


def _float(line: bytes) -> float:
    if len(line) > _NUMBER_CHARACTERS_MAX:
        raise Unmodelled(f"a number of {len(line)} characters")
    return float(line)


# Opcodes followed by one line of text that stands for a value.
_LINES: Final[dict[int, Callable[[bytes], object]]] = {
    _INT: _int_or_bool,
    _LONG: lambda line: _decimal(line.removesuffix(b"L")),
    _FLOAT: _float,
    _UNICODE: lambda line: line.decode("raw-unicode-escape"),
}


def _is_negative(value: object) -> bool:
    return type(value) is int and value < 0


def _line_end(data: bytes, start: int) -> int:
    end = data.find(b"\n", start)
    if end < 0:
        raise ValueError("a line of text does not end")
    return end


def _memo_index(line: bytes) -> int:
    index = int(line) if len(line) <= 10 else -1
    if not 0 <= index <= _MEMO_INDEX_MAX:
        raise ValueError("a memo index beyond 32 bits")
    return index


def _interned_global(known: dict[tuple[str, str], Global], module: object, name: object) -> Global:
    if type(module) is not str or type(name) is not str:
        raise ValueError("a global whose module or name is not a string")
    if len(module) + len(name) > _GLOBAL_CHARACTERS_MAX:
        raise Unmodelled(f"a global of {len(module) + len(name)} characters")
    found = known.get((module, name))
    if found is None:
        found = known[module, name] = Global(module, name)
    return found


def _call(function: object, arguments: object, keywords: object = None) -> Call:
    if type(function) is not Global and type(function) is not Call:
        if type(function) is PersistentId:
            raise Unmodelled("a call of a persistent object")
        raise ValueError(f"a call of a {type(function).__name__}")
    if type(arguments) is not tuple:
        if type(arguments) is Call or type(arguments) is PersistentId:
            raise Unmodelled("a call whose arguments are made by another call")
        raise ValueError(f"a call with a {type(arguments).__name__} as its arguments")
    if keywords is None:
        return Call(function, arguments)
    if type(keywords) is not SymbolicDict:
        raise ValueError(f"a call with a {type(keywords).__name__} as its keyword arguments")
    return Call(function, arguments, keywords)


def _refuse_target(target: object, what: str) -> None:
    """Tell a pickle that is wrong from one that would run code: most literals have no such operation."""
    if type(target) in (Global, PersistentId, Call, bytearray, list):
        raise Unmodelled(f"{what} of a {type(target).__name__}")
    raise ValueError(f"{what} of a {type(target).__name__}")


def _append(target: object, items: list[object]) -> None:
    if type(target) is list:
        target.extend(items)
    elif type(target) is Call:
        if target.items is None:
            target.items = []
        target.items.extend(items)
    else:
        _refuse_target(target, "APPENDS to the items")


def _add(target: object, members: list[object]) -> None:
    if type(target) is SymbolicSet and not target.is_frozen:
        target.members.extend(members)
    elif type(target) is Call:
        if target.items is None:
            target.items = []
        target.items.extend(members)
    else:
        _refuse_target(target, "ADDITEMS to the members")


def _set_entries(target: object, flat: list[object]) -> None:
    if len(flat) % 2:
        raise ValueError("a key without a value")
    if type(target) is SymbolicDict:
        target.flat.extend(flat)
    elif type(target) is Call:
        if target.entries is None:
            target.entries = SymbolicDict([])
        target.entries.flat.extend(flat)
    else:
        _refuse_target(target, "SETITEMS to the entries")


def _build(target: object, state: object) -> None:
    # A pickler sets the state of an object once. Whether a second one would replace the first is for the
    # object's own code to say.
    if type(target) is Call and target.state is None:
        target.state = state
    else:
        _refuse_target(target, "BUILD of the state")


def scan_pickle(data: bytes) -> PickleScan:
    """Evaluate a pickle symbolically: import nothing, call nothing.

    Stricter than the unpickler in two points that no pickler violates: nothing may follow STOP, and nothing
    but the object may be left on the stack.

    Args:
        data: One whole pickle, protocol 0 to 5.

    Returns:
        The object tree, the persistent ids and the globals. The tree's size is linear in `len(data)`.

    Raises:
        FormatError: `data` is no whole, well-formed pickle; `offset_bytes` counts from the pickle's start.
        UnsupportedPickle: It cannot be modelled without running code (extension codes, text persistent ids,
            out-of-band buffers, calls on arguments that are themselves made by calls, a newer protocol).

    Thread safety: a pure function of `data`.

    Source: Lib/pickle.py and Modules/_pickle.c of CPython for what each opcode does.
    """
    size = len(data)
    position = 0  # of the next byte to read
    opcode = opcode_offset = 0
    stack: list[object] = []  # above the innermost mark, so that no opcode can reach below a mark
    marked: list[list[object]] = []  # the stacks below the open marks, innermost last
    memo: dict[int, object] = {}
    persistent_ids: list[PersistentId] = []
    known_globals: dict[tuple[str, str], Global] = {}
    u32_at = struct.Struct("<I").unpack_from
    items: list[object]
    number: object
    has_negative_int = False

    # The order of the tests is the order of the opcodes' frequency in a state dict, with protocol 2 first.
    try:
        while True:
            opcode_offset = position
            opcode = data[position]
            position += 1
            if opcode == _LONG_BINPUT:
                memo[u32_at(data, position)[0]] = stack[-1]
                position += 4
            elif opcode == _BININT1:
                stack.append(data[position])
                position += 1
            elif opcode == _BINGET:
                stack.append(memo[data[position]])
                position += 1
            elif opcode == _MARK:
                marked.append(stack)
                stack = []
            elif opcode == _TUPLE:
                items = stack
                stack = marked.pop()
                stack.append(tuple(items))
            elif opcode == _REDUCE:
                arguments = stack.pop()
                stack[-1] = _call(stack[-1], arguments)
            elif opcode == _BINUNICODE:
                start = position + 4
                position = start + u32_at(data, position)[0]
                if position > size:
                    raise ValueError(f"a string of {position - start} bytes ends beyond the pickle's end")
                stack.append(data[start:position].decode("utf-8", "surrogatepass"))
            elif opcode == _TUPLE2:
                second = stack.pop()
                stack[-1] = (stack[-1], second)
            elif opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
            elif opcode == _BINPERSID:
                persistent = PersistentId(stack[-1])
                persistent_ids.append(persistent)
                stack[-1] = persistent
            elif opcode == _BINPUT:
                memo[data[position]] = stack[-1]
                position += 1
            elif opcode == _LONG_BINGET:
                stack.append(memo[u32_at(data, position)[0]])
                position += 4
            elif opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif opcode == _SHORT_BINUNICODE:
                start = position + 1
                position = start + data[position]
                if position > size:
                    raise ValueError(f"a string of {position - start} bytes ends beyond the pickle's end")
                stack.append(data[start:position].decode("utf-8", "surrogatepass"))
            elif opcode == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif opcode == _TUPLE3:
                third = stack.pop()
                second = stack.pop()
                stack[-1] = (stack[-1], second, third)
            elif opcode == _BININT2:
                stack.append(struct.unpack_from("<H", data, position)[0])
                position += 2
            elif opcode == _BININT:
                number = struct.unpack_from("<i", data, position)[0]
                has_negative_int = has_negative_int or _is_negative(number)
                stack.append(number)
                position += 4
            elif opcode == _BINFLOAT:
                stack.append(struct.unpack_from(">d", data, position)[0])
                position += 8
            elif opcode == _EMPTY_DICT:
                stack.append(SymbolicDict([]))
            elif opcode == _EMPTY_LIST:
                stack.append([])
            elif opcode == _SETITEM:
                value = stack.pop()
                key = stack.pop()
                _set_entries(stack[-1], [key, value])
            elif opcode == _SETITEMS:
                items = stack
                stack = marked.pop()
                _set_entries(stack[-1], items)
            elif opcode == _APPEND:
                value = stack.pop()
                _append(stack[-1], [value])
            elif opcode == _APPENDS:
                items = stack
                stack = marked.pop()
                _append(stack[-1], items)
            elif opcode == _BUILD:
                state = stack.pop()
                _build(stack[-1], state)
            elif opcode == _NEWOBJ:
                arguments = stack.pop()
                stack[-1] = _call(stack[-1], arguments)
            elif opcode == _GLOBAL or opcode == _INST:
                module_end = _line_end(data, position)
                name_end = _line_end(data, module_end + 1)
                named = _interned_global(
                    known_globals, _text(data[position:module_end]), _text(data[module_end + 1 : name_end])
                )
                position = name_end + 1
                if opcode == _INST:
                    items = stack
                    stack = marked.pop()
                    stack.append(Call(named, tuple(items)))
                else:
                    stack.append(named)
            elif opcode == _STACK_GLOBAL:
                name = stack.pop()
                stack[-1] = _interned_global(known_globals, stack[-1], name)
            elif opcode in _COUNTED:
                length_struct, decode = _COUNTED[opcode]
                (length_bytes,) = length_struct.unpack_from(data, position)
                start = position + length_struct.size
                position = start + length_bytes
                if length_bytes < 0:
                    raise ValueError(f"a negative length of {length_bytes}")
                if position > size:
                    raise ValueError(f"a value of {length_bytes} bytes ends beyond the pickle's end")
                number = decode(data[start:position])  # or text, or bytes
                has_negative_int = has_negative_int or _is_negative(number)
                stack.append(number)
            elif opcode in _LINES:
                end = _line_end(data, position)
                number = _LINES[opcode](data[position:end])
                has_negative_int = has_negative_int or _is_negative(number)
                stack.append(number)
                position = end + 1
            elif opcode == _GET:
                end = _line_end(data, position)
                stack.append(memo[_memo_index(data[position:end])])
                position = end + 1
            elif opcode == _PUT:
                end = _line_end(data, position)
                memo[_memo_index(data[position:end])] = stack[-1]
                position = end + 1
            elif opcode == _LIST:
                items = stack
                stack = marked.pop()
                stack.append(items)
            elif opcode == _DICT:
                items = stack
                stack = marked.pop()
                if len(items) % 2:
                    raise ValueError("a key without a value")
                stack.append(SymbolicDict(items))
            elif opcode == _EMPTY_SET:
                stack.append(SymbolicSet([], is_frozen=False))
            elif opcode == _ADDITEMS:
                items = stack
                stack = marked.pop()
                _add(stack[-1], items)
            elif opcode == _FROZENSET:
                items = stack
                stack = marked.pop()
                stack.append(SymbolicSet(items, is_frozen=True))
            elif opcode == _NEWOBJ_EX:
                keywords = stack.pop()
                arguments = stack.pop()
                if keywords is None:
                    raise ValueError("a call with None as its keyword arguments")
                stack[-1] = _call(stack[-1], arguments, keywords)
            elif opcode == _OBJ:
                items = stack
                stack = marked.pop()
                stack.append(_call(items[0], tuple(items[1:])))
            elif opcode == _POP:
                # As in the unpickler: with nothing above the mark, POP takes the mark.
                if stack:
                    stack.pop()
                else:
                    stack = marked.pop()
            elif opcode == _POP_MARK:
                stack = marked.pop()
            elif opcode == _DUP:
                stack.append(stack[-1])
            elif opcode == _PROTO:
                if data[position] > _HIGHEST_PROTOCOL:
                    raise Unmodelled(f"pickle protocol {data[position]}")
                position += 1
            elif opcode == _FRAME:
                (length_bytes,) = struct.unpack_from("<Q", data, position)
                position += 8
                if length_bytes > size - position:
                    raise ValueError(f"a frame of {length_bytes} bytes ends beyond the pickle's end")
            elif opcode == _STOP:
                break
            elif opcode in _UNMODELLED:
                raise Unmodelled(_UNMODELLED[opcode])
            else:
                raise ValueError("no such opcode")
    except Unmodelled as error:
        raise UnsupportedPickle(f"the pickle holds {error} at offset {opcode_offset}") from None
    except struct.error:
        raise FormatError("the pickle is cut short", offset_bytes=opcode_offset) from None
    except IndexError:
        # Of the stack, the marks or the bytes. With all bytes used there is no STOP, whatever else is wrong.
        reason = "is cut short" if position >= size else f"finds its stack empty at opcode 0x{opcode:02x}"
        raise FormatError(f"the pickle {reason}", offset_bytes=opcode_offset) from None
    except KeyError as error:
        reason = f"asks for memo entry {error} before it is set"
        raise FormatError(f"the pickle {reason}", offset_bytes=opcode_offset) from None
    except ValueError as error:
        reason = str(error)[:_MESSAGE_CHARACTERS_MAX]
        raise FormatError(
            f"the pickle is malformed at opcode 0x{opcode:02x}: {reason}", offset_bytes=opcode_offset
        ) from None

    if marked or len(stack) != 1:
        raise FormatError("the pickle stops with other than one object on its stack", offset_bytes=opcode_offset)
    if position != size:
        raise FormatError(f"{size - position} bytes follow the pickle's STOP", offset_bytes=position)
    return PickleScan(
        root=stack[0],
        persistent_ids=persistent_ids,
        globals=tuple(f"{module}.{name}" for module, name in known_globals),
        has_negative_int=has_negative_int,
    )
