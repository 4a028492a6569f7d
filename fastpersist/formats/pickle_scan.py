"""Describe what a pickle holds without importing a global and without running any of its code.

`scan_pickle` evaluates the opcodes of `data.pkl`, the pickle inside a torch.save file, symbolically: a global
stays a name (`Global`), a call stays a call (`Call`), a storage stays an id (`PersistentId`). `pickle_tensors`
finds the storages and tensors among these; its public names can be imported from here too. Other modules find
the storages in the file, check that a tensor fits its storage, and build the objects.

The input is hostile until proven otherwise. Invariants:

- Memory and time are linear in the pickle's length: containers are never copied, only flat scalars are hashed, a
  memo index is a dict key and not an array index, and a length is compared with the bytes that are left before
  anything is allocated. So a list of 100 levels that each hold the next one twice, with 2^100 leaves, costs no more
  than its bytes.
- Nothing recurses, so only the input's length limits nesting. Cycles (a list in itself) are legal.
- A pickle that is not well formed is a `FormatError`. One that cannot be described without running code is an
  `UnsupportedPickle`, and the caller leaves the file to the stock torch.load.

Source: Lib/pickletools.py of CPython.
"""

from __future__ import annotations

import pickle  # for the names of the opcodes
import struct
from collections.abc import Callable
from typing import Any, Final

from fastpersist.errors import FastPersistError, FormatError
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
    builds_without_bytes,
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
    "builds_without_bytes",
    "iter_tensors",
    "scan_pickle",
    "storage_references",
]


# The opcodes that a state dict has for each tensor, which `_Scanner.run` evaluates itself.
_MARK: Final = pickle.MARK[0]
_STOP: Final = pickle.STOP[0]
_BININT: Final = pickle.BININT[0]
_BININT1: Final = pickle.BININT1[0]
_BININT2: Final = pickle.BININT2[0]
_BINPERSID: Final = pickle.BINPERSID[0]
_REDUCE: Final = pickle.REDUCE[0]
_BINUNICODE: Final = pickle.BINUNICODE[0]
_BINGET: Final = pickle.BINGET[0]
_LONG_BINGET: Final = pickle.LONG_BINGET[0]
_BINPUT: Final = pickle.BINPUT[0]
_LONG_BINPUT: Final = pickle.LONG_BINPUT[0]
_TUPLE: Final = pickle.TUPLE[0]
_TUPLE1: Final = pickle.TUPLE1[0]
_TUPLE2: Final = pickle.TUPLE2[0]
_SHORT_BINUNICODE: Final = pickle.SHORT_BINUNICODE[0]
_MEMOIZE: Final = pickle.MEMOIZE[0]

# Opcodes that push a constant.
_CONSTANTS: Final[dict[int, object]] = {
    pickle.NONE[0]: None,
    pickle.NEWTRUE[0]: True,
    pickle.NEWFALSE[0]: False,
    pickle.EMPTY_TUPLE[0]: (),
}

# Of the opcodes that are not evaluated by `_Scanner._evaluate` itself, those that torch's pickles have: its restricted
# unpickler knows few others.
_OF_TORCH: Final = frozenset(
    opcode[0]
    for opcode in (
        pickle.PROTO,
        pickle.GLOBAL,
        pickle.EMPTY_DICT,
        pickle.EMPTY_LIST,
        pickle.APPEND,
        pickle.APPENDS,
        pickle.SETITEM,
        pickle.SETITEMS,
        pickle.BUILD,
        pickle.NEWOBJ,
        pickle.BININT,
        pickle.BINFLOAT,
        pickle.LONG1,
        pickle.TUPLE3,
    )
)

# Well-formed opcodes whose meaning lies outside the pickle, and why.
_UNMODELLED: Final = {
    pickle.PERSID[0]: "a persistent id in text form",
    pickle.STRING[0]: "an escaped byte string of Python 2",
    pickle.EXT1[0]: "a code of the extension registry",
    pickle.EXT2[0]: "a code of the extension registry",
    pickle.EXT4[0]: "a code of the extension registry",
    pickle.NEXT_BUFFER[0]: "an out-of-band buffer",
    pickle.READONLY_BUFFER[0]: "an out-of-band buffer",
}

