"""The ranks of a Checkpointer: they connect, and all refuse arguments that one of them cannot use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from fastpersist.checkpointer.root import why_no_root
from fastpersist.commit.step_listing import in_commit_order, read_commits
from fastpersist.distributed.common_steps import done_by_first, refuse_together, require_same
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.group_save import Writers, tuned_writer_count
from fastpersist.distributed.node_local.copies import agree_on_stores
from fastpersist.distributed.node_local.detection import NodeLocal, Stores
from fastpersist.distributed.partition import choose_writers
from fastpersist.distributed.sessions import Session
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.errors import ConfigError, StorageError
from fastpersist.formats.manifest import step_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["BoundRanks", "meet_ranks"]


def meet_ranks(
    process_group: ProcessGroup, root: str, busy: str, timeout_s: float, node_local: NodeLocal = None
) -> tuple[Ranks, int | None] | None:
    """Meet the ranks of a process group; all of them call this.

    Args:
        process_group: The group.
        root: The root of this rank.
        busy: The option `busy` of `Checkpointer`.
        timeout_s: Seconds of silence after which a rank counts as failed.
        node_local: The option `node_local` of `Checkpointer`.

    Returns:
        The ranks, and how many of them write by the coordinator's tuning file; None if this rank is alone.

    Raises:
        ConfigError: The root of some rank cannot be one, `busy` makes no sense for several ranks, or they differ in
            `node_local`.
        PeerError: A rank is gone.
    """
    ranks = Ranks.meet(process_group, timeout_s=timeout_s)
    try:
        refuse_together(process_group, root, why_no_root(root))
        if ranks.count == 1:
            return None
        tuned_count = tuned_writer_count(process_group, root)
        require_same(process_group, root, "node_local", node_local)
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
        process_group: All ranks of this group make one, at the same time; None if this rank is alone.
        path: The root of this rank.
        own_root: Makes this rank's root and takes its lock.
        node_local: The option of `Checkpointer`, as are the next three.
        busy: …
        writers: …
        check_replicas: …
        timeout_s: The option `peer_timeout_s` of `Checkpointer`.

    Attributes:
        ranks: The ranks, connected; None if this one is alone.
        stores: What is known of the file systems that the ranks see.
        writers: The ranks that write what is cut, in order; with copies: for each rank, the writers of its store.
        newest_begun: The last step that the ranks have begun to save; None before the first.
        resumed: The last step that the ranks have loaded; before the first, the newest that the coordinator sees: the
            ranks may have saved it with another group. None if there is none.

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
        met = None if process_group is None else meet_ranks(process_group, path, busy, timeout_s, node_local)
        self.ranks: Ranks | None = None
        tuned_count = None
        if met is not None:
            self.ranks, tuned_count = met
        self._process_group = None if self.ranks is None else process_group
        self.stores = Stores(own_root, node_local)
        self.newest_begun: int | None = None
        self.resumed = None if self.ranks is None else self._newest_of_first(path)
        self._path = path
        self._wanted_writers = writers
        self._tuned_count = tuned_count
        self.writers: Sequence[int] | Mapping[int, Sequence[int]] = choose_writers(
            writers, [0] if self.ranks is None else self.ranks.nodes, tuned_count
        )
        self._check_replicas = check_replicas

    def _newest_of_first(self, path: str) -> int | None:
        def newest() -> int | None:
            try:
                return next(reversed(in_commit_order(read_commits(path))), None)
            except StorageError:  # a load or the first save says what is wrong
                return None

        try:
            return done_by_first(self._process_group, path, "looking at", newest)
        except BaseException as error:
            self.close(error)
            raise

    @property
    def process_group(self) -> ProcessGroup | None:
        """The group, for collectives; None if this rank is alone in it.

        Raises:
            ConfigError: The group was destroyed.
        """
        if self._process_group is not None:
            try:
                dist.get_rank(self._process_group)
            except ValueError as gone:
                raise ConfigError(
                    f"the process group of the Checkpointer of {self._path} is gone, and load(), delete() and "
                    "discard_after() need it: call them before destroy_process_group(), or call rebind() with a new "
                    "group, or with None to go on alone"
                ) from gone
        return self._process_group

    @property
    def rank(self) -> int:
        """This one; 0 if it is alone."""
        return 0 if self.ranks is None else self.ranks.rank

    def begin(self, subject: str) -> Session | None:
        """Begin a session of all ranks; None if this rank is alone.

        Args:
            subject: What the session is about, for messages.
        """
        return None if self.ranks is None else self.ranks.begin(subject)

    def needs_stores(self) -> bool:
        """Tell whether the ranks have to find out who shares a file system before they save; the same on all."""
        return self.ranks is not None and self.stores.node_local == "copies" and self.stores.first_ranks is None

    def find_stores(self, session: Session, step: int, next_number: Callable[[], int]) -> int:
        """Find out who shares a file system, and choose the writers of each; see `agree_on_stores`."""
        path = os.path.join(self._path, step_name(step))
        number = agree_on_stores(session, self.stores, path, next_number)
        first_ranks = self.stores.first_ranks or []
        self.writers = {}
        for first in sorted(set(first_ranks)):
            beside = [rank for rank, other in enumerate(first_ranks) if other == first]
            chosen = choose_writers(self._wanted_writers, [0] * len(beside), self._tuned_count)
            self.writers.update({rank: [beside[index] for index in chosen] for rank in beside})
        return number

    def to_save(self, session: Session, step: int) -> SaveGroup:
        """Return how the ranks save a step in a session."""
        self.newest_begun = step
        return SaveGroup(session, step_name(step), self.writers, self._check_replicas, stores=self.stores)

    def close(self, why: BaseException | None = None) -> None:
        """Close the connections; see `Ranks.close`."""
        if self.ranks is not None:
            self.ranks.close(why)
