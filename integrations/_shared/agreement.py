"""Collective steps that fail on all ranks if they fail on one, so that no rank waits for one that has raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fastpersist import ConfigError, FastPersistError, StorageError, UnsupportedError

__all__ = ["PeerFailure", "are_several", "is_first_rank", "is_of_the_disk", "on_all_ranks"]

_Result = TypeVar("_Result")


class PeerFailure(NamedTuple):
    """The failure of another rank.

    Attributes:
        rank: The rank that failed.
        text: Class and message of its exception.
        is_of_the_disk: Whether it is a storage error, as the rank that failed has decided.
    """

    rank: int
    text: str
    is_of_the_disk: bool


def are_several() -> bool:
    """Return whether there is a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    """Return whether this is rank 0, or the only one."""
    return not are_several() or dist.get_rank() == 0


def is_of_the_disk(error: BaseException) -> bool:
    """Tell whether an error may be gone at the next save; a mistake of the program would occur again."""
    return isinstance(error, FastPersistError | OSError) and not isinstance(error, ConfigError | UnsupportedError)


def on_all_ranks(
    work: Callable[[], _Result],
    error_of: Callable[[PeerFailure], Exception],
    is_of_the_disk: Callable[[Exception], bool] = lambda error: isinstance(error, StorageError),
) -> list[_Result]:
    """Run a function on every rank; raise on all of them if it fails on one. Collective.

    Args:
        work: The function; all ranks get its result, by pickle.
        error_of: Makes the exception of a rank that succeeded, from the failure with the lowest rank.
        is_of_the_disk: Says, on a rank that failed, whether the exception is a storage error.

    Returns:
        The results, by rank.

    Raises:
        Exception: The exception of `work` on this rank, else that of `error_of`.

    Thread safety: the thread that runs the collectives of this process group.
    """
    if not are_several():
        return [work()]
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know
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