# The pickler numbers memo entries from 0, so no pickle under 4 GiB needs more; LONG_BINPUT cannot say more.
_MEMO_INDEX_MAX: Final = (1 << 32) - 1

# Python itself refuses longer decimal ints since 3.11, and the older ones take quadratic time.
_NUMBER_CHARACTERS_MAX: Final = 4300

# STACK_GLOBAL names a global by two memoized strings in five bytes, so the input does not bound its length.
_GLOBAL_CHARACTERS_MAX: Final = 512

_HIGHEST_PROTOCOL: Final = 5
_MESSAGE_CHARACTERS_MAX: Final = 200


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _decoded_python2_text(raw: bytes) -> str:
    """Decode a `str` of Python 2 as torch.load does by default."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Unmodelled("a byte string of Python 2 that is not UTF-8") from None


def _decoded_long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


# Opcodes followed by a length and that many bytes, except for the frequent ones.
_COUNTED: Final[dict[int, tuple[struct.Struct, Callable[[bytes], object]]]] = {
    pickle.BINSTRING[0]: (struct.Struct("<i"), _decoded_python2_text),
    pickle.SHORT_BINSTRING[0]: (struct.Struct("<B"), _decoded_python2_text),
    pickle.LONG1[0]: (struct.Struct("<B"), _decoded_long),
    pickle.LONG4[0]: (struct.Struct("<i"), _decoded_long),
    pickle.BINBYTES[0]: (struct.Struct("<I"), bytes),
    pickle.SHORT_BINBYTES[0]: (struct.Struct("<B"), bytes),
    pickle.BINUNICODE8[0]: (struct.Struct("<Q"), _text),
    pickle.BINBYTES8[0]: (struct.Struct("<Q"), bytes),
    pickle.BYTEARRAY8[0]: (struct.Struct("<Q"), bytearray),
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
    pickle.INT[0]: _int_or_bool,
    pickle.LONG[0]: lambda line: _decimal(line.removesuffix(b"L")),
    pickle.FLOAT[0]: _float,
    pickle.UNICODE[0]: lambda line: line.decode("raw-unicode-escape"),
}


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
    """Raise for an operation that a literal lacks (ValueError), or that would run an object's code (Unmodelled)."""
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
    # A pickler sets the state of an object once. Only the object's own code knows whether a second state would
    # replace the first.
    if type(target) is Call and target.state is None and state is not None:
        target.state = state
    else:
        _refuse_target(target, "BUILD of the state")


def scan_pickle(data: bytes) -> PickleScan:
    """Evaluate a pickle symbolically: import nothing, call nothing.

    It is stricter than the unpickler in two points, which all picklers meet: nothing follows STOP, and only the
    object is left on the stack.

    Args:
        data: One whole pickle, protocol 0 to 5.

    Returns:
        The object tree, the persistent ids and the globals. The tree's size is linear in `len(data)`.

    Raises:
        FormatError: `data` is not a whole, well-formed pickle; `offset_bytes` counts from the pickle's start.
        UnsupportedPickle: It cannot be modelled without running code (extension codes, text persistent ids,
            out-of-band buffers, calls on arguments that are themselves made by calls, a newer protocol).

    Thread safety: a pure function of `data`.

    Source: Lib/pickle.py and Modules/_pickle.c of CPython for what each opcode does.
    """
    return _Scanner(data).scan()


