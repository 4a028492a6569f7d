"""The messages of one save among the ranks: a `Session`, with the coordinator's calls and the followers'.

`coordination.Ranks` connects the ranks, begins sessions and passes each session its messages. This module does not
import `coordination`: what a session needs of the connected ranks is the protocol `Line`. In a session,

    followers → coordinator   tell(message)   … gather() returns one message of each rank
    coordinator → followers   answer(message), or answer_each(messages) … hear() returns it

These messages have a fixed order, and both sides follow it. Outside this order the coordinator, rank 0, *offers* one
thing: the directory where the ranks write files of their own. A follower that needs it calls offered(), which asks for
it. The coordinator answers at once, also while it writes. A save in which no follower asks sends no message for it.
docs/explanation/ranks.md shows all messages; `file_agreement`, `commit_agreement`, `node_local` and
`dcp.plan_agreement` define their contents.

A rank that fails notifies the coordinator, which at once tells all followers which rank failed. Their next call raises
`PeerError`. Calls wait for a late rank as long as it is alive: the log names it once a minute.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from fastpersist.distributed.connections.frames import ASK, FRAME_BYTES, MESSAGE_LIMIT_BYTES, OFFER
from fastpersist.distributed.connections.io_thread import Connections
from fastpersist.distributed.messages import Failure, named
from fastpersist.errors import CoordinationError, InternalError

__all__ = ["WAKE_S", "Line", "Session"]

_log = logging.getLogger("fastpersist")

WAKE_S = 0.45
"""A call that waits returns to Python at least this often."""

_TEXT_LIMIT = 2000  # characters of another rank's error
_LATE_S = 60.0  # how often the log names ranks that are waited for
_HELD_BYTES = 64 << 20  # of messages that no call has taken yet; then rank 0 has to wait


class Line(Protocol):
    """The connected ranks as a session uses them; `coordination.Ranks` is one.

    Attributes:
        rank: The rank of this process in the group.
        count: How many ranks there are.
        nodes: The number of the machine that each rank runs on.
        block_bytes: The unit in which data is cut among the ranks: every cut lies at a multiple of it.
        patience_s: How long a rank may be silent, while a call waits for it.
        connections: The connections of this rank; their lock guards what sessions and ranks share.
    """

    rank: int
    count: int
    nodes: tuple[int, ...]
    block_bytes: int
    patience_s: float
    connections: Connections

    def forget(self, session: Session) -> None:
        """Drop messages of a session that still arrive."""

    def have_told(self, session: Session, since_s: float) -> bool:
        """Tell whether each follower has said something in a session, or never will."""

    def send(self, session: Session, messages: Mapping[int, bytes], kind: int = ...) -> None:
        """Send a message to each of these ranks that is connected."""

    def give_up(self, session: Session, failure: Failure) -> None:
        """Make a session fail on all ranks."""


class Session:
    """The messages of one save among the ranks; `coordination.Ranks.begin` makes it.

    One thread at a time uses it. Each call waits for other ranks as long as they are alive, except `check`, `offer`,
    `announce`, `fail` and `finish`, which do not wait. Once a call has raised, this rank cannot use the session any
    more; it calls `fail`, which tells the other ranks what they do not know yet.

    Attributes:
        rank: The rank of this process in the group.
        count: How many ranks there are.
        nodes: The number of the machine that each rank runs on, 0 … by first appearance.
        block_bytes: The unit in which data is cut among the ranks: every cut lies at a multiple of it.
        subject: What is saved, for messages: "step 100", or a path.
        message_count: Messages that this rank has sent and received.
        message_bytes: The bytes of these messages, headers included.
        number: The number of this session among those of the group; for `Ranks`, as are the attributes below.
        failure: Why the session has failed; None if it has not.
        is_settled: Whether the loss of a rank can no longer make it fail: see `settle`.
        awaited: While a call waits, returns the ranks that it waits for.
    """

    def __init__(self, ranks: Line, number: int, subject: str) -> None:
        self.rank = ranks.rank
        self.count = ranks.count
        self.nodes = ranks.nodes
        self.block_bytes = ranks.block_bytes
        self.subject = subject
        self.message_count = 0
        self.message_bytes = 0
        self._ranks = ranks
        self.number = number
        self._inbox: list[deque[bytes]] = [deque() for _ in range(1 if ranks.rank else ranks.count)]  # by sender
        self._missing_count = ranks.count - 1  # of followers of which no message has arrived; on the coordinator
        self._offer: bytes | None = None
        self._askers: list[int] = []  # followers that asked before there was an offer; on the coordinator
        self._offered_to: set[int] = set()
        self.failure: Failure | None = None
        self.is_settled = False
        self.awaited: Callable[[], Sequence[int]] | None = None
        self._waits_since_s = math.inf  # for messages of others
        self._waiting: set[int] = set()  # ranks that wait for this one meanwhile
        self._is_over = False
        self._held_bytes = 0  # of the inbox of a follower

    def gather(self, own: bytes) -> list[bytes]:
        """Wait for the next message of each follower; on the coordinator.

        Args:
            own: The entry for this rank in the result.

        Returns:
            One message of each rank, by rank.

        Raises:
            PeerError: A rank has failed, or is gone.
            AgreementTimeoutError: A rank is silent.
            CoordinationError: The ranks were closed.
        """
        self._require_role(is_coordinator=True)
        ranks, since_s = self._ranks, time.monotonic()
        if self.count > 1:
            self._wait_to_hear(lambda: ranks.have_told(self, since_s), self.missing)
        self._raise_failure()
        return [own, *(self._next_of(rank) for rank in range(1, self.count))]

    def answer(self, message: bytes) -> None:
        """Send a message to all followers; on the coordinator.

        It does not raise failures of followers; `gather` and `check` do. For once the save is published, the last
        answer must reach all followers that are still connected.

        Raises:
            AgreementTimeoutError: A rank is silent.
            CoordinationError: The ranks were closed, or the message is too large.
        """
        self._require_role(is_coordinator=True)
        self._send(dict.fromkeys(range(1, self.count), message))

    def answer_some(self, ranks: Iterable[int], message: bytes) -> None:
        """Send a message to some of the followers; on the coordinator.

        Args:
            ranks: The ranks that get it.
            message: The message, the same for all of them.

        Raises:
            AgreementTimeoutError: A rank is silent.
            CoordinationError: The ranks were closed, or the message is too large.
        """
        self._require_role(is_coordinator=True)
        self._send(dict.fromkeys(ranks, message))

    def answer_each(self, messages: Sequence[bytes]) -> None:
        """Send each follower a message of its own; on the coordinator.

        Args:
            messages: The messages by rank; the one for the coordinator is not sent.

        Raises:
            AgreementTimeoutError: A rank is silent.
            CoordinationError: The ranks were closed, or a message is too large.
        """
        self._require_role(is_coordinator=True)
        if len(messages) != self.count:
            raise InternalError(f"there are {len(messages)} messages for {self.count} ranks")
        self._send(dict(enumerate(messages[1:], 1)))

    def tell(self, message: bytes) -> None:
        """Send a message to the coordinator; on a follower.

        Raises:
            PeerError: A rank has failed, or rank 0 is gone.
            AgreementTimeoutError: Rank 0 is silent.
            CoordinationError: The ranks were closed, or the message is too large.
        """
        self._require_role(is_coordinator=False)
        self._raise_failure()
        self._reach()
        if not self._send({0: message}):
            self._raise_failure()

    def hear(self) -> bytes:
        """Wait for the next answer of the coordinator; on a follower.

        Raises:
            PeerError: A rank has failed, or rank 0 is gone.
            AgreementTimeoutError: Rank 0 is silent; or rank 0 says that another rank is.
            CoordinationError: The ranks were closed.
        """
        self._require_role(is_coordinator=False)
        inbox = self._inbox[0]
        if not inbox and self.failure is None:
            self._reach()
        # Answers that the coordinator sent before a rank failed are still valid.
        self._wait_to_hear(lambda: bool(inbox) or self.failure is not None, lambda: [0])
        if not inbox:
            self._raise_failure()
        message = inbox.popleft()
        self._hold(-len(message))
        return message

    def offer(self, message: bytes) -> None:
        """Answer each follower that asks, now and later, with this; on the coordinator. Never blocks or raises."""
        self._require_role(is_coordinator=True)
        with self._ranks.connections.lock:
            self._offer = message
            askers, self._askers = self._askers, []
            self._tell_offer(askers)

    def announce(self) -> None:
        """Send the offer to all followers, before they ask; on the coordinator. Never blocks.

        Raises:
            CoordinationError: The ranks were closed.
        """
        self._require_role(is_coordinator=True)
        self._ranks.connections.refuse_closed()
        with self._ranks.connections.lock:
            self._tell_offer(range(1, self.count))

    def offered(self) -> bytes:
        """Wait for the coordinator's offer; on a follower.

        Raises:
            PeerError: A rank has failed, or rank 0 is gone.
            AgreementTimeoutError: Rank 0 is silent.
            CoordinationError: The ranks were closed.
        """
        self._require_role(is_coordinator=False)
        if self._offer is None:
            self._raise_failure()
            self._reach()
            self._ranks.send(self, {0: b""}, ASK)
        self._wait_to_hear(lambda: self._offer is not None or self.failure is not None, lambda: [0])
        self._raise_failure()
        if self._offer is None:
            raise InternalError("rank 0 has neither offered anything nor failed")
        return self._offer

    def check(self) -> None:
        """Raise if a rank is known to have failed, or to be gone. Never blocks.

        Raises:
            PeerError: A rank has failed, is gone, or was silent too long for rank 0.
            CoordinationError: The ranks were closed.
        """
        self._ranks.connections.refuse_closed()
        self._raise_failure()

    def next_arrived(self) -> tuple[int, bytes] | None:
        """Return the next message that has arrived, and whose it is; None if there is none. Never blocks.

        This includes messages in the kernel's buffers: if steps are shorter than a thread takes to wake, ranks agree
        sooner.
        """
        self._ranks.connections.catch_up()
        for rank, inbox in enumerate(self._inbox):
            if inbox:
                return rank, self._next_of(rank)
        return None

    def _next_of(self, rank: int) -> bytes:
        """Return the next message of a rank, which has arrived."""
        with self._ranks.connections.lock:  # else one that comes meanwhile could be counted twice
            inbox = self._inbox[rank]
            message = inbox.popleft()
            self._missing_count += bool(rank) and not inbox
            return message

    def listen(self, over: Callable[[], bool], limit_s: float | None) -> bool:
        """Wait until a function returns true, which is asked again whenever something may have arrived.

        Args:
            over: The function; it does not block.
            limit_s: Seconds; None for as long as a rank may be silent.

        Returns:
            Whether `over` did, in time.

        Raises:
            PeerError: A rank has failed, or is gone.
            CoordinationError: The ranks were closed.
        """
        ranks, since_s = self._ranks, time.monotonic()

        def is_over() -> bool:
            if not over() and self.rank == 0:
                ranks.have_told(self, since_s)  # notes a rank that has closed its connection, and is needed here
            return self.failure is not None or over()

        found = self._wait(is_over, list, ranks.patience_s if limit_s is None else limit_s)
        self._raise_failure()
        return found

    def settle(self) -> None:
        """Go on without the followers, which have sent all that the coordinator needs; call it before publishing.

        From now on a follower that is lost does not make this session fail, neither here nor on the other ranks.

        Raises:
            PeerError: A rank has failed before, or is gone.
            CoordinationError: The ranks were closed.
        """
        self._require_role(is_coordinator=True)
        with self._ranks.connections.lock:  # else the I/O thread could note a loss between the look and the mark
            self.check()
            self.is_settled = True

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one gives up; may be called again.

        Never raises. Takes less than a second, whatever the other ranks do. Does nothing after `finish`.
        """
        if self._is_over:
            return
        try:
            text = f"{type(error).__name__}: {error}"[:_TEXT_LIMIT]
            self._ranks.give_up(self, Failure(self.rank, "failed", text))
        except Exception:  # noqa: BLE001 - the caller's error matters more, and other ranks see that this one is gone
            _log.debug("telling the other ranks that %s failed", self.subject, exc_info=True)
        self.finish()

    def finish(self) -> None:
        """End the session on this rank: messages that still arrive are dropped."""
        self._is_over = True
        self._ranks.forget(self)
        self._hold(-self._held_bytes)

    # --- for `Ranks`, which holds the lock of the connections

    def has_all(self) -> bool:
        """Tell whether a message of each follower has arrived; asked again whenever anything arrives."""
        return not self._missing_count

    def lacks(self, rank: int) -> bool:
        """Tell whether no message of a rank has arrived."""
        return not self._inbox[rank]

    def missing(self) -> list[int]:
        """Return the followers of which no message has arrived."""
        return [rank for rank, inbox in enumerate(self._inbox) if rank and not inbox]

    def waits_for_one_that_waits(self, rank: int) -> bool:
        """Note that a rank waits for this one; tell whether both have waited for each other too long."""
        is_mutual = self.awaited is not None and (self.rank > 0 or self.lacks(rank))
        was_waiting = rank in self._waiting
        if is_mutual:
            self._waiting.add(rank)
        return is_mutual and was_waiting and time.monotonic() - self._waits_since_s >= self._ranks.patience_s

    def arrive(self, sender: int, kind: int, message: bytes) -> None:
        """Take a message of a rank."""
        self._waiting.discard(sender)
        self.count_message(FRAME_BYTES + len(message))
        if kind == OFFER:
            self._offer = message
        elif kind == ASK and self._offer is None:
            self._askers.append(sender)
        elif kind == ASK:
            self._tell_offer([sender])
        else:
            self._missing_count -= bool(sender) and not self._inbox[sender]
            self._inbox[sender].append(message)
            self._hold(len(message))

    def forget_offer(self, rank: int) -> None:
        """Note that a follower has a new connection: it asks again for an offer that it has not received."""
        self._offered_to.discard(rank)

    def count_message(self, size_bytes: int) -> None:
        """Count a message that was sent or received."""
        self.message_count += 1
        self.message_bytes += size_bytes

    # --- inside

    def _tell_offer(self, ranks: Iterable[int]) -> None:
        new = set(ranks).difference(self._offered_to).intersection(self._ranks.connections.ranks())
        if self._offer is not None and new:
            self._offered_to |= new
            self._ranks.send(self, dict.fromkeys(new, self._offer), OFFER)

    def _require_role(self, *, is_coordinator: bool) -> None:
        if is_coordinator != (self.rank == 0):
            role = "the coordinator" if is_coordinator else "followers"
            raise InternalError(f"rank {self.rank} makes a call that is for {role}")

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure.error(self.subject)

    def _hold(self, size_bytes: int) -> None:
        """Count held bytes; a follower stops reading while it holds too many: rank 0 may send a file of any length."""
        if self.rank:
            with self._ranks.connections.lock:
                was_full, self._held_bytes = self._held_bytes > _HELD_BYTES, self._held_bytes + size_bytes
                if was_full != (self._held_bytes > _HELD_BYTES):
                    self._ranks.connections.pause(not was_full)

    def _wait_to_hear(self, over: Callable[[], bool], awaited: Callable[[], Sequence[int]]) -> None:
        """Wait for messages of ranks; the session fails if one of them waits for this rank meanwhile."""
        self._waits_since_s = time.monotonic()
        self._waiting.clear()
        try:
            self._wait(over, awaited)
        finally:
            self._waits_since_s = math.inf

    def _wait(
        self, over: Callable[[], bool], awaited: Callable[[], Sequence[int]], limit_s: float | None = None
    ) -> bool:
        """Wait until `over` returns true, or the time is up; return whether `over` did.

        Args:
            over: Called whenever something has come, with the lock held; also returns true when the session has failed.
            awaited: Returns the ranks that have to do something. While this waits they are asked whether they are
                alive, and the session fails if one does not answer.
            limit_s: The most seconds to wait; None to wait as long as the awaited ranks are alive.
        """
        self.awaited = awaited
        try:
            return self._wait_long(over, awaited, limit_s)
        finally:
            self.awaited = None

    def _wait_long(self, over: Callable[[], bool], awaited: Callable[[], Sequence[int]], limit_s: float | None) -> bool:
        now_s = since_s = told_s = time.monotonic()
        left_s = WAKE_S if limit_s is None else limit_s
        while not self._ranks.connections.wait_until(over, max(0.0, min(WAKE_S, left_s))):
            now_s = time.monotonic()
            if limit_s is not None:
                left_s = since_s + limit_s - now_s
                if left_s <= 0:
                    return False
            elif now_s - told_s > _LATE_S and (late := awaited()):
                told_s = now_s
                _log.warning(
                    "%s: waiting for %s, alive and late by %.0f s so far", self.subject, named(late), now_s - since_s
                )
        return True

    def _send(self, messages: Mapping[int, bytes]) -> bool:
        """Send messages to connected ranks; wait until the kernel has taken them, or the save has failed.

        Returns:
            Whether it took them at once: later calls then find failures of the other ranks.
        """
        for message in messages.values():
            if len(message) > MESSAGE_LIMIT_BYTES:
                raise CoordinationError(
                    f"what rank {self.rank} has to say about {self.subject} is {len(message)} bytes long, and the "
                    f"limit is {MESSAGE_LIMIT_BYTES}; a smaller rank_state, or fewer tensors, helps"
                )
        ranks = self._ranks
        if self.count == 1:
            return True
        unsent = ranks.connections.unsent
        with ranks.connections.lock:
            ranks.send(self, messages)
            if not unsent():
                return True
        self._wait(lambda: self.failure is not None or not unsent(), unsent)
        return False

    def _reach(self) -> None:
        """Connect with the coordinator again if the connection was lost before this session."""
        end_s = time.monotonic() + self._ranks.patience_s
        while self.failure is None:
            try:
                self._ranks.connections.connect(WAKE_S)
                return
            except OSError as error:
                # The machine is there, and its kernel refuses: the coordinator does not listen any more.
                if isinstance(error, ConnectionRefusedError) or time.monotonic() >= end_s:
                    self._ranks.give_up(self, Failure(0, "gone", f"it cannot be reached ({error})"))
            self._wait(lambda: self.failure is not None, list, WAKE_S)
        self._raise_failure()
