"""Renames the entries of a loaded file, so that names of other checkpoints fit a target.

Names are the flat ones of `fastpersist.inspect`: `model.layers.0.weight`. Nested dicts become one flat dict of these
names, then `regrouped` nests it like a target. `nested_for` keeps the nesting, for targets that need it: optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from fastpersist.errors import ConfigError
from fastpersist.formats import names
from fastpersist.loading.selection import Entries, dict_entries
from fastpersist.loading.targets import Path, is_extra_state, joined_name

__all__ = ["Rename", "nested_for", "regrouped", "renamed"]

Rename: TypeAlias = Callable[[str], str | None] | Mapping[str, str]


def renamed(path: str, value: Any, rename: Rename) -> dict[str, Any]:
    """Return one flat dict of what nested dicts hold, by new names.

    Args:
        path: The path of the file, for messages.
        value: A dict. Dicts in it become flat; lists and all other values stay what they are.
        rename: Returns the new name for a name, or None to leave it out; or new prefixes by old ones, of which the
            longest that fits is replaced.

    Raises:
        ConfigError: The value is no dict; or a new name is no text; or two names become one.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; rename= takes a dict, which has names")
    return {one.new: one.item for one in _renamed(path, value, rename, dict_entries) if one.new is not None}


class _Renamed(NamedTuple):
    path: Path
    old: str
    new: str | None
    item: Any


def _renamed(path: str, value: Any, rename: Rename, entries_of: Entries) -> Iterator[_Renamed]:
    """Yield what nested dicts hold, by old and new names."""
    new_name = partial(names.renamed, prefixes=rename) if isinstance(rename, Mapping) else rename
    is_of_texts = not isinstance(rename, Mapping) or all(isinstance(old, str) for old in rename)
    if not callable(new_name) or not is_of_texts:
        raise ConfigError(f"rename= must be a function of a name, or a dict of prefixes, not {rename!r}")
    old_names: dict[str, str] = {}
    for inside, old, item in _flat(value, entries_of):
        new = new_name(old)
        if not isinstance(new, str | None):
            raise ConfigError(
                f"rename= returned {new!r} for {old!r}; it must return a string, or None to leave the entry out"
            )
        if new in old_names:
            raise ConfigError(f"rename= gives {old_names[new]!r} and {old!r} of {path} one name: {new!r}")
        if new is not None:
            old_names[new] = old
        yield _Renamed(inside, old, new, item)


def _flat(value: Any, entries_of: Entries) -> Iterator[tuple[Path, str, Any]]:
    """Yield the items of nested dicts with their paths and flat names, each dict once: a cycle ends."""
    seen = {id(value)}
    levels: list[tuple[Path, str, Iterator[tuple[Any, Any]]]] = [((), "", iter(entries_of(value) or ()))]
    while levels:
        path, owner, items = levels[-1]
        for key, item in items:
            name = joined_name(owner, key)
            below = None if id(item) in seen or is_extra_state(key) else entries_of(item)
            if below:
                seen.add(id(item))
                levels.append(((*path, key), name, iter(below)))
                break
            yield (*path, key), name, item
        else:
            levels.pop()


class _Level(dict[Any, Any]):
    """A dict that was made here, and no item of a file."""


def nested_for(
    path: str,
    value: Any,
    rename: Rename,
    targets: Mapping[str, object],
    entries_of: Entries = dict_entries,
    make_dict: Callable[[dict[Any, Any]], Any] = dict,
) -> Any:
    """Return nested dicts in which each renamed entry lies where its target expects it.

    Entries in which no name changes stay the same objects. An entry whose new name belongs to no target lies under that
    name in the outermost dict.

    Args:
        path: The path of the file, for messages.
        value: A dict, or a tree that stands for one.
        rename: The new names, as in `renamed`.
        targets: What is filled, by key of the result.
        entries_of: Looks into the value.
        make_dict: Makes a node of such a tree.

    Raises:
        ConfigError: As `renamed`; or a new name lies below another one.
    """
    every = list(_renamed(path, value, rename, entries_of))
    changed: set[Any] = set()  # keys of the entries that are put together anew
    new_paths: list[Path] = []
    for one in every:
        new_path = one.path if one.new in (one.old, None) else _path_for(one.new, one.path, targets)
        new_paths.append(new_path)
        changed.update(() if one.new == one.old else (one.path[0], new_path[0]))
    root = _Level((key, item) for key, item in entries_of(value) or () if key not in changed)
    for one, new_path in zip(every, new_paths, strict=True):
        if one.new is None or one.path[0] not in changed:
            continue
        level: Any = root
        for key in new_path[:-1]:
            level = level.setdefault(key, _Level()) if type(level) is _Level else None
        if type(level) is not _Level or new_path[-1] in level:
            raise ConfigError(f"rename= gives {one.old!r} of {path} the name {one.new!r}, where something else lies")
        level[new_path[-1]] = one.item
    return _made(root, make_dict)


def _made(value: Any, make_dict: Callable[[dict[Any, Any]], Any]) -> Any:
    if type(value) is not _Level:
        return value
    return make_dict({key: _made(item, make_dict) for key, item in value.items()})


def _path_for(name: str, old: Path, targets: Mapping[str, object]) -> Path:
    """Return the path of a renamed entry: below a module under one name, otherwise nested as before.

    Worked example: for a module "model", "model.0.weight" belongs to ("model", "0.weight"). For an optimizer "optim",
    what was at ("optim", "state", "module.weight", "exp_avg") belongs by the name "optim.state.weight.exp_avg" to
    ("optim", "state", "weight", "exp_avg").
    """
    target: object = targets
    path: list[Any] = []
    rest = name
    while rest and isinstance(target, Mapping):
        fitting = [key for key in target if _begins(rest, key)]
        if not fitting:
            break
        path.append(max(fitting, key=lambda key: len(joined_name("", key))))
        rest, target = _without_begin(rest, path[-1]), target[path[-1]]
    if not path:
        return (name,)
    below = [] if isinstance(target, torch.nn.Module) else list(old[len(path) :])
    tail: list[Any] = []
    while below and (rest == joined_name("", below[-1]) or rest.endswith(joined_name(" ", below[-1])[1:])):
        rest = rest[: -len(joined_name("", below[-1]))].removesuffix(".")
        tail.insert(0, below.pop())
    while rest and below and _begins(rest, below[0]):
        path.append(below[0])
        rest = _without_begin(rest, below.pop(0))
    return (*path, *([rest] if rest else []), *tail)


def _begins(name: str, key: object) -> bool:
    first = joined_name("", key)
    return name == first or name.startswith((f"{first}.", f"{first}["))


def _without_begin(name: str, key: object) -> str:
    return name[len(joined_name("", key)) :].removeprefix(".")


def regrouped(flat: dict[str, Any], target: object) -> Any:
    """Nest a flat dict like a target; names that the target does not have stay flat, in the outermost dict."""
    left = dict(flat)
    found = _grouped(left, "", target)
    return {**found, **left} if isinstance(found, dict) else found


def _grouped(left: dict[str, Any], name: str, target: object) -> Any:
    """Take out of `left` what belongs to a target of this name."""
    if isinstance(target, torch.nn.Module):
        prefix = f"{name}." if name else ""
        return {own[len(prefix) :]: left.pop(own) for own in list(left) if own.startswith(prefix)}
    if isinstance(target, Mapping):
        found = {key: _grouped(left, joined_name(name, key), item) for key, item in target.items()}
        return {key: item for key, item in found.items() if item is not None}
    return left.pop(name, None)