class _Scanner:
    """The state of an unpickler that imports and calls nothing.

    Attributes:
        data: The pickle.
        calls: All calls so far.
        position: Offset of the next byte to read.
        stack: The values above the innermost mark, so that no opcode can reach below a mark.
        marked: The stacks below the open marks, innermost last.
    """

    __slots__ = (
        "calls",
        "data",
        "globals",
        "has_negative_int",
        "has_other_opcodes",
        "marked",
        "memo",
        "persistent_ids",
        "position",
        "stack",
    )

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.persistent_ids: list[PersistentId] = []
        self.calls: list[Call] = []
        self.globals: dict[tuple[str, str], Global] = {}
        self.has_negative_int = False
        self.has_other_opcodes = False

    def scan(self) -> PickleScan:
        """Evaluate all opcodes, and check what is left."""
        stop_offset = self._evaluate()
        if self.marked or len(self.stack) != 1:
            raise FormatError("the pickle stops with other than one object on its stack", offset_bytes=stop_offset)
        if self.position != len(self.data):
            rest_bytes = len(self.data) - self.position
            raise FormatError(f"{rest_bytes} bytes follow the pickle's STOP", offset_bytes=self.position)
        return PickleScan(
            root=self.stack[0],
            persistent_ids=self.persistent_ids,
            globals=tuple(f"{module}.{name}" for module, name in self.globals),
            has_negative_int=self.has_negative_int,
            has_other_opcodes=self.has_other_opcodes,
            memo_index_max=max(self.memo, default=0),
            calls=self.calls,
        )

    def _evaluate(self) -> int:
        """Evaluate opcodes up to STOP; return its offset.

        A state dict has tens of opcodes for each tensor, and a call takes longer than most of them. So the frequent
        opcodes are evaluated here on local variables, in the order of their frequency with protocol 2. All others have
        a method in `_HANDLERS`, which works on the attributes.
        """
        data, size = self.data, len(self.data)
        stack, marked, memo, persistent_ids = self.stack, self.marked, self.memo, self.persistent_ids
        calls, constants = self.calls, _CONSTANTS
        u16_at, u32_at = struct.Struct("<H").unpack_from, struct.Struct("<I").unpack_from
        position = opcode = opcode_offset = 0
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
                    stack[-1] = call = _call(stack[-1], arguments)
                    calls.append(call)
                elif opcode == _BINUNICODE:
                    start = position + 4
                    position = start + u32_at(data, position)[0]
                    if position > size:
                        raise ValueError(f"a string of {position - start} bytes ends beyond the pickle's end")
                    stack.append(data[start:position].decode("utf-8", "surrogatepass"))
                elif opcode == _TUPLE2:
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                elif opcode in constants:
                    stack.append(constants[opcode])
                elif opcode == _BINPERSID:
                    stack[-1] = persistent = PersistentId(stack[-1])
                    persistent_ids.append(persistent)
                elif opcode == _TUPLE1:
                    stack[-1] = (stack[-1],)
                elif opcode == _BININT2:
                    stack.append(u16_at(data, position)[0])
                    position += 2
                elif opcode == _BINPUT:
                    memo[data[position]] = stack[-1]
                    position += 1
                elif opcode == _LONG_BINGET:
                    stack.append(memo[u32_at(data, position)[0]])
                    position += 4
                elif opcode == _MEMOIZE:
                    memo[len(memo)] = stack[-1]
                    self.has_other_opcodes = True
                elif opcode == _SHORT_BINUNICODE:
                    start = position + 1
                    position = start + data[position]
                    if position > size:
                        raise ValueError(f"a string of {position - start} bytes ends beyond the pickle's end")
                    stack.append(data[start:position].decode("utf-8", "surrogatepass"))
                    self.has_other_opcodes = True
                elif opcode == _STOP:
                    self.position, self.stack = position, stack
                    return opcode_offset
                else:
                    self.position, self.stack = position, stack
                    self.has_other_opcodes |= opcode not in _OF_TORCH
                    _HANDLERS[opcode](self)
                    position, stack = self.position, self.stack
        except (Unmodelled, struct.error, IndexError, KeyError, ValueError) as error:
            is_all_read = max(position, self.position) >= size
            raise _refusal(error, opcode, opcode_offset, is_all_read=is_all_read) from None

    # --- what the handlers are made of

    def take(self, layout: struct.Struct) -> Any:
        """Read one value of a struct layout."""
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def take_line(self) -> bytes:
        """Read the text up to the end of the line."""
        start = self.position
        end = self.data.find(b"\n", start)
        if end < 0:
            raise ValueError("a line of text does not end")
        self.position = end + 1
        return self.data[start:end]

    def take_global(self) -> Global:
        """Read a global: a line with its module and one with its name."""
        module, name = self.take_line(), self.take_line()
        return _interned_global(self.globals, _text(module), _text(name))

    def take_marked(self) -> list[object]:
        """Take everything above the innermost mark, and the mark."""
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def noted(self, call: Call) -> Call:
        """Note a call."""
        self.calls.append(call)
        return call

    def push_number(self, value: object) -> None:
        """Push a number, or another value that is no container."""
        self.has_negative_int = self.has_negative_int or (type(value) is int and value < 0)
        self.stack.append(value)

    # --- handlers

    def on_bin_int(self) -> None:
        self.push_number(self.take(_I32))

    def on_bin_float(self) -> None:
        self.stack.append(self.take(_F64_BIG_ENDIAN))

    def on_counted(self) -> None:
        """Push a value whose bytes follow their count."""
        length_struct, decode = _COUNTED[self.data[self.position - 1]]
        length_bytes = self.take(length_struct)
        if length_bytes < 0:
            raise ValueError(f"a negative length of {length_bytes}")
        start = self.position
        self.position = start + length_bytes
        if self.position > len(self.data):
            raise ValueError(f"a value of {length_bytes} bytes ends beyond the pickle's end")
        self.push_number(decode(self.data[start : self.position]))

    def on_line(self) -> None:
        """Push a value that is written as a line of text."""
        decode = _LINES[self.data[self.position - 1]]
        self.push_number(decode(self.take_line()))

    def on_get(self) -> None:
        self.stack.append(self.memo[_memo_index(self.take_line())])

    def on_put(self) -> None:
        line = self.take_line()
        self.memo[_memo_index(line)] = self.stack[-1]

    def on_global(self) -> None:
        self.stack.append(self.take_global())

    def on_stack_global(self) -> None:
        name = self.stack.pop()
        self.stack[-1] = _interned_global(self.globals, self.stack[-1], name)

    def on_inst(self) -> None:
        named = self.take_global()
        items = self.take_marked()
        self.stack.append(self.noted(Call(named, tuple(items))))

    def on_obj(self) -> None:
        items = self.take_marked()
        self.stack.append(self.noted(_call(items[0], tuple(items[1:]))))

    def on_new_obj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.noted(_call(self.stack[-1], arguments))

    def on_new_obj_ex(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        if keywords is None:
            raise ValueError("a call with None as its keyword arguments")
        self.stack[-1] = self.noted(_call(self.stack[-1], arguments, keywords))

    def on_tuple3(self) -> None:
        third = self.stack.pop()
        second = self.stack.pop()
        self.stack[-1] = (self.stack[-1], second, third)

    def on_empty_list(self) -> None:
        self.stack.append([])

    def on_empty_dict(self) -> None:
        self.stack.append(SymbolicDict([]))

    def on_empty_set(self) -> None:
        self.stack.append(SymbolicSet([], is_frozen=False))

    def on_list(self) -> None:
        items = self.take_marked()
        self.stack.append(items)

    def on_dict(self) -> None:
        items = self.take_marked()
        if len(items) % 2:
            raise ValueError("a key without a value")
        self.stack.append(SymbolicDict(items))

    def on_frozen_set(self) -> None:
        items = self.take_marked()
        self.stack.append(SymbolicSet(items, is_frozen=True))

    def on_append(self) -> None:
        value = self.stack.pop()
        _append(self.stack[-1], [value])

    def on_appends(self) -> None:
        items = self.take_marked()
        _append(self.stack[-1], items)

    def on_add_items(self) -> None:
        items = self.take_marked()
        _add(self.stack[-1], items)

    def on_set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _set_entries(self.stack[-1], [key, value])

    def on_set_items(self) -> None:
        items = self.take_marked()
        _set_entries(self.stack[-1], items)

    def on_build(self) -> None:
        state = self.stack.pop()
        _build(self.stack[-1], state)

    def on_pop(self) -> None:
        # As in the unpickler: with nothing above the mark, POP takes the mark.
        if self.stack:
            self.stack.pop()
        else:
            self.stack = self.marked.pop()

    def on_pop_mark(self) -> None:
        self.take_marked()

    def on_dup(self) -> None:
        self.stack.append(self.stack[-1])

    def on_proto(self) -> None:
        protocol = self.data[self.position]
        if protocol > _HIGHEST_PROTOCOL:
            raise Unmodelled(f"pickle protocol {protocol}")
        self.position += 1

    def on_frame(self) -> None:
        length_bytes = self.take(_U64)
        if length_bytes > len(self.data) - self.position:
            raise ValueError(f"a frame of {length_bytes} bytes ends beyond the pickle's end")

    def on_unmodelled(self) -> None:
        raise Unmodelled(_UNMODELLED[self.data[self.position - 1]])

    def on_unknown(self) -> None:
        raise ValueError("no such opcode")


_I32: Final = struct.Struct("<i")
_U64: Final = struct.Struct("<Q")
_F64_BIG_ENDIAN: Final = struct.Struct(">d")

# What is done for each opcode that `_Scanner._evaluate` does not evaluate itself, by its byte.
_HANDLERS: Final[list[Callable[[_Scanner], None]]] = [_Scanner.on_unknown] * 256
for _opcodes, _handler in (
    ((_BININT,), _Scanner.on_bin_int),
    ((pickle.BINFLOAT[0],), _Scanner.on_bin_float),
    (_COUNTED, _Scanner.on_counted),
    (_LINES, _Scanner.on_line),
    ((pickle.GET[0],), _Scanner.on_get),
    ((pickle.PUT[0],), _Scanner.on_put),
    ((pickle.GLOBAL[0],), _Scanner.on_global),
    ((pickle.STACK_GLOBAL[0],), _Scanner.on_stack_global),
    ((pickle.INST[0],), _Scanner.on_inst),
    ((pickle.OBJ[0],), _Scanner.on_obj),
    ((pickle.NEWOBJ[0],), _Scanner.on_new_obj),
    ((pickle.NEWOBJ_EX[0],), _Scanner.on_new_obj_ex),
    ((pickle.TUPLE3[0],), _Scanner.on_tuple3),
    ((pickle.EMPTY_LIST[0],), _Scanner.on_empty_list),
    ((pickle.EMPTY_DICT[0],), _Scanner.on_empty_dict),
    ((pickle.EMPTY_SET[0],), _Scanner.on_empty_set),
    ((pickle.LIST[0],), _Scanner.on_list),
    ((pickle.DICT[0],), _Scanner.on_dict),
    ((pickle.FROZENSET[0],), _Scanner.on_frozen_set),
    ((pickle.APPEND[0],), _Scanner.on_append),
    ((pickle.APPENDS[0],), _Scanner.on_appends),
    ((pickle.ADDITEMS[0],), _Scanner.on_add_items),
    ((pickle.SETITEM[0],), _Scanner.on_set_item),
    ((pickle.SETITEMS[0],), _Scanner.on_set_items),
    ((pickle.BUILD[0],), _Scanner.on_build),
    ((pickle.POP[0],), _Scanner.on_pop),
    ((pickle.POP_MARK[0],), _Scanner.on_pop_mark),
    ((pickle.DUP[0],), _Scanner.on_dup),
    ((pickle.PROTO[0],), _Scanner.on_proto),
    ((pickle.FRAME[0],), _Scanner.on_frame),
    (_UNMODELLED, _Scanner.on_unmodelled),
):
    for _opcode in _opcodes:
        _HANDLERS[_opcode] = _handler


def _refusal(error: Exception, opcode: int, offset_bytes: int, *, is_all_read: bool) -> FastPersistError:
    """Return the error of a pickle for an exception of its evaluation at an opcode."""
    if isinstance(error, Unmodelled):
        return UnsupportedPickle(f"the pickle holds {error} at offset {offset_bytes}")
    if isinstance(error, struct.error):
        reason = "is cut short"
    elif isinstance(error, IndexError):
        # The stack, the marks or the bytes are at their end. If all bytes are used, STOP is missing in any case.
        reason = "is cut short" if is_all_read else f"finds its stack empty at opcode 0x{opcode:02x}"
    elif isinstance(error, KeyError):
        reason = f"asks for memo entry {error} before it is set"
    else:
        reason = f"is malformed at opcode 0x{opcode:02x}: {str(error)[:_MESSAGE_CHARACTERS_MAX]}"
    return FormatError(f"the pickle {reason}", offset_bytes=offset_bytes)
