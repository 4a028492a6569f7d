"""The ranks of a process group talk about their saves, beside training, without collectives and without torch's Store.

Rank 0 and each other rank are connected (`connections`). When a process dies, the kernel closes its connections, so
the others know at once. `Ranks.meet` is the only collective; after it, no call waits longer than half a second without
looking at `Session.poll`.

What is said belongs to a *session*, one for each save. All ranks begin their sessions in the same order, on the
thread that calls save(), so a number is enough to tell which. They may be at different ones: what comes of a session
that this rank has not begun is kept, what comes of one that is over is dropped. In a session,

    others → first   tell(message)   … gather() returns one message of each rank
    first → others   answer(message), or answer_each(messages) … hear() returns it

A rank that fails tells rank 0, which tells all others at once who it was: their next call raises `PeerError`. A
connection that is lost is a failure of all sessions that were begun and are not over; those that are begun later make
the connection anew. What the messages mean is `sharing`'s affair.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastpersist.connections import (
    FAILED,
    HEADER_BYTES,
    MESSAGE,
    MESSAGE_LIMIT_BYTES,
    PROTOCOL,
    PULSE,
    TOKEN_BYTES,
    Connections,
    frame,
)
from fastpersist.errors import ConfigError, CoordinationError, InternalError
from fastpersist.failing import Failure, named
from fastpersist.meeting import is_dead, loopback_place, own_hosts, own_process, own_version, refuse_other_versions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Exchange", "Ranks", "Session"]

_log = logging.getLogger("fastpersist")

Exchange = Callable[[Any], Sequence[Any]]
"""A collective: given an object of this rank, returns one of each rank, by rank."""

_TEXT_LIMIT = 2000  # characters of another rank's error
_WAKE_S = 0.45  # each wait looks up as often
_FAREWELL_S = 0.4  # so long fail() and close() wait for a peer that does not read
_RETURN_S = 10.0  # so long rank 0 waits for a rank whose connection was lost before the session
_PULSE_S = 15.0  # a rank that writes for long says so as often
_MEETING_S = 30.0
_WELCOME_S = 5.0  # then the next address is tried
_OLD_FAILURE_COUNT = 64


class Session:
    """What the ranks say to each other about one save; `Ranks.begin` makes it.

    Used by one thread at a time. Each call but `check`, `fail` and `finish` waits for other ranks, up to the deadline.
    Once a call has raised, the session is lost on this rank: `fail` tells the others what they do not know yet.

    Attributes:
        rank: Of this process in the group.
        count: How many ranks there are.
        nodes: The number of the machine that each rank runs on, 0 … by first appearance.
        subject: What is saved, for messages: "step 100", or a path.
        poll: Called without arguments at least once a second while a call waits; None for nothing. What it raises is
            told to the other ranks and then raised.
        message_count: Messages that this rank has sent and got.
        message_bytes: Their bytes, headers included.
    """

    def __init__(self, ranks: Ranks, number: int, subject: str, poll: Callable[[], object] | None) -> None:
        self.rank = ranks.rank
        self.count = ranks.count
        self.nodes = ranks.nodes
        self.subject = subject
        self.poll = poll
        self.message_count = 0
        self.message_bytes = 0
        self._ranks = ranks
        self._number = number
        self._inbox: list[deque[bytes]] = [deque() for _ in range(1 if ranks.rank else ranks.count)]  # by sender
        self._failure: Failure | None = None
        self._settled = False
        self._is_over = False

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

    def settle(self) -> None:
        """Go on without the others: they have said all that rank 0 needs. On rank 0, before it publishes.

        From now on a rank that is lost does not make this session fail, neither here nor on the other ranks.

        Raises:
            PeerError: A rank has failed before, or is gone.
            CoordinationError: The ranks were closed.
        """
        self._refuse_role(first=True)
        self.check()
        self._settled = True

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

    def _arrive(self, sender: int, message: bytes) -> None:
        self._inbox[sender].append(message)
        self._count(HEADER_BYTES + len(message))

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
        now_s = time.monotonic()
        end_s, poll_s = now_s + limit_s, now_s
        while not self._ranks._connections.serve_until(over, max(0.0, min(_WAKE_S, end_s - now_s))):
            now_s = time.monotonic()
            if self.rank == 0:
                self._ranks._pulse()  # who waits for its verdict shall not take it for silent
            if self.poll is not None and now_s >= poll_s:
                poll_s = now_s + _WAKE_S / 2
                try:
                    self.poll()
                except BaseException as error:
                    self.fail(error)
                    raise
            if now_s >= end_s:
                end_s = max(end_s, silent_since() + limit_s) if silent_since is not None else end_s
                if now_s >= end_s:
                    return False
        return True

    def _send(self, messages: Mapping[int, bytes]) -> None:
        """Send messages to those whom this rank is connected with, and wait until the kernel has taken them."""
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
        if not self._wait(lambda: not connections.unsent() or bool(self.rank and self._failure), ranks._patience_s):
            deaf = connections.unsent()
            text = f"{named(deaf)} did not read for {ranks._patience_s:g} s"
            ranks._give_up(self, Failure(deaf[0], "silent", text) if deaf and self.rank == 0 else self._silent_first())
            self._raise_failure()

    def _reach(self) -> None:
        """Make the connection to rank 0 anew if it was lost before this session."""
        end_s = time.monotonic() + self._ranks._patience_s
        while self._failure is None:
            try:
                self._ranks._connections.connect(_WAKE_S)
                return
            except OSError as error:
                # The kernel of a machine that is there refuses: rank 0 does not listen any more.
                if isinstance(error, ConnectionRefusedError) or time.monotonic() >= end_s:
                    self._ranks._give_up(self, Failure(0, "gone", f"it cannot be reached ({error})"))
            self._wait(lambda: self._failure is not None, _WAKE_S)
        self._raise_failure()


# ------------------------------------------------------------------------------------------- all ranks


class Ranks:
    """The ranks of one process group, connected with each other. Thread-safe.

    `meet` makes it. Two of the same group do not know of each other.

    Attributes:
        rank: Of this process in the group.
        count: How many ranks there are.
        nodes: The number of the machine that each rank runs on, 0 … by first appearance.
    """

    def __init__(self, rank: int, count: int, nodes: tuple[int, ...], timeout_s: float) -> None:
        self.rank = rank
        self.count = count
        self.nodes = nodes
        self._patience_s = timeout_s if rank else timeout_s - min(5.0, timeout_s / 5)  # the others hear who was silent
        self._begun = 0
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self._early: dict[int, list[tuple[int, bytes]]] = {}  # of sessions that are not begun here
        self._failures: dict[int, Failure] = {}  # by session: of those that are not begun here, and of old ones too
        self._absent: dict[int, tuple[Failure, bool]] = {}  # lost connections, and whether for good
        self._processes: list[Any] = [None] * count  # of the ranks on this machine
        self._heard_s: dict[int, float] = {}  # when each rank was last heard of
        self._pulsed_s = 0.0
        self._broken: list[int] = []  # sessions that were lost with the connection, to be told when there is a new one
        self._connections = Connections(rank, count, self)

    @classmethod
    def meet(cls, process_group: ProcessGroup | None, *, timeout_s: float = 600.0) -> Ranks:
        """Connect the ranks of a process group; a collective, on the caller's thread.

        Args:
            process_group: Any backend that can gather objects; None for the default group.
            timeout_s: So long may another rank be silent while this one waits for it; rank 0's counts.

        Raises:
            ConfigError: The versions of fastpersist do not fit, or this process is not in the group.
            CoordinationError: The ranks cannot reach each other; on all of them.
        """
        import torch
        import torch.distributed as dist

        rank, count = dist.get_rank(process_group), dist.get_world_size(process_group)
        if rank < 0:
            raise ConfigError("this process is not a rank of the process group that it wants to save with")

        def exchange(own: Any) -> list[Any]:
            found: list[Any] = [None] * count
            dist.all_gather_object(found, own, group=process_group)
            return found

        versions = {"fastpersist": own_version(), "torch": str(torch.__version__)}
        return cls.of(rank, count, exchange, timeout_s=timeout_s, versions=versions)

    @classmethod
    def of(
        cls,
        rank: int,
        count: int,
        exchange: Exchange,
        *,
        timeout_s: float = 600.0,
        versions: dict[str, str] | None = None,
    ) -> Ranks:
        """Connect the ranks by means of any collective; otherwise as `meet`."""
        if not timeout_s > 0:
            raise ConfigError(f"ranks need some time to answer, not {timeout_s} s")
        if count == 1:
            return cls(0, 1, (0,), timeout_s)
        place = loopback_place()
        own = {"protocol": PROTOCOL, "versions": versions or {}, "timeout_s": timeout_s, "place": place}
        own["process"] = own_process()
        told = exchange(own)
        refuse_other_versions(rank, told)
        machines = [one["place"][0] for one in told]
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        ranks = cls(rank, count, tuple(numbers[machine] for machine in machines), float(told[0]["timeout_s"]))
        ranks._processes = [tuple(one["process"]) if tuple(one["place"]) == place else None for one in told]
        try:
            ranks._meet(exchange, local=all(tuple(one["place"]) == place for one in told))
        except BaseException:
            ranks.close()
            raise
        return ranks

    def _meet(self, exchange: Exchange, *, local: bool) -> None:
        connections = self._connections
        offer: dict[str, Any] = {}
        if self.rank == 0:
            try:
                connections.token = secrets.token_bytes(TOKEN_BYTES)
                connections.listen(["127.0.0.1"] if local else own_hosts())
                offer = {"token": connections.token, "addresses": connections.addresses}
            except OSError as error:
                offer = {"error": f"rank 0 cannot listen: {error}"}
        offer = exchange(offer)[0]
        failed = offer.get("error")
        if failed is None:
            connections.token, connections.addresses = offer["token"], list(offer["addresses"])
            failed = self._find_first() if self.rank else self._welcome_all()
        failures = [one for one in exchange(failed) if one is not None]
        if failures:
            raise CoordinationError(
                f"the ranks cannot talk to each other: {failures[0]}. Every rank has to connect to a port that the "
                f"kernel picks on rank 0's machine, which offers {offer.get('addresses')}"
            )

    def _welcome_all(self) -> str | None:
        end_s = time.monotonic() + _MEETING_S
        while not self._connections.serve_until(lambda: len(self._connections.ranks()) == self.count - 1, _WAKE_S):
            if time.monotonic() >= end_s:
                missing = sorted(set(range(1, self.count)) - set(self._connections.ranks()))
                return f"{named(missing)} did not connect to rank 0 within {_MEETING_S:g} s"
        return None

    def _find_first(self) -> str | None:
        """Find the address at which rank 0 can be reached, and connect."""
        offered = self._connections.addresses
        reason = "nowhere: it has only addresses of its own"
        end_s = time.monotonic() + _MEETING_S
        while offered and time.monotonic() < end_s:
            for address in offered:
                self._connections.addresses = [address]
                try:
                    self._connections.connect(_WELCOME_S)
                except OSError as error:
                    reason = f"{address}: {error}"
                    continue
                if self._connections.wait_welcome(end_s if len(offered) == 1 else time.monotonic() + _WELCOME_S):
                    return None
                reason = f"{address}: nobody answers there, or somebody else"
            time.sleep(_WAKE_S)
        return f"rank {self.rank} cannot reach rank 0 at {reason}"

    def begin(self, subject: str, *, poll: Callable[[], object] | None = None) -> Session:
        """Begin the next session, in the same order on all ranks. Never blocks.

        Args:
            subject: What is saved, for messages: "step 100", or a path.
            poll: See `Session`.

        Raises:
            CoordinationError: The ranks were closed, or belong to the process that this one was forked from.
        """
        with self._connections.lock:
            self._connections.take_connections()  # if there were too many descriptors, there may be less now
            self._connections.look()  # a connection that was lost by now was lost outside this session
            self._begun += 1
            session = Session(self, self._begun, subject, poll)
            session._failure = self._failures.get(self._begun)
            for sender, message in self._early.pop(self._begun, []):
                session._arrive(sender, message)
            self._failures.pop(self._begun - _OLD_FAILURE_COUNT, None)
            self._sessions[self._begun] = session
            return session

    def close(self) -> None:
        """Say goodbye and close the connections; may be called again. Takes less than a second."""
        self._connections.close("the connections to the other ranks are closed", _FAREWELL_S)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # of a half-made object, or while the interpreter ends
            self.close()

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.count}>"

    # --- for sessions

    def _forget(self, session: Session) -> None:
        with self._connections.lock:
            self._sessions.pop(session._number, None)

    def _have_told(self, session: Session, since_s: float) -> bool:
        """Tell whether a message of each other rank is there, or one never will be."""
        for rank, (failure, is_final) in list(self._absent.items()):
            patience_s = min(_RETURN_S, self._patience_s)
            is_final = is_final or time.monotonic() - since_s > patience_s or is_dead(self._processes[rank])
            if is_final and not session._inbox[rank]:
                self._record(session._number, failure)
        return session._failure is not None or all(session._inbox[1:])

    def _pulse(self) -> None:
        """Let the others know that this rank is alive and at work, when it has not lately."""
        now_s = time.monotonic()
        if now_s - self._pulsed_s > min(_PULSE_S, self._patience_s / 5):
            self._pulsed_s = now_s
            self._connections.send(frame(PULSE, 0, b""), self._connections.ranks())

    def _silent_since(self, ranks: Iterable[int]) -> float:
        """Return since when the one of these ranks that was last heard of longest ago has been silent."""
        return min((self._heard_s.get(rank, 0.0) for rank in ranks), default=0.0)

    def _send(self, session: Session, messages: Mapping[int, bytes]) -> None:
        """Send messages to those of these ranks that this one is connected with; one frame where all get the same."""
        with self._connections.lock:
            by_message: dict[int, list[int]] = {}
            for rank in self._connections.ranks():
                if rank in messages:
                    by_message.setdefault(id(messages[rank]), []).append(rank)
            for ranks in by_message.values():
                data = frame(MESSAGE, session._number, messages[ranks[0]])
                self._connections.send(data, ranks)
                for _ in ranks:
                    session._count(len(data))

    def _give_up(self, session: Session, failure: Failure) -> None:
        """Have a session fail, here and on all other ranks. Returns within a second."""
        connections, number = self._connections, session._number
        if session._failure is not None and number not in self._broken:
            return  # the others know
        if self.rank:
            with contextlib.suppress(OSError):
                connections.connect(_FAREWELL_S)  # its hello tells what broke with the connection
        with connections.lock:
            if session._failure is None:
                self._record(number, failure)
                session._failure = failure
                if self.rank:
                    connections.send(failure.frame(number), [0])
        connections.flush(_FAREWELL_S)

    # --- for connections, which hold their lock

    def hello(self) -> object:
        """Return the sessions that were lost with an earlier connection."""
        self._absent.clear()
        broken, self._broken = self._broken, []
        return broken

    def greeted(self, rank: int, said: Any) -> None:
        """Tell a rank that is back what it has missed, and believe what it says about its sessions."""
        self._absent.pop(rank, None)
        for number, failure in self._failures.items():
            self._connections.send(failure.frame(number), [rank])
        for number in said:
            self._record(number, Failure(rank, "gone", "it had lost its connection to rank 0"), rank)

    def took(self, rank: int, kind: int, number: int, payload: bytes) -> None:
        """Sort a message or a failure to its session."""
        self._heard_s[rank] = time.monotonic()
        session = self._sessions.get(number)
        if kind == FAILED:
            culprit, how, text = json.loads(payload)
            self._record(number, Failure(culprit, how, text), rank)
        elif kind == MESSAGE and session is not None:
            session._arrive(rank, payload)
        elif kind == MESSAGE and number > self._begun:
            self._early.setdefault(number, []).append((rank, payload))

    def lost(self, rank: int, why: str, said_goodbye: bool) -> None:
        """Have the sessions fail that were under way with a rank."""
        text = f"its connection was lost ({why}); it was killed, or its machine or the network is down"
        failure = Failure(rank, "gone", "it has closed, and takes no more part" if said_goodbye else text)
        self._absent[rank] = (failure, said_goodbye)
        if said_goodbye and self.rank == 0:
            return  # all that it had to say may be here
        for number, session in list(self._sessions.items()):
            if session._failure is None:
                if self.rank:
                    self._broken.append(number)
                self._record(number, failure, rank)

    def _record(self, number: int, failure: Failure, told_by: int = 0) -> None:
        """Note that a session has come to nothing, the first time; rank 0 passes it on."""
        session = self._sessions.get(number)
        if number in self._failures or (session is None and number <= self._begun):
            return
        if session is not None and session._settled and told_by:
            return
        self._failures[number] = failure
        if session is not None:
            session._failure = session._failure or failure
        if self.rank == 0:
            others = [rank for rank in self._connections.ranks() if rank != told_by]
            self._connections.send(failure.frame(number), others)
