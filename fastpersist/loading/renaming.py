"""Other names for what a file holds: the names of a checkpoint of others become those of a target.

Names are the flat ones of `fastpersist.inspect`: `model.layers.0.weight`. Nested dicts become one flat dict of these
names, then `regrouped` nests it like a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from fastpersist.errors import ConfigError
from fastpersist.formats import names
from fastpersist.loading.targets import is_extra_state, joined_name

__all__ = ["Rename", "regrouped", "renamed"]

Rename: TypeAlias = Callable[[str], str | None] | Mapping[str, str]


def renamed(path: str, value: Any, rename: Rename) -> dict[str, Any]:
    """Return one flat dict of what nested dicts hold, by new names.

    Args:
        path: Of the file, for messages.
        value: A dict. Dicts in it become flat; lists and all other values stay what they are.
        rename: Returns the new name for a name, or None to leave it out; or new prefixes by old ones, of which the
            longest that fits is replaced.

    Raises:
        ConfigError: The value is no dict; or a new name is no text; or two names become one.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; rename= takes a dict, which has names")
    new_name = partial(names.renamed, prefixes=rename) if isinstance(rename, Mapping) else rename
    old_names: dict[str, str] = {}
    found = {}
    for old, item in _flat(value):
        new = new_name(old)
        if new is None:
            continue
        if not isinstance(new, str):
            raise ConfigError(f"rename= returned {new!r} for {old!r}; it returns a text, or None to leave it out")
        if new in old_names:
            raise ConfigError(f"rename= gives {old_names[new]!r} and {old!r} of {path} one name: {new!r}")
        old_names[new] = old
        found[new] = item
    return found


def _flat(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of nested dicts by flat names, each dict once: a cycle ends."""
    seen = {id(value)}
    levels = [("", iter(value.items()))]
    while levels:
        owner, items = levels[-1]
        for key, item in items:
            name = joined_name(owner, key)
            if isinstance(item, dict) and item and id(item) not in seen and not is_extra_state(key):
                seen.add(id(item))
                levels.append((name, iter(item.items())))
                break
            yield name, item
        else:
            levels.pop()


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
