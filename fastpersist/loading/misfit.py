"""Say why a target and what was saved do not fit: one error with all differences, by their names in the target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastpersist.errors import ConfigError

__all__ = [
    "EXTRA_STATE_KEY",
    "IncompatibleKeys",
    "is_extra_state",
    "joined_name",
    "misfit",
    "misfit_of_shape",
    "refuse_misfit",
    "why_not_fitting",
]

_SHOWN_COUNT = 10

EXTRA_STATE_KEY = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class IncompatibleKeys(NamedTuple):
    """What `load_into` has passed over, as `Module.load_state_dict` returns it.

    Attributes:
        missing_keys: Names that are in the target, but not in the file.
        unexpected_keys: Names that are in the file, but not in the target.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def joined_name(name: str, key: object) -> str:
    """Name what lies under a key: `model.weight`, `state[0]`."""
    if isinstance(key, str):
        return f"{name}.{key}" if name else key
    return f"{name}[{key!r}]"


def is_extra_state(key: object) -> bool:
    """Tell whether a state_dict key is that of a module's get_extra_state."""
    return isinstance(key, str) and key.rpartition(".")[2] == EXTRA_STATE_KEY


def why_not_fitting(name: str, target: torch.Tensor, shape: Sequence[int], where: str = "file") -> str | None:
    """Say why a tensor cannot take a saved one of a shape; None if it can."""
    if torch.nn.parameter.is_lazy(target):
        return f"{name} has no shape yet (a lazy module); run the module once, then load"
    if target.shape != torch.Size(shape):
        return misfit_of_shape(name, target.shape, shape, where)
    return None


def misfit_of_shape(name: str, own: Sequence[int], saved: Sequence[int], where: str = "file") -> str:
    """Say that two shapes differ."""
    return f"{name} has shape {tuple(own)} in the target, {tuple(saved)} in the {where}"


def refuse_misfit(
    path: str, problems: Sequence[str], keys: IncompatibleKeys, *, strict: bool, where: str = "file"
) -> None:
    """Refuse a target that does not fit; without `strict`, what is on one side only does no harm.

    Raises:
        ConfigError: All that does not fit.
    """
    found = [f"{name} is in the target, but not in the {where}" for name in keys.missing_keys] if strict else []
    found += problems
    found += [f"{name} is in the {where}, but not in the target" for name in keys.unexpected_keys] if strict else []
    if found:
        raise misfit(path, found)


def misfit(path: str, problems: Sequence[str]) -> ConfigError:
    """Say in one error why a file and a target do not fit; names that differ by a prefix alone are told as one."""
    shown = _by_prefix(problems)
    more = [f"… and {len(shown) - _SHOWN_COUNT} more"] if len(shown) > _SHOWN_COUNT else []
    return ConfigError(
        f"{path} does not fit the target, which was not changed: " + "; ".join([*shown[:_SHOWN_COUNT], *more])
    )


_ONE_SIDED = re.compile(r"(?s)(.+) is in the (target|file|checkpoint), but not in the (?:target|file|checkpoint)")


def _by_prefix(problems: Sequence[str]) -> list[str]:
    """Replace what is said of names on one side by one sentence, if a prefix explains all of them."""
    matches = [_ONE_SIDED.fullmatch(problem) for problem in problems]
    wanted = {match[1] for match in matches if match is not None and match[2] == "target"}
    stored = {match[1] for match in matches if match is not None and match[2] != "target"}
    if not wanted or len(wanted) != len(stored):
        return list(problems)
    first, last = min(wanted | stored), max(wanted | stored)  # what these two have in common, all have
    common = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    owner = first[: first.rfind(".", 0, common) + 1]
    for longer, shorter, side in ((stored, wanted, "file"), (wanted, stored, "target")):
        one = min(longer)
        for name in shorter:
            prefix = one.removeprefix(owner).removesuffix(name.removeprefix(owner))
            if prefix.endswith(".") and {f"{owner}{prefix}{name.removeprefix(owner)}" for name in shorter} == longer:
                others = [problem for problem, match in zip(problems, matches, strict=True) if match is None]
                where = f" of {owner[:-1]}" if owner else ""
                return [
                    f"names{where} differ by the prefix {prefix!r}, which only those of the {side} have "
                    f"({one}, {len(longer)} in all); add or remove it, as wrappers of a module do",
                    *others,
                ]
    return list(problems)
