"""Selects the entries of a saved object to load, by exact names or patterns.

A saved object is a tree of dicts; lists, tensors and all other values are its leaves. An entry has the flat name that
`fastpersist.inspect` prints: `model.layers.0.weight`, `optimizer.state[0].exp_avg`. A number in brackets may also be
written with a dot: `optimizer.state.0.exp_avg`.

This module examines trees of any kind (objects, scanned pickles, names of shards) through functions of its callers, and
reads nothing.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from fastpersist.errors import ConfigError
from fastpersist.formats.names import is_wanted
from fastpersist.loading.targets import SCALAR_KEYS, Path, joined_name, missing_keys, tensors_in

__all__ = [
    "Choice",
    "Entries",
    "choose",
    "chosen_part",
    "dict_entries",
    "left_out_of",
    "refuse_unmatched",
    "require_keys",
    "tell_left_out",
    "tensor_bytes",
    "without",
]

_log = logging.getLogger("fastpersist")

Entries: TypeAlias = Callable[[Any], Iterable[tuple[Any, Any]] | None]
"""Returns keys and values of a dict; None for a leaf."""

_DEPTH_MAX = 64
"""Dicts nested deeper than this are chosen only together with the dict around them."""

_SMALL_BYTES = 1 << 20
_SHOWN_COUNT = 10

_KEY_CHARACTERS_MAX = 1024
"""Longer keys are cut: a pickle can use one long key many times."""


class Choice(NamedTuple):
    """What is chosen.

    Attributes:
        left_out: Path and value of the entries that are not; of nested ones the outermost.
        unmatched: The keys that choose nothing.
    """

    left_out: list[tuple[Path, Any]]
    unmatched: list[str]


def require_keys(keys: object) -> None:
    """Refuse anything but a list of strings; also a single string, which would count as a list of letters.

    Raises:
        ConfigError: `keys` is no such list.
    """
    if isinstance(keys, str):
        raise ConfigError(f"keys is a list of names and patterns, not a text: keys=[{keys!r}]")
    if keys is not None and not isinstance(keys, Collection):
        raise ConfigError(f"keys is a list of names and patterns, not {keys!r}")


def choose(root: Any, keys: Collection[str], entries_of: Entries, *, beside: Collection[object] = ()) -> Choice:
    """Choose the entries that a key names, or matches as a pattern of `fnmatch`, with all that is in them.

    Args:
        root: A dict.
        keys: Names and patterns. In patterns, `*` and `?` stand for dots and brackets too. What is a key of the root is
            no pattern.
        entries_of: Looks into the tree. A dict with two names is looked into under the first. An entry whose key is
            neither text nor a number has no name: it stays where it is.
        beside: Keys of the root whose entries are skipped: they are neither chosen nor left out.
    """
    exact = {key for key, _ in entries_of(root) or () if isinstance(key, SCALAR_KEYS)}
    unmatched = dict.fromkeys(keys)
    kept: set[Path] = set()  # what is chosen, and what it is in
    found: list[tuple[Path, Any]] = []
    seen = {id(root)}
    stack: list[tuple[Path, str, str, bool, Any]] = [((), "", "", False, root)]
    while stack:
        path, name, dotted, is_inside, node = stack.pop()
        for key, child in entries_of(node) or ():
            own = (*path, key)
            if not isinstance(key, SCALAR_KEYS) or (not path and key in beside):
                continue
            shown = key[:_KEY_CHARACTERS_MAX] if isinstance(key, str | bytes) else key
            own_name = joined_name(name, shown)
            own_dotted = joined_name(dotted, str(shown) if isinstance(shown, int) else shown)
            names = own_name, own_dotted
            matched = [one for one in keys if (own == (one,) if one in exact else _matches(one, names))]
            for one in matched:
                unmatched.pop(one, None)
            if matched and not is_inside:
                kept.update(own[:length] for length in range(1, len(own) + 1))
            if not is_inside:
                found.append((own, child))
            if id(child) not in seen:
                seen.add(id(child))
                if len(own) < _DEPTH_MAX and entries_of(child) is not None:
                    stack.append((own, own_name, own_dotted, is_inside or bool(matched), child))
    left_out = [(path, node) for path, node in found if path not in kept and (path[:-1] in kept or len(path) == 1)]
    return Choice(left_out, list(unmatched))


def _matches(key: object, names: Iterable[str]) -> bool:
    return isinstance(key, str) and any(is_wanted(name, (key,)) for name in names)


def left_out_of(
    state: Any, into: Collection[str], keys: Collection[str] | None, entries_of: Entries, bytes_of: Callable[[Any], int]
) -> Choice:
    """Choose the entries of a state that a load neither reads nor returns: one rule for all kinds of steps.

    Entries that are not in `into` are left out unless a key chooses them. With `into`, entries whose tensors have less
    than 1 MiB together are loaded in any case: a step, a scheduler, the state of a random generator.

    Args:
        state: The state, as a tree.
        into: Keys of the entries that are filled in place.
        keys: Names and patterns of other entries that the caller asked for. None for everything; with `into`, for none.
        entries_of: Looks into the tree.
        bytes_of: Returns how many bytes the tensors of a part of the tree need.
    """
    if keys is not None:
        found, unmatched = choose(state, keys, entries_of, beside=into)
    else:
        entries = (entries_of(state) or ()) if into else ()
        unmatched = []
        found = [((key,), node) for key, node in entries if isinstance(key, SCALAR_KEYS) and key not in into]
    if into:
        found = [(path, node) for path, node in found if len(path) > 1 or bytes_of(node) >= _SMALL_BYTES]
    return Choice(found, unmatched)


def tell_left_out(path: str, choice: Choice, bytes_of: Callable[[Any], int]) -> None:
    """Log in one line which entries were left out because they were not asked for, and their sizes."""
    if choice.left_out:
        names = [f"{joined_name('', found[0])} ({bytes_of(node) / 2**20:.1f} MiB)" for found, node in choice.left_out]
        more = f" and {len(names) - _SHOWN_COUNT} more" if len(names) > _SHOWN_COUNT else ""
        shown = ", ".join(names[:_SHOWN_COUNT])
        _log.info("%s: not loaded, because neither into nor keys name them: %s%s", path, shown, more)


def tensor_bytes(value: Any) -> int:
    """Return how many bytes the storages of the tensors in nested containers have."""
    sizes_bytes: dict[int, int] = {}
    for tensor in tensors_in(value):
        try:
            storage = tensor.untyped_storage()
            sizes_bytes[storage._cdata] = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse
            count = tensor.numel() if tensor.layout == torch.strided else tensor._nnz()
            sizes_bytes[id(tensor)] = count * tensor.element_size()
    return sum(sizes_bytes.values())


def dict_entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the entries of a real dict; None for any other value."""
    return value.items() if isinstance(value, dict) else None


