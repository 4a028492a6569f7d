"""The ranks of a process group connect, begin sessions, and notify each other of failures: `Ranks`.

They communicate in the background of training, without collectives and without torch's Store. `connections` carries
frames on a separate thread, `sessions` has the messages of one session; this module imports both, and neither imports
it. The coordinator, rank 0, is connected with each follower. When a process dies, the kernel closes its connections, so
the other ranks know at once. `Ranks.meet` is the only collective.

While a call waits for a rank that has sent nothing lately, the I/O thread asks that rank whether it is alive (*pulse*);
the I/O thread there answers (*alive*), whatever its other threads do. So a late rank costs time, but the save succeeds.
A rank that does not answer is stopped, or its machine is: after `patience_s` its connection is closed as if it had
died. If two ranks wait for each other until then, they make different calls, and the save fails.

Each save has a *session*. All ranks begin their sessions in the same order, on the thread that calls save(), so a
number identifies a session. Ranks may be at different sessions: a message of a session that this rank has not begun is
kept, one of a session that is over is dropped.

A rank that fails notifies the coordinator, which notifies all followers. The coordinator acknowledges each failure that
a follower reports. An unacknowledged report may be lost with the connection, so the follower sends it again over the
next one. When a follower reconnects, the coordinator sends it all failures. A lost connection fails all sessions that
were begun and are not over; the follower connects again at once.

If a signal handler raises at the wrong moment in save(), no code holds the session any more, and it was not ended.
The rank finds that out when another one asks it for that session (pulse), and fails it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastpersist.config import BLOCK_BYTES, network
from fastpersist.distributed.connections.frames import (
    ALIVE,
    ASK,
    FAILED,
    FRAME_BYTES,
    KNOWN,
    MESSAGE,
    OFFER,
    PROTOCOL,
    PULSE,
    TOKEN_BYTES,
    frame,
)
from fastpersist.distributed.connections.io_thread import Connections
from fastpersist.distributed.messages import Failure, named
from fastpersist.distributed.partition import common_block_bytes
from fastpersist.distributed.peers import (
    hosts_of,
    is_dead,
    loopback_place,
    own_hosts,
    own_process,
    rank_in,
    refuse_other_versions,
)
from fastpersist.distributed.sessions import WAKE_S, Session
from fastpersist.errors import ConfigError, CoordinationError
from fastpersist.saving.directory_files import own_version
from fastpersist.transfer.arena import note_ranks_of_machine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Exchange", "Ranks"]

_log = logging.getLogger("fastpersist")

Exchange = Callable[[Any], Sequence[Any]]
"""A collective: given an object of this rank, returns one of each rank, by rank."""

_FAREWELL_S = 0.4  # how long fail() and close() wait for a rank that does not read
_RETURN_S = 10.0  # how long the coordinator waits for a follower whose connection was lost before the session
_PULSE_S = 15.0  # a rank that has sent nothing for this long is asked whether it is alive
_MEETING_S = 30.0
_WELCOME_S = 5.0  # how long an address has to answer before the next one is tried
_OLD_FAILURE_COUNT = 64


class Ranks:
    """The ranks of one process group, connected with each other; a `sessions.Line`. Thread-safe.

    `meet` makes it. Two objects of the same group are independent.

    Attributes:
        rank: The rank of this process in the group.
        count: How many ranks there are.
        nodes: The number of the machine that each rank runs on, 0 … by first appearance.
        block_bytes: The unit in which data is cut among the ranks: every cut lies at a multiple of it.
        patience_s: How long a rank may be silent, while a call waits for it.
        connections: The connections of this rank.
    """

    def __init__(
        self, rank: int, count: int, nodes: tuple[int, ...], timeout_s: float, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.rank = rank
        self.count = count
        self.nodes = nodes
        self.block_bytes = block_bytes
        # The coordinator gives up first, so that it can still tell the followers who was silent.
        self.patience_s = timeout_s if rank else timeout_s - min(5.0, timeout_s / 5)
        self._begun = 0
        self._unended: set[int] = set()  # sessions that this rank has begun, and neither finished nor failed
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self._early: dict[int, list[tuple[int, int, bytes]]] = {}  # messages of sessions that this rank has not begun
        self._failures: dict[int, Failure] = {}  # by session: begun or not, and of the last ones that are over
        self._absent: dict[int, tuple[Failure, bool]] = {}  # by rank with a lost connection; whether it said goodbye
        self._processes: list[Any] = [None] * count  # of the ranks on this machine
        self._heard_s: dict[int, float] = {}  # when each rank was last heard of
        self._unanswered: dict[int, int] = {}  # by rank, how many ticks ago it was asked whether it is alive
        self._untold: dict[int, Failure] = {}  # by session, failures that rank 0 has not acknowledged; on a follower
        self.connections = Connections(rank, count, self)

    @classmethod
    def meet(cls, process_group: ProcessGroup | None, *, timeout_s: float = 600.0) -> Ranks:
        """Connect the ranks of a process group; a collective, on the caller's thread.

        Args:
            process_group: A group with any backend that can gather objects; None for the default group.
            timeout_s: How long another rank may be silent (it is stopped) while this one waits for it; rank 0's counts.

        Raises:
            ConfigError: The versions of fastpersist do not fit, or this process is not in the group.
            CoordinationError: The ranks cannot reach each other; on all of them.
        """
        import torch
        import torch.distributed as dist

        rank, count = rank_in(process_group), dist.get_world_size(process_group)

        def exchange(own: Any) -> list[Any]:
            found: list[Any] = [None] * count
            dist.all_gather_object(found, own, group=process_group)
            return found

        versions = {"fastpersist": own_version(), "torch": str(torch.__version__)}
        ranks = cls.of(rank, count, exchange, timeout_s=timeout_s, versions=versions)
        note_ranks_of_machine(ranks.nodes.count(ranks.nodes[rank]))
        return ranks

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
            raise ConfigError(f"timeout_s must be above 0, not {timeout_s} s")
        if count == 1:
            return cls(0, 1, (0,), timeout_s)
        place = loopback_place()
        own = {"protocol": PROTOCOL, "versions": versions or {}, "timeout_s": timeout_s, "place": place}
        own["process"] = own_process()
        own["page_bytes"] = mmap.PAGESIZE
        told = exchange(own)
        refuse_other_versions(rank, told)
        machines = [one["place"][0] for one in told]
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        nodes = tuple(numbers[machine] for machine in machines)
        block_bytes = common_block_bytes(one["page_bytes"] for one in told)
        ranks = cls(rank, count, nodes, float(told[0]["timeout_s"]), block_bytes)
        ranks._processes = [tuple(one["process"]) if tuple(one["place"]) == place else None for one in told]
        try:
            ranks._meet(exchange, local=all(tuple(one["place"]) == place for one in told))
        except BaseException:
            ranks.close()
            raise
        return ranks

    def _meet(self, exchange: Exchange, *, local: bool) -> None:
        connections = self.connections
        offer: dict[str, Any] = {}
        if self.rank == 0:
            try:
                connections.token = secrets.token_bytes(TOKEN_BYTES)
                ports, interface = network()
                if local or not interface:
                    connections.listen(["127.0.0.1"] if local else own_hosts(), ports)
                else:
                    connections.listen(hosts_of(interface)[:1], ports, only_there=True)
                offer = {"token": connections.token, "addresses": connections.addresses}
            except (OSError, ConfigError) as error:
                offer = {"error": f"rank 0 cannot listen: {error}"}
        offer = exchange(offer)[0]
        if "error" in offer:
            raise CoordinationError(str(offer["error"]))
        connections.token, connections.addresses = offer["token"], list(offer["addresses"])
        failed = self._find_coordinator() if self.rank else self._welcome_all()
        failures = [one for one in exchange(failed) if one is not None]
        if failures:
            raise CoordinationError(
                f"the ranks cannot talk to each other: {failures[0]}. Every rank has to connect to a port of rank 0's "
                f"machine, which offers {offer.get('addresses')}; FASTPERSIST_PORTS and FASTPERSIST_INTERFACE choose it"
            )

    def _welcome_all(self) -> str | None:
        if self.connections.wait_until(lambda: len(self.connections.ranks()) == self.count - 1, _MEETING_S):
            return None
        missing = sorted(set(range(1, self.count)) - set(self.connections.ranks()))
        return f"{named(missing)} did not connect to rank 0 within {_MEETING_S:g} s"

    def _find_coordinator(self) -> str | None:
        """Find the address at which the coordinator can be reached, and connect; else return what failed."""
        offered = self.connections.addresses
        reason = "nowhere: it has only addresses of its own"
        end_s = time.monotonic() + _MEETING_S
        while offered and time.monotonic() < end_s:
            for address in offered:
                self.connections.addresses = [address]
                try:
                    self.connections.connect(_WELCOME_S)
                except OSError as error:
                    reason = f"{address}: {error}"
                    continue
                if self.connections.wait_welcome(end_s - time.monotonic() if len(offered) == 1 else _WELCOME_S):
                    return None
                reason = f"{address}: no rank answers there"
            time.sleep(WAKE_S)
        return f"rank {self.rank} cannot reach rank 0 at {reason}"

    def begin(self, subject: str) -> Session:
        """Begin the next session, in the same order on all ranks. Never blocks.

        Args:
            subject: What is saved, for messages: "step 100", or a path.

        Raises:
            CoordinationError: The ranks were closed, or belong to the process that this one was forked from.
        """
        with self.connections.lock:
            self.connections.take_connections()  # again, if this process had too many open files before
            self.connections.catch_up()  # a connection that is lost now was lost before this session
            self._unended.add(self._begun + 1)  # first: a signal handler may raise between any two of these lines
            self._begun += 1
            session = Session(self, self._begun, subject)
            session.failure = self._failures.get(self._begun)
            for early in self._early.pop(self._begun, []):
                session.arrive(*early)
            for old in (self._failures, self._untold):
                old.pop(self._begun - _OLD_FAILURE_COUNT, None)
            self._sessions[self._begun] = session
            return session

    def close(self, why: BaseException | None = None) -> None:
        """Say goodbye and close the connections; may be called again. Takes less than a second.

        Args:
            why: An error to tell the other ranks: sessions that are under way then fail there. This takes up to a
                second for each session. None: there is no error.
        """
        if why is not None:
            for session in list(self._sessions.values()):
                if not session.is_settled:
                    session.fail(why)
        self.connections.close("the connections to the other ranks are closed", _FAREWELL_S)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the object is half made, or the interpreter ends
            self.close()

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.count}>"

    # --- for sessions

    def forget(self, session: Session) -> None:
        """See `Line`; so do the methods below."""
        with self.connections.lock:
            self._sessions.pop(session.number, None)
            self._unended.discard(session.number)

    def have_told(self, session: Session, since_s: float) -> bool:
        """Tell whether each follower has sent something in a session, or never will."""
        for rank, (failure, is_final) in list(self._absent.items()):
            patience_s = min(_RETURN_S, self.patience_s)
            is_final = is_final or time.monotonic() - since_s > patience_s or is_dead(self._processes[rank])
            if is_final and session.lacks(rank):
                self._record(session.number, failure)
        return session.failure is not None or session.has_all()

    def send(self, session: Session, messages: Mapping[int, bytes], kind: int = MESSAGE) -> None:
        """Send a message to each of these ranks that is connected; ranks that get the same object share one frame."""
        with self.connections.lock:
            by_message: dict[int, list[int]] = {}
            for rank in self.connections.ranks():
                if rank in messages:
                    by_message.setdefault(id(messages[rank]), []).append(rank)
            for ranks in by_message.values():
                data = frame(kind, session.number, messages[ranks[0]])
                self.connections.send(data, ranks)
                for _ in ranks:
                    session.count_message(FRAME_BYTES + len(messages[ranks[0]]))

    def give_up(self, session: Session, failure: Failure) -> None:
        """Make a session fail on all ranks. Returns within a second."""
        connections, number = self.connections, session.number
        if session.failure is not None and number not in self._untold:
            return  # the other ranks know
        if self.rank:
            with contextlib.suppress(OSError):
                connections.connect(_FAREWELL_S)  # a new connection tells rank 0 what was not acknowledged
        with connections.lock:
            if session.failure is None:
                self._fail(session.number, failure)
                connections.changed.notify_all()
        connections.flush(_FAREWELL_S)

    # --- for connections, which hold their lock

    def connected(self) -> None:
        """Send again to the coordinator what may have been lost with an earlier connection."""
        self._absent.clear()
        for number, failure in self._untold.items():
            self.connections.send(failure.frame(number), [0])

    def greeted(self, rank: int) -> None:
        """Tell a follower that has connected again what it has missed."""
        self._absent.pop(rank, None)
        self._unanswered.pop(rank, None)
        for number, failure in self._failures.items():
            self.connections.send(failure.frame(number), [rank])
        for session in list(self._sessions.values()):
            session.forget_offer(rank)

    def took(self, rank: int, kind: int, number: int, payload: bytes) -> None:
        """Pass a message or a failure to its session."""
        self._heard_s[rank] = time.monotonic()
        self._unanswered.pop(rank, None)
        session = self._sessions.get(number)
        if kind == FAILED:
            culprit, how, text = json.loads(payload)
            self._record(number, Failure(culprit, how, text), rank)
            if self.rank == 0:
                self.connections.send(frame(KNOWN, number), [rank])
            self._untold.pop(number, None)
        elif kind == KNOWN:
            self._untold.pop(number, None)
        elif kind == PULSE:
            self.connections.send(frame(ALIVE), [rank])
            if session is None and number <= self._begun and number in self._unended:
                self._fail(number, Failure(self.rank, "failed", "its call was interrupted before it could tell why"))
            if session is not None and session.waits_for_one_that_waits(rank):
                follower = rank or self.rank
                text = f"rank {follower} and rank 0 waited for each other for {self.patience_s:g} s"
                self._fail(number, Failure(follower, "silent", text))
        elif kind in (MESSAGE, ASK, OFFER) and session is not None:
            session.arrive(rank, kind, payload)
        elif kind in (MESSAGE, ASK, OFFER) and number > self._begun:
            self._early.setdefault(number, []).append((rank, kind, payload))

    def lost(self, rank: int, why: str, said_goodbye: bool) -> None:
        """Make the sessions fail that were under way with a rank."""
        text = f"its connection was lost ({why}); it was killed, or its machine or the network is down"
        self._lose(rank, Failure(rank, "gone", "it has closed its connections" if said_goodbye else text), said_goodbye)

    def tick(self) -> float:
        """Ask ranks for which calls wait whether they are alive, and close the connections of those that are silent."""
        now_s, interval_s = time.monotonic(), self._pulse_interval_s()
        connected = set(self.connections.ranks())
        for session in list(self._sessions.values()):
            awaited = session.awaited() if session.awaited is not None and session.failure is None else ()
            asked = [rank for rank in awaited if rank in connected and rank not in self._unanswered]
            asked = [rank for rank in asked if now_s - self._heard_s.get(rank, 0.0) >= interval_s]
            self.connections.send(frame(PULSE, session.number), asked)
            self._unanswered.update(dict.fromkeys(asked, 0))
        # Ticks are counted, not the time: after a stop of this process, it first reads what has arrived meanwhile.
        for rank in self._unanswered:
            self._unanswered[rank] += 1
        silent = [rank for rank, ticks in self._unanswered.items() if ticks * interval_s > self.patience_s]
        if silent:
            text = f"nothing came from {named(silent)} for {self.patience_s:g} s"
            for rank in silent:
                failure = Failure(rank, "silent", text if self.rank == 0 else f"{text}, says rank {self.rank},")
                for session in list(self._sessions.values()):
                    if self.rank == 0 and session.failure is None and not session.is_settled:
                        self.connections.send(failure.frame(session.number), [rank])  # it is read when that goes on
                self.connections.drop(rank)
                self._lose(rank, failure)
        return interval_s

    def _pulse_interval_s(self) -> float:
        return min(_PULSE_S, self.patience_s / 5)

    def _lose(self, rank: int, failure: Failure, said_goodbye: bool = False) -> None:
        self._absent[rank] = (failure, said_goodbye)
        self._unanswered.pop(rank, None)
        if said_goodbye and self.rank == 0:
            return  # its last messages may be here already
        for number, session in list(self._sessions.items()):
            if session.failure is None:
                if self.rank:
                    self._untold[number] = Failure(self.rank, "gone", "it had lost its connection to rank 0")
                self._record(number, failure, rank)

    def _fail(self, number: int, failure: Failure) -> None:
        """Note the failure of a session that this rank has found out, and tell the others."""
        self._record(number, failure)
        if self.rank:
            self._untold[number] = failure
            self.connections.send(failure.frame(number), [0])

    def _record(self, number: int, failure: Failure, told_by: int = 0) -> None:
        """Note the first failure of a session; the coordinator passes it on."""
        session = self._sessions.get(number)
        is_over = session is None and number <= self._begun and number not in self._unended
        if is_over or number in self._failures:
            return
        if session is not None and session.is_settled and told_by:
            return
        self._failures[number] = failure
        self._unended.discard(number)
        if session is not None:
            session.failure = session.failure or failure
        if self.rank == 0:
            followers = [rank for rank in self.connections.ranks() if rank != told_by]
            self.connections.send(failure.frame(number), followers)
