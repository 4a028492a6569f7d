"""The ranks that a Checkpointer saves with: they meet, and refuse together what one of them cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastpersist.checkpointer.root import why_no_root
from fastpersist.distributed.common_steps import refuse_together
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.group_save import Writers, tuned_writer_count
from fastpersist.distributed.node_local.detection import NodeLocal, Stores
from fastpersist.distributed.partition import choose_writers
from fastpersist.distributed.sessions import Session
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.errors import ConfigError
from fastpersist.formats.manifest import step_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BoundRanks", "meet_ranks"]


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


class BoundRanks:
    """The ranks of the process group that a Checkpointer is bound to, from its constructor or rebind() on.

    Args:
        process_group: All its ranks make one, at the same time.
        path: The root of this rank.
        own_root: Makes it and takes its lock.
        node_local: As in `Checkpointer`, and so the next three.
        busy: …
        writers: …
        check_replicas: …
        timeout_s: `peer_timeout_s`.

    Attributes:
        ranks: The ranks, connected; None if this one is alone.
        process_group: The group; None if this rank is alone in it.
        stores: What is known of their file systems.
        writers: Those that write what is cut, in order.
        newest_begun: The step that they have begun to save last.

    Raises:
        ConfigError, PeerError, CoordinationError: As `meet_ranks`.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        path: str,
        own_root: Callable[[], None],
        *,
        node_local: NodeLocal,
        busy: str,
        writers: Writers,
        check_replicas: bool,
        timeout_s: float,
    ) -> None:
        met = None if process_group is None else meet_ranks(process_group, path, busy, timeout_s)
        self.ranks: Ranks | None = None
        tuned_count = None
        if met is not None:
            self.ranks, tuned_count = met
        self.process_group = None if self.ranks is None else process_group
        self.stores = Stores(own_root, node_local)
        self.newest_begun: int | None = None
        self._path = path
        self.writers = choose_writers(writers, [0] if self.ranks is None else self.ranks.nodes, tuned_count)
        self._check_replicas = check_replicas

    @property
    def rank(self) -> int:
        """This one; 0 if it is alone."""
        return 0 if self.ranks is None else self.ranks.rank

    def begin(self, subject: str) -> Session | None:
        """Begin a session of all ranks; None if this one is alone.

        Args:
            subject: What it is about, for messages.
        """
        return None if self.ranks is None else self.ranks.begin(subject)

    def to_save(self, session: Session, step: int) -> SaveGroup:
        """Return how the ranks save a step in a session."""
        self.newest_begun = step
        return SaveGroup(session, step_name(step), self.writers, self._check_replicas, stores=self.stores)

    def close(self, why: BaseException | None = None) -> None:
        """Close the connections; see `Ranks.close`."""
        if self.ranks is not None:
            self.ranks.close(why)
