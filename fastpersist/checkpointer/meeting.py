"""The ranks of a process group meet for a Checkpointer, and refuse together what one of them cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastpersist.checkpointer.root import why_no_root
from fastpersist.distributed.common_steps import refuse_together
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.group_save import tuned_writer_count
from fastpersist.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["meet_ranks"]


def meet_ranks(process_group: ProcessGroup, root: str, busy: str, timeout_s: float) -> tuple[Ranks, int | None] | None:
    """Meet the ranks of a process group; all of them call this.

    Args:
        process_group: The group.
        root: The root of this rank.
        busy: As in `Checkpointer`.
        timeout_s: Seconds of silence after which a rank counts as failed.

    Returns:
        The ranks, and how many of them write by the coordinator's tuning file; None if this rank is alone.

    Raises:
        ConfigError: The root of some rank cannot be one, or `busy` makes no sense for several ranks.
        PeerError: A rank is gone.
    """
    ranks = Ranks.meet(process_group, timeout_s=timeout_s)
    try:
        refuse_together(process_group, root, why_no_root(root))
        if ranks.count == 1:
            return None
        tuned_count = tuned_writer_count(process_group, root)
        if busy != "wait":
            raise ConfigError(
                f"with several ranks, busy must be 'wait': with {busy!r} the ranks would leave out different saves"
            )
    except BaseException:
        ranks.close()
        raise
    return ranks, tuned_count