def without(value: Any, paths: Iterable[Path]) -> Any:
    """Return nested dicts without some of their entries; the dicts that lose one are copied."""
    tree: dict[Any, Any] = {}
    for path in paths:
        level = tree
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = None
    return _without(value, tree) if tree else value


def _without(value: Any, tree: Mapping[Any, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    copied = copy.copy(value)  # of an OrderedDict, with its _metadata
    for key, below in tree.items():
        if below is None:
            copied.pop(key, None)
        elif key in copied:
            copied[key] = _without(copied[key], below)
    return copied


def chosen_part(path: str, value: Any, keys: Collection[str] | None) -> Any:
    """Return the parts of a loaded object that keys choose; without keys, the whole object.

    Raises:
        ConfigError: The object is no dict, or a key chooses nothing.
    """
    if keys is None:
        return value
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; only a dict has entries that keys= can choose")
    choice = choose(value, keys, dict_entries)
    refuse_unmatched(path, choice.unmatched, value)
    return without(value, (found for found, _ in choice.left_out))


def refuse_unmatched(path: str, unmatched: Collection[str], held: Collection[object], where: str = "file") -> None:
    """Refuse keys that choose nothing.

    Args:
        path: The path of what is loaded, for messages.
        unmatched: The keys that choose nothing.
        held: The keys of what was loaded.
        where: The kind of what is loaded: "file" or "checkpoint".

    Raises:
        ConfigError: There are such keys.
    """
    if unmatched:
        told = "; ".join(missing_keys((), (), unmatched, f"the {where}"))
        shown = ", ".join(str(name) for name in list(held)[:_SHOWN_COUNT]) or "nothing"
        raise ConfigError(
            f"{path}: {told}, which holds {shown}; `fastpersist inspect` prints the names of what is inside; what is "
            f"in a list, in an object that is no dict, or more than {_DEPTH_MAX} dicts deep, comes with it"
        )
