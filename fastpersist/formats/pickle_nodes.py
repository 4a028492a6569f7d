"""The symbolic nodes of a scanned pickle.

None, bool, int, float, str, bytes, bytearray, list and tuple stand for themselves. The classes here stand for
everything else. They compare by identity and print without their contents: a pickle may nest them deeply, share
them, or put one inside itself. `pickle_scan` makes them, `pickle_tensors` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fastpersist.errors import UnsupportedError

__all__ = [
    "Call",
    "Global",
    "PersistentId",
    "PickleScan",
    "SymbolicDict",
    "SymbolicSet",
    "Unmodelled",
    "UnsupportedPickle",
]


class UnsupportedPickle(UnsupportedError):
    """A well-formed pickle that cannot be described without running code; torch.load may still load it."""


class Unmodelled(Exception):
    """Something that nodes cannot describe; a caller that knows its place makes an UnsupportedPickle of it."""


@dataclass(slots=True, eq=False)
class Global:
    """A name that the unpickler would import, spelled as in the pickle (`__builtin__`, not `builtins`)."""

    module: str
    name: str


@dataclass(slots=True, eq=False, repr=False)
class PersistentId:
    """An object for which the unpickler would call `persistent_load`; torch pickles storages like this."""

    value: object


@dataclass(slots=True, eq=False, repr=False)
class SymbolicDict:
    """A dict as written: keys and values in turn, in the order of the pickle, later duplicates included.

    Not a dict, because keys may be unhashable nodes here, and because hashing a hostile tuple of tuples takes
    exponential time.
    """

    flat: list[object]

    def items(self) -> list[tuple[object, object]]:
        """List the entries of the real dict: equal scalar keys have the last value, at the place of the first."""
        entries: dict[object, tuple[object, object]] = {}
        flat = self.flat
        for index in range(0, len(flat), 2):
            key = flat[index]
            # Python hashes an int to its remainder by 2^61 - 1: larger ones could be made to collide.
            if type(key) in _FLAT_KEYS or (type(key) is int and abs(key) < _HASHED_INT_MAX):
                identity = key
            else:
                identity = (id(key),)  # a tuple never equals a scalar key
            entries[identity] = (key, flat[index + 1])
        return list(entries.values())


_FLAT_KEYS: Final = frozenset({str, bytes, float, bool, type(None)})
_HASHED_INT_MAX: Final = 1 << 60


@dataclass(slots=True, eq=False, repr=False)
class SymbolicSet:
    """A set or frozenset as written: its members in the order of the pickle, duplicates included."""

    members: list[object]
    is_frozen: bool


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """An object that the unpickler would make by calling `function`, with all that is done to it afterwards.

    Attributes:
        function: What is called or instantiated: a Global, or the result of another call.
        arguments: The positional arguments.
        keywords: The keyword arguments (NEWOBJ_EX), else None.
        state: What `__setstate__` or `__dict__` would get (BUILD), else None.
        items: What is appended or added to the object (APPENDS, ADDITEMS: deque, list and set subclasses), else None.
        entries: What is put under keys (SETITEMS: OrderedDict and other dict subclasses), else None.
    """

    function: object
    arguments: tuple[object, ...]
    keywords: SymbolicDict | None = None
    state: object = None
    items: list[object] | None = None
    entries: SymbolicDict | None = None


@dataclass(slots=True, eq=False, repr=False)
class PickleScan:
    """What one pickle holds.

    Attributes:
        root: The object, as symbolic nodes.
        persistent_ids: The id of each call of `persistent_load` that the unpickler makes, in that order.
        globals: Every global as "module.name", in the order of first use.
        has_negative_int: There is a negative int in the pickle; sizes, strides and offsets never are negative.
        has_other_opcodes: The pickle has opcodes that torch.save does not write.
        memo_index_max: The largest index of the pickle's memo. Python's unpickler allocates as many entries.
        calls: Every call that the unpickler would make, in that order.
    """

    root: object
    persistent_ids: list[PersistentId]
    globals: tuple[str, ...]
    has_negative_int: bool
    has_other_opcodes: bool
    memo_index_max: int
    calls: list[Call] = field(default_factory=list)
