"""Select the storages of a file that a plan needs in memory, from the scanned pickle: reads no data, builds no object.

A storage behind a tensor that is filled in place, or that nobody asked for, needs no memory. Nodes that the plan does
not mention, or that are not understood, need all storages below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from fastpersist.formats.pickle_scan import Call, Global, PersistentId, SymbolicDict, SymbolicSet
from fastpersist.loading.target_plan import Leaf
from fastpersist.loading.targets import Path

__all__ = [
    "SCALAR_KEYS",
    "UNREAD",
    "SortedStorages",
    "Tree",
    "Unread",
    "is_ordered_dict",
    "storages_below",
    "tree_of",
]

SCALAR_KEYS = (str, int, float, bool, bytes, type(None))
"""Types of the keys that are followed: what else is a key may be known only when it is unpickled."""


class Unread:
    """Stands for what nobody asked for."""


UNREAD = Unread()

Tree: TypeAlias = "dict[object, Tree | Leaf | Unread | None]"
"""Leaves by key, one level for each part of their paths. None: everything below may be what it wants."""


def tree_of(leaves: Mapping[Path, Leaf], unread: Iterable[Path] = ()) -> Tree:
    """Return leaves, and what nobody asked for, in nested dicts: a level for each part of their paths."""
    root: Tree = {}
    ends: dict[Path, Leaf | Unread] = {**leaves, **dict.fromkeys(unread, UNREAD)}
    for path, leaf in ends.items():
        level = root
        for key in path[:-1]:
            below = level.setdefault(key, {})
            level = below if isinstance(below, dict) else {}
        level[path[-1]] = leaf
    return root


class SortedStorages:
    """The storages of a scanned pickle, sorted by what the leaves of a plan say of the tensors in them.

    Attributes:
        in_place: Keys of those behind tensors that are filled in place, or not wanted: they need no memory.
        elsewhere: Keys of those behind tensors that get memory of their own on a given device, and the device.
        whole: Nodes that the plan says nothing about, or that are not understood: all below them is needed.
    """

    def __init__(self) -> None:
        self.in_place: set[str] = set()
        self.elsewhere: dict[str, torch.device] = {}
        self.whole: list[object] = []

    def sort(self, node: object, tree: Tree | Leaf | Unread | None) -> None:
        """Sort what is below a node. Goes as deep as the tree, whatever the pickle."""
        if tree is None:
            return
        if isinstance(tree, Unread):
            self._pass_over(node)
            return
        if isinstance(tree, Leaf):
            self._sort_leaf(node, tree)
            return
        children: Iterable[tuple[object, object]] = ()
        if isinstance(node, (list, tuple)):
            children = enumerate(node)
        elif isinstance(node, SymbolicDict):
            children = self._entries(node)
        elif isinstance(node, Call) and is_ordered_dict(node):
            self.whole += [node.arguments, node.keywords, node.state, node.items]
            children = () if node.entries is None else self._entries(node.entries)
        else:
            self.whole.append(node)
        for key, child in children:
            if isinstance(key, SCALAR_KEYS) and key in tree:
                self.sort(child, tree[key])
            else:
                self.whole.append(child)

    def _pass_over(self, top: object) -> None:
        """Sort what is not wanted. Other objects than plain tensors in plain containers may need data to be built."""
        stack, seen = [top], set()
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if (key := _plain_storage_key(node)) is not None:
                self.in_place.add(key)
            elif isinstance(node, (list, tuple)):
                stack += node
            elif isinstance(node, SymbolicDict):
                stack += node.flat
            elif isinstance(node, Call) and is_ordered_dict(node):
                self.whole += [node.arguments, node.keywords, node.state, node.items]
                stack.append(node.entries)
            else:
                self.whole.append(node)

    def _entries(self, node: SymbolicDict) -> list[tuple[object, object]]:
        entries = node.items()
        if 2 * len(entries) != len(node.flat):
            self.whole.append(node)  # keys that occur twice: the values that lose are unpickled as well
        return entries

    def _sort_leaf(self, node: object, leaf: Leaf) -> None:
        key = _plain_storage_key(node)
        if key is None:
            self.whole.append(node)
        elif leaf.target is not None:
            self.in_place.add(key)
        elif leaf.device is not None and self.elsewhere.get(key, leaf.device) == leaf.device:
            self.elsewhere[key] = leaf.device
        else:
            self.whole.append(node)


def is_ordered_dict(node: Call) -> bool:
    """Tell whether a call makes one of the dicts of `collections`."""
    return isinstance(node.function, Global) and node.function.module == "collections"


def _plain_storage_key(node: object) -> str | None:
    """Return the key of the storage behind a plain tensor; None for all else, a tensor with attributes for one."""
    for _ in range(2):  # a Parameter around a tensor
        if not isinstance(node, Call) or not isinstance(node.function, Global) or not node.arguments:
            return None
        name = node.function.name if node.function.module == "torch._utils" else ""
        if node.state is not None or storages_below(node.arguments[1:]):
            return None
        if name.startswith("_rebuild_tensor_v"):
            storage = node.arguments[0]
            return str(storage.value[2]) if isinstance(storage, PersistentId) else None  # type: ignore[index]
        if name != "_rebuild_parameter":
            return None
        node = node.arguments[0]
    return None


def storages_below(nodes: Iterable[object]) -> set[str]:
    """Return the keys of all storages that are reached from nodes of a scanned pickle."""
    keys: set[str] = set()
    seen: set[int] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if isinstance(node, PersistentId):
            keys.add(str(node.value[2]))  # type: ignore[index]  # its form was proven with the references
        elif isinstance(node, (Call, SymbolicDict, SymbolicSet, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, Call):
                stack += [node.function, node.arguments, node.keywords, node.state, node.items, node.entries]
            elif isinstance(node, SymbolicDict):
                stack += node.flat
            else:
                stack += node.members if isinstance(node, SymbolicSet) else node
    return keys
