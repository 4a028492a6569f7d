"""Lists the values in a scanned pickle that are no tensors, by name, as text. Linear, no recursion, like the scan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from fastpersist.formats.pickle_nodes import Call, Global, SymbolicDict, SymbolicSet
from fastpersist.formats.pickle_tensors import is_rebuilt_tensor, member_name

__all__ = ["iter_values"]

_TEXT_CHARACTERS_MAX = 1000
_NAME_CHARACTERS_MAX = 1024


def iter_values(root: object) -> Iterator[tuple[str, str]]:
    """Name every value in a scanned pickle that is neither a tensor nor a container with something in it.

    Names are those of `iter_tensors`. An object is listed by what makes it ("collections.deque(…)"); what it is made
    from, and what is put into it, follows under names of its own. A container met again is not opened again.

    Args:
        root: `PickleScan.root`.

    Yields:
        Name, and the value as Python writes it; long ones are cut.
    """
    opened: set[int] = set()
    levels: list[Iterator[tuple[str, object]]] = [iter([("", root)])]
    while levels:
        found = next(levels[-1], None)
        if found is None:
            levels.pop()
            continue
        name, node = found[0][-_NAME_CHARACTERS_MAX:], found[1]
        if not isinstance(node, (SymbolicDict, SymbolicSet, Call, list, tuple)):
            yield name, _text(node)
            continue
        if id(node) in opened or (type(node) is Call and is_rebuilt_tensor(node)):
            continue
        opened.add(id(node))
        children = _children(name, node)
        first = next(children, None)
        if type(node) is Call and not _is_ordered_dict(node):
            yield name, f"{_made_by(node)}(…)"
        elif first is None:
            yield name, _EMPTY[type(node)]
        if first is not None:
            levels.append(itertools.chain([first], children))


_EMPTY = {SymbolicDict: "{}", SymbolicSet: "set()", Call: "OrderedDict()", list: "[]", tuple: "()"}


def _is_ordered_dict(call: Call) -> bool:
    made = call.function
    return type(made) is Global and (made.module, made.name) == ("collections", "OrderedDict") and not call.arguments


def _made_by(call: Call) -> str:
    made = call.function
    return f"{made.module}.{made.name}" if type(made) is Global else "an object"


def _children(name: str, node: object) -> Iterator[tuple[str, object]]:
    if type(node) is SymbolicDict:
        for position, (key, value) in enumerate(node.items()):
            yield member_name(name, key, position), value
    elif type(node) is Call:
        for position, argument in enumerate(node.arguments):
            yield f"{name}({position})", argument
        for part in (node.keywords, node.entries):
            if part is not None:
                yield from _children(name, part)
        if node.items is not None:
            yield from _children(name, node.items)
        if type(node.state) is SymbolicDict:
            yield from _children(name, node.state)
        elif node.state is not None and not _is_ordered_dict(node):
            yield f"{name}[state]", node.state
    else:
        members = node.members if type(node) is SymbolicSet else node
        if isinstance(members, (list, tuple)):
            for position, member in enumerate(members):
                yield f"{name}[{position}]", member


def _text(value: object) -> str:
    if type(value) is Global:
        return f"{value.module}.{value.name}"
    if isinstance(value, (str, bytes, bytearray)) and len(value) > _TEXT_CHARACTERS_MAX:
        return f"{value[:_TEXT_CHARACTERS_MAX]!r}… ({len(value)} long)"
    if type(value) is int and value.bit_length() > _TEXT_CHARACTERS_MAX:
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if isinstance(value, (str, bytes, bytearray, int, float, bool, type(None))) else "a storage"
