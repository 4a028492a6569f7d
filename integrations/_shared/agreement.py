"""What all ranks do together: the failure of one is raised on all, so no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fastpersist import StorageError

__all__ = ["PeerFailure", "are_several", "is_first_rank", "on_all_ranks"]

_Result = TypeVar("_Result")


class PeerFailure(NamedTuple):
    """What another rank has met.

    Attributes:
        rank: Which one.
        text: Class and message of its exception.
        is_of_the_disk: What that rank says of its exception.
    """

    rank: int
    text: str
    is_of_the_disk: bool


def are_several() -> bool:
    """Tell whether there is a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    """Tell whether this is rank 0, or the only one."""
    return not are_several() or dist.get_rank() == 0


def on_all_ranks(
    work: Callable[[], _Result],
    error_of: Callable[[PeerFailure], Exception],
    is_of_the_disk: Callable[[Exception], bool] = lambda error: isinstance(error, StorageError),
) -> list[_Result]:
    """Do something on every rank; raise on all of them if one has failed. Collective.

    Args:
        work: Its result goes to all ranks, by pickle.
        error_of: Makes the exception of a rank where it went well, of the first rank where it did not.
        is_of_the_disk: Judges the exception of a rank where it failed.

    Returns:
        The results, by rank.

    Raises:
        Exception: What `work` raises here, else what `error_of` makes.

    Thread safety: the thread whose collectives are in order with those of the other ranks.
    """
    if not are_several():
        return [work()]
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        failure = error
    told = None if failure is None else (f"{type(failure).__name__}: {failure}", is_of_the_disk(failure))
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, told))
    if failure is not None:
        raise failure
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            raise error_of(PeerFailure(rank, *failed))
    return [result for result, _ in outcomes]
