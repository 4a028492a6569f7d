"""What all ranks have to know alike of the steps of a root, or to do alike with them: the first rank decides.

Each rank may see other steps than the first: in a store of its own, or through a cache that is older.
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

__all__ = ["done_by_first", "hearing_all", "refuse_together"]

_Result = TypeVar("_Result")


@contextmanager
def hearing_all(root: str, doing: str) -> Iterator[None]:
    """Make a PeerError of what a collective in the block raises.

    Args:
        root: What it is about.
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
    """Raise on all ranks if one has something against its root.

    Args:
        process_group: All its ranks call this.
        root: This rank's.
        why_not: What this rank has against it; "" for nothing.

    Raises:
        ConfigError: It has.
        PeerError: Another one has, or is gone.
    """
    told = [""] * dist.get_world_size(process_group)
    with hearing_all(root, "looking at"):
        dist.all_gather_object(told, why_not, group=process_group)
    if why_not:
        raise ConfigError(why_not)
    for rank, other in enumerate(told):
        if other:
            raise PeerError(f"rank {rank} cannot save: {other}", rank=rank, subject=root)


def done_by_first(process_group: ProcessGroup | None, root: str, doing: str, do: Callable[[], _Result]) -> _Result:
    """Do something on the first rank, and return on all ranks what it returned there.

    Args:
        process_group: All its ranks call this; None for a process that is alone.
        root: What it is about.
        doing: "removing steps of", …
        do: What is done; the result can be pickled.

    Raises:
        Exception: What it raises, on the first rank.
        PeerError: On the others, if it raised there; or a rank is gone.
    """
    if process_group is None:
        return do()
    error: Exception | None = None
    told: list[Any] = [None]
    if dist.get_rank(process_group) == 0:
        try:
            told = [(do(), "")]
        except Exception as caught:  # noqa: BLE001 - whatever it is, the others wait for a word
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
