"""Decisions about the steps of a root that must be the same on all ranks: rank 0 makes them.

A rank may see different steps than rank 0: in a store of its own, or through an older cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from fastpersist.distributed.shared_reader import UNKNOWN_RANK
from fastpersist.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["done_by_first", "hearing_all", "refuse_together", "require_same"]

_Result = TypeVar("_Result")


@contextmanager
def hearing_all(root: str, doing: str) -> Iterator[None]:
    """Raise PeerError for an error of a collective in the block.

    Args:
        root: The root that the collective is about, for messages.
        doing: "loading from", …
    """
    try:
        yield
    except Exception as lost:
        raise PeerError(
            f"another rank is gone or silent while {doing} {root}: {type(lost).__name__}: {lost}",
            rank=UNKNOWN_RANK,
            subject=root,
        ) from lost


def refuse_together(process_group: ProcessGroup, root: str, why_not: str) -> None:
    """Raise on all ranks if one of them refuses what it was given.

    Args:
        process_group: The group whose ranks all call this.
        root: This rank's root.
        why_not: Why this rank refuses; "" if it does not.

    Raises:
        ConfigError: This rank refuses.
        PeerError: Another rank refuses, or is gone.
    """
    told = [""] * dist.get_world_size(process_group)
    with hearing_all(root, "looking at"):
        dist.all_gather_object(told, why_not, group=process_group)
    if why_not:
        raise ConfigError(why_not)
    for rank, other in enumerate(told):
        if other:
            raise PeerError(f"rank {rank} cannot go on: {other}", rank=rank, subject=root)


def require_same(process_group: ProcessGroup, root: str, option: str, value: object) -> None:
    """Raise on all ranks if they were given different values of an option.

    Args:
        process_group: The group whose ranks all call this.
        root: The root that is used, for messages.
        option: The name of the option.
        value: The value that this rank was given.

    Raises:
        ConfigError: They differ.
        PeerError: A rank is gone.
    """
    told: list[Any] = [None] * dist.get_world_size(process_group)
    with hearing_all(root, "looking at"):
        dist.all_gather_object(told, value, group=process_group)
    different = next((rank for rank, other in enumerate(told) if other != told[0]), None)
    if different is not None:
        raise ConfigError(
            f"all ranks need the same {option}; it is {told[0]!r} on rank 0 and {told[different]!r} on rank {different}"
        )


def done_by_first(process_group: ProcessGroup | None, root: str, doing: str, do: Callable[[], _Result]) -> _Result:
    """Call a function on rank 0, and return its result on all ranks.

    Args:
        process_group: The group whose ranks all call this; None for a process that is alone.
        root: The root that is used, for messages.
        doing: "removing steps of", …
        do: The function; its result can be pickled.

    Raises:
        Exception: What the function raises, on rank 0.
        PeerError: On the other ranks, if the function raised on rank 0; or a rank is gone.
    """
    if process_group is None:
        return do()
    error: Exception | None = None
    told: list[Any] = [None]
    if dist.get_rank(process_group) == 0:
        try:
            told = [(do(), "")]
        except Exception as caught:  # noqa: BLE001 - the other ranks wait for the result
            error = caught
            told = [(None, f"{type(caught).__name__}: {caught}")]
    with hearing_all(root, doing):
        dist.broadcast_object_list(told, src=dist.get_global_rank(process_group, 0), group=process_group)
    if error is not None:
        raise error
    result, failed = told[0]
    if failed:
        raise PeerError(f"rank 0 failed while {doing} {root}: {failed}", rank=0, subject=root)
    found: _Result = result
    return found
