"""What the ranks say to each other about one save; how they are connected is `coordination`'s affair.

In a session,

    followers → coordinator   tell(message)   … gather() returns one message of each rank
    coordinator → followers   answer(message), or answer_each(messages) … hear() returns it

These have an order, and both sides follow it. Beside that order the coordinator, rank 0, *offers* one thing: the place
where the ranks write files of their own. A follower that needs it calls offered(), which asks for it, and the
coordinator answers whenever it looks at its connections, so also while it writes. A save in which nobody asks costs no
message for it. docs/explanation/ranks.md shows all messages; their contents are in `file_agreement`,
`commit_agreement`, `node_local` and `dcp.plan_agreement`.

A rank that fails tells rank 0, which tells all others at once who it was: their next call raises `PeerError`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from fastpersist.distributed.connections import ASK, FRAME_BYTES, MESSAGE_LIMIT_BYTES, OFFER, Connections
from fastpersist.distributed.messages import Failure, named
from fastpersist.errors import CoordinationError, InternalError

__all__ = ["PULSE_THREAD", "WAKE_S", "Line", "Session"]

_log = logging.getLogger("fastpersist")

WAKE_S = 0.45
"""Each wait looks up as often."""

PULSE_THREAD = "fastpersist-pulse"
"""The name of the thread that tells the others that this rank works."""

_TEXT_LIMIT = 2000  # characters of another rank's error


class Line(Protocol):
    """How the ranks are connected, as `coordination.Ranks` knows it; what its sessions use is theirs alone.

    Attributes:
        rank: Of this process in the group.
        count: How many ranks there are.
        nodes: The number of the machine that each rank runs on.
        block_bytes: What is cut among the ranks is cut at multiples of it.
    """

    rank: int
    count: int
    nodes: tuple[int, ...]
    block_bytes: int
    _patience_s: float
    _connections: Connections

    def _forget(self, session: Session) -> None: ...

    def _have_told(self, session: Session, since_s: float) -> bool: ...

    def _pulse(self) -> None: ...

    def _pulse_interval_s(self) -> float: ...

    def _silent_since(self, ranks: Iterable[int]) -> float: ...

    def _send(self, session: Session, messages: Mapping[int, bytes], kind: int = ...) -> None: ...

    def _give_up(self, session: Session, failure: Failure) -> None: ...


class Session:
    """What the ranks say to each other about one save; `coordination.Ranks.begin` makes it.

    Used by one thread at a time. Each call waits for other ranks, up to the deadline, but `check`, `offer`, `announce`,
    `fail` and `finish`. Once a call has raised, the session is lost on this rank: `fail` tells the others what they do
    not know yet.

    Attributes:
        rank: Of this process in the group.
        count: How many ranks there are.
        nodes: The number of the machine that each rank runs on, 0 … by first appearance.
        block_bytes: What is cut among the ranks is cut at multiples of it.
        subject: What is saved, for messages: "step 100", or a path.
        poll: Called without arguments at least once a second while a call waits; None for nothing. What it raises is
            told to the other ranks and then raised.
        message_count: Messages that this rank has sent and got.
        message_bytes: Their bytes, headers included.
    """

    def __init__(self, ranks: Line, number: int, subject: str, poll: Callable[[], object] | None) -> None:
        self.rank = ranks.rank
        self.count = ranks.count
        self.nodes = ranks.nodes
        self.block_bytes = ranks.block_bytes
        self.subject = subject
        self.poll = poll
        self.message_count = 0
        self.message_bytes = 0
        self._ranks = ranks
        self._number = number
        self._inbox: list[deque[bytes]] = [deque() for _ in range(1 if ranks.rank else ranks.count)]  # by sender
        self._offer: bytes | None = None
        self._askers: list[int] = []  # who have asked for it before it was there; on rank 0
        self._offered_to: set[int] = set()
        self._failure: Failure | None = None
        self._settled = False
        self._is_over = False
        self._waits = False

    def gather(self, own: bytes) -> list[bytes]:
        """Wait for the next message of each other rank; on rank 0.

        Args:
            own: What this rank would say.

        Returns:
            One message of each rank, by rank.

        Raises:
            PeerError: A rank has failed, or is gone.
            AgreementTimeoutError: A rank was silent until the deadline.
            CoordinationError: The ranks were closed.
        """
        self._refuse_role(first=True)
        ranks, since_s = self._ranks, time.monotonic()
        if self.count > 1 and not self._wait(
            lambda: ranks._have_told(self, since_s),
            ranks._patience_s,
            lambda: ranks._silent_since(self._missing()),
        ):
            silent = self._missing()
            text = f"nothing came from {named(silent)} for {ranks._patience_s:g} s"
            longest = min(silent, key=lambda rank: ranks._silent_since([rank]))
            ranks._give_up(self, Failure(longest, "silent", text))
        self._raise_failure()
        return [own, *(inbox.popleft() for inbox in self._inbox[1:])]

    def answer(self, message: bytes) -> None:
        """Send a message to all other ranks; on rank 0.

        What is known of failures is for `gather` and `check` to raise: after the save is published, the last answer
        reaches those who are there.

        Raises:
            AgreementTimeoutError: A rank did not read until the deadline.
            CoordinationError: The ranks were closed, or the message is too large.
        """
        self._refuse_role(first=True)
        self._send(dict.fromkeys(range(1, self.count), message))

    def answer_some(self, ranks: Iterable[int], message: bytes) -> None:
        """Send a message to some of the other ranks; on rank 0.

        Args:
            ranks: Which.
            message: The same for all of them.

        Raises:
            AgreementTimeoutError: A rank did not read until the deadline.
            CoordinationError: The ranks were closed, or the message is too large.
        """
        self._refuse_role(first=True)
        self._send(dict.fromkeys(ranks, message))

    def answer_each(self, messages: Sequence[bytes]) -> None:
        """Send each other rank a message of its own; on rank 0.

        Args:
            messages: By rank; what stands there for this one is not sent.

        Raises:
            AgreementTimeoutError: A rank did not read until the deadline.
            CoordinationError: The ranks were closed, or a message is too large.
        """
        self._refuse_role(first=True)
        if len(messages) != self.count:
            raise InternalError(f"there are {len(messages)} messages for {self.count} ranks")
        self._send(dict(enumerate(messages[1:], 1)))

    def tell(self, message: bytes) -> None:
        """Send a message to rank 0; on the other ranks.

        Raises:
            PeerError: A rank has failed, or rank 0 is gone.
            AgreementTimeoutError: Rank 0 did not read until the deadline.
            CoordinationError: The ranks were closed, or the message is too large.
        """
        self._refuse_role(first=False)
        self._raise_failure()
        self._reach()
        self._send({0: message})
        self._raise_failure()

    def hear(self) -> bytes:
        """Wait for the next answer of rank 0; on the other ranks.

        Raises:
            PeerError: A rank has failed, or rank 0 is gone.
            AgreementTimeoutError: Rank 0 was silent until the deadline; or another rank was, says rank 0.
            CoordinationError: The ranks were closed.
        """
        self._refuse_role(first=False)
        inbox = self._inbox[0]
        if not inbox and self._failure is None:
            self._reach()
        # What rank 0 has answered before somebody failed is still true.
        ranks = self._ranks
        if not self._wait(
            lambda: bool(inbox) or self._failure is not None, ranks._patience_s, lambda: ranks._silent_since([0])
        ):
            ranks._give_up(self, self._silent_first())
        if not inbox:
            self._raise_failure()
        return inbox.popleft()

    def offer(self, message: bytes) -> None:
        """Have each other rank told this that asks for it; on rank 0. Never blocks, and raises nothing."""
        self._refuse_role(first=True)
        with self._ranks._connections.lock:
            self._offer = message
            askers, self._askers = self._askers, []
            self._tell_offer(askers)

    def announce(self) -> None:
        """Tell what is offered to those, too, who have not asked for it: they are going to. Never blocks.

        Raises:
            CoordinationError: The ranks were closed.
        """
        self._refuse_role(first=True)
        self._ranks._connections.look()
        with self._ranks._connections.lock:
            self._tell_offer(range(1, self.count))

    def offered(self) -> bytes:
        """Wait for what rank 0 offers; on the other ranks.

        Raises:
            PeerError: A rank has failed, or rank 0 is gone.
            AgreementTimeoutError: Rank 0 was silent until the deadline.
            CoordinationError: The ranks were closed.
        """
        self._refuse_role(first=False)
        ranks = self._ranks
        ranks._connections.look()
        if self._offer is None:
            self._raise_failure()
            self._reach()
            ranks._send(self, {0: b""}, ASK)
        if not self._wait(
            lambda: self._offer is not None or self._failure is not None,
            ranks._patience_s,
            lambda: ranks._silent_since([0]),
        ):
            ranks._give_up(self, self._silent_first())
        self._raise_failure()
        if self._offer is None:
            raise InternalError("rank 0 neither offers anything nor has it failed")
        return self._offer

    def check(self) -> None:
        """Raise if somebody is known to have failed, or to be gone. Never blocks.

        Who writes for long calls this often: it also tells the others that this rank is not silent.

        Raises:
            PeerError: A rank has failed, is gone, or was silent too long for rank 0.
            CoordinationError: The ranks were closed.
        """
        self._ranks._connections.look()
        self._raise_failure()
        self._ranks._pulse()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Let the others know, while the block runs, that this rank is alive: it may be in one system call for long.

        A sync of many gigabytes, or the rename that publishes, may take longer than the others wait for a silent rank.
        While the block waits for another rank, that one's silence counts, so this one is silent, too, unless it is
        the first.
        """
        over = threading.Event()
        thread = threading.Thread(target=self._pulse_until, args=(over,), name=PULSE_THREAD, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            yield
            return
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _pulse_until(self, over: threading.Event) -> None:
        while not over.wait(self._ranks._pulse_interval_s()):
            if self._is_over:
                return
            if not self._waits:
                self._ranks._pulse()

    def settle(self) -> None:
        """Go on without the others: they have said all that rank 0 needs. On rank 0, before it publishes.

        From now on a rank that is lost does not make this session fail, neither here nor on the other ranks.

        Raises:
            PeerError: A rank has failed before, or is gone.
            CoordinationError: The ranks were closed.
        """
        self._refuse_role(first=True)
        ranks = self._ranks
        with ranks._connections.lock:  # a loss that another thread notes between the look and the mark would undo it
            ranks._connections.look()
            self._raise_failure()
            self._settled = True
        ranks._pulse()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one gives up; may be called again.

        Never raises. Takes less than a second, whatever the others do. Does nothing after `finish`.
        """
        if self._is_over:
            return
        try:
            text = f"{type(error).__name__}: {error}"[:_TEXT_LIMIT]
            self._ranks._give_up(self, Failure(self.rank, "failed", text))
        except Exception:  # noqa: BLE001 - the caller's error matters more, and the others see that we are gone
            _log.debug("telling the other ranks that %s failed", self.subject, exc_info=True)
        self.finish()

    def finish(self) -> None:
        """All went well on this rank: what still comes of this session is dropped."""
        self._is_over = True
        self._ranks._forget(self)

    def _missing(self) -> list[int]:
        """Return the ranks of which no message is there."""
        return [rank for rank, inbox in enumerate(self._inbox) if rank and not inbox]

    def _arrive(self, sender: int, kind: int, message: bytes) -> None:
        """Take what a rank says; with the lock of the connections held."""
        self._count(FRAME_BYTES + len(message))
        if kind == OFFER:
            self._offer = message
        elif kind == ASK and self._offer is None:
            self._askers.append(sender)
        elif kind == ASK:
            self._tell_offer([sender])
        else:
            self._inbox[sender].append(message)

    def _tell_offer(self, ranks: Iterable[int]) -> None:
        new = set(ranks).difference(self._offered_to).intersection(self._ranks._connections.ranks())
        if self._offer is not None and new:
            self._offered_to |= new
            self._ranks._send(self, dict.fromkeys(new, self._offer), OFFER)

    def _count(self, size_bytes: int) -> None:
        self.message_count += 1
        self.message_bytes += size_bytes

    def _refuse_role(self, *, first: bool) -> None:
        if first != (self.rank == 0):
            raise InternalError(f"rank {self.rank} has {'' if first else 'no '}call of rank 0 to make")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.error(self.subject)

    def _silent_first(self) -> Failure:
        text = f"rank 0 was silent for {self._ranks._patience_s:g} s, says rank {self.rank},"
        return Failure(0, "silent", text)

    def _wait(self, over: Callable[[], bool], limit_s: float, silent_since: Callable[[], float] | None = None) -> bool:
        """Serve the connections until something is over; return whether it is, or only the time.

        With `silent_since` the time counts from then, if that is later than now.
        """
        self._waits = True
        try:
            return self._wait_long(over, limit_s, silent_since)
        finally:
            self._waits = False

    def _wait_long(self, over: Callable[[], bool], limit_s: float, silent_since: Callable[[], float] | None) -> bool:
        now_s = time.monotonic()
        end_s, poll_s = now_s + limit_s, now_s
        while not self._ranks._connections.serve_until(over, max(0.0, min(WAKE_S, end_s - now_s))):
            now_s = time.monotonic()
            if self.rank == 0:
                self._ranks._pulse()  # who waits for its verdict shall not take it for silent
            if self.poll is not None and now_s >= poll_s:
                poll_s = now_s + WAKE_S / 2
                try:
                    self.poll()
                except BaseException as error:
                    self.fail(error)
                    raise
            if now_s >= end_s:
                end_s = max(end_s, silent_since() + limit_s) if silent_since is not None else end_s
                if now_s >= end_s:
                    return False
                _log.warning(
                    "%s: the other ranks are alive, and said nothing for %g s; still waiting", self.subject, limit_s
                )
        return True

    def _send(self, messages: Mapping[int, bytes]) -> None:
        """Send messages to those who are connected; wait until the kernel has taken them, or the save has failed."""
        for message in messages.values():
            if len(message) > MESSAGE_LIMIT_BYTES:
                raise CoordinationError(
                    f"what rank {self.rank} has to say about {self.subject} is {len(message)} bytes long, and the "
                    f"limit is {MESSAGE_LIMIT_BYTES}; a smaller rank_state, or fewer tensors, helps"
                )
        ranks = self._ranks
        if self.count == 1:
            return
        ranks._send(self, messages)
        connections = ranks._connections
        if not self._wait(lambda: not connections.unsent() or self._failure is not None, ranks._patience_s):
            deaf = connections.unsent()
            text = f"{named(deaf)} did not read for {ranks._patience_s:g} s"
            ranks._give_up(self, Failure(deaf[0], "silent", text) if deaf and self.rank == 0 else self._silent_first())
            self._raise_failure()

    def _reach(self) -> None:
        """Make the connection to rank 0 anew if it was lost before this session."""
        end_s = time.monotonic() + self._ranks._patience_s
        while self._failure is None:
            try:
                self._ranks._connections.connect(WAKE_S)
                return
            except OSError as error:
                # The kernel of a machine that is there refuses: rank 0 does not listen any more.
                if isinstance(error, ConnectionRefusedError) or time.monotonic() >= end_s:
                    self._ranks._give_up(self, Failure(0, "gone", f"it cannot be reached ({error})"))
            self._wait(lambda: self._failure is not None, WAKE_S)
        self._raise_failure()
