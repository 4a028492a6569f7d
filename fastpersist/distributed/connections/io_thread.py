"""The connections of a rank, and the I/O thread that serves them: `Connections`.

The coordinator, rank 0, listens on a TCP port; each follower keeps one connection to it. One thread of each rank, the
*I/O thread*, serves its connections from the first one until they are closed: it accepts connections, reads frames,
sends bytes that the kernel did not take before, and passes received frames to the owner. All other threads only queue
frames, which never blocks, and wait on a condition variable.

`frames` defines the frames, `connection` is one connection; `coordination` and `sessions` interpret the content of
frames.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from fastpersist.distributed.connections.connection import (
    NO_MESSAGE,
    SILENT_MACHINE_S,
    Connection,
    Refused,
    close_inherited,
    close_socket,
    connection_over,
    keep_from_children,
)
from fastpersist.distributed.connections.frames import GOODBYE, digest_of, frame
from fastpersist.distributed.peers import listening_socket, require_descriptors
from fastpersist.errors import CoordinationError

__all__ = ["IO_THREAD", "Connections", "Owner"]

_log = logging.getLogger("fastpersist")

IO_THREAD = "fastpersist-ranks"
"""The name of the thread that serves the connections of a rank."""

_STRANGER_S = 10.0  # how long a connection may take to prove that it is a rank's
_STRANGER_COUNT = 64  # the most connections that have not proven it yet
_CONNECT_S = 0.45  # how long the I/O thread tries to connect again
_RETURN_S = 1.0  # from one try to the next
_JOIN_S = 2.0  # how long close() waits for the I/O thread


class Owner(Protocol):
    """Gets calls when something happens on the connections, with their lock held, on the I/O thread."""

    def connected(self) -> None:
        """This follower has connected, for the first time or again."""

    def greeted(self, rank: int) -> None:
        """A follower has connected with this coordinator, for the first time or again."""

    def took(self, rank: int, kind: int, number: int, payload: bytes) -> None:
        """A frame of a rank has arrived. Raises ValueError or TypeError if it makes no sense."""

    def lost(self, rank: int, why: str, said_goodbye: bool) -> None:
        """The connection with a rank has ended."""

    def tick(self) -> float:
        """Some time has passed. Returns in how many seconds the next call is due."""


_Event = tuple[selectors.SelectorKey, int]
_all_connections: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connections:
    """The connections of one rank: the coordinator's with all followers, or a follower's with the coordinator.

    Args:
        rank: The rank of this process.
        count: How many ranks there are.
        owner: The object that is told what happens.

    Attributes:
        lock: Held while connections are served, never while a thread waits; re-entrant, as a signal handler may save.
        changed: A condition with that lock: something has come, or the connections are closed.
        token: The token of the group; set before the first connection.
        addresses: Hosts and ports of rank 0; the first is used.

    Thread safety: any thread.
    """

    def __init__(self, rank: int, count: int, owner: Owner) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.token = b""
        self.addresses: list[tuple[str, int]] = []
        self._rank = rank
        self._count = count
        self._owner = weakref.proxy(owner)
        self._connecting = threading.RLock()
        self._why_closed = ""
        self._by_rank: dict[int, Connection] = {}
        self._strangers: list[Connection] = []
        self._listener: socket.socket | None = None
        self._is_listening = False
        self._is_paused = False
        self._return_s = math.inf  # when this follower, which has lost its connection, tries to connect again
        self._returned_s = 0.0  # when it has tried last
        self._tick_s = 0.0  # when the next one is due
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._wake_fd = -1  # readable when the I/O thread is to end

    def listen(self, hosts: list[str], ports: Iterable[int] = (0,), *, only_there: bool = False) -> None:
        """Listen for followers; on the coordinator.

        Args:
            hosts: Addresses at which followers may connect; ["127.0.0.1"] if they are all on this machine.
            ports: The first of these that is free is taken; 0 for one that the kernel picks.
            only_there: Listen at the first of `hosts` alone.

        Raises:
            OSError: It cannot listen, or this process may not have so many open files.
        """
        require_descriptors(self._count)
        own = hosts[0] if only_there or hosts == ["127.0.0.1"] else ""
        both = not own and socket.has_dualstack_ipv6()
        self._listener = listening_socket(own, both, ports, self._count + _STRANGER_COUNT)
        self._listener.setblocking(False)
        keep_from_children(self._listener)
        self._start()
        self.take_connections()
        port = self._listener.getsockname()[1]
        self.addresses = [(host, port) for host in hosts]

    def take_connections(self, on: bool = True) -> None:
        """Start or stop to accept connections; on the coordinator."""
        if self._listener is not None and self._selector is not None and self._is_listening != on:
            self._is_listening = on
            if on:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def connect(self, limit_s: float) -> None:
        """Connect with the coordinator, unless this follower is connected already.

        Raises:
            OSError: The coordinator cannot be reached. ConnectionRefusedError: no process listens there.
        """
        with self._connecting:
            if 0 in self._by_rank:
                return
            made = socket.create_connection(self.addresses[0], timeout=limit_s)
            connection = connection_over(made, self.token, self._rank)
            with self.lock:
                if self._why_closed:
                    close_socket(made)
                    return
                self._start()
                self._return_s, self._is_paused = math.inf, False
                self._by_rank[0] = connection
                self._watch(connection)
                self._owner.connected()

    def wait_welcome(self, limit_s: float) -> bool:
        """Wait until rank 0 has proven itself; return whether it has. If not, close the connection."""
        connection = self._by_rank.get(0)
        if connection is None:
            return False
        self.wait_until(lambda: connection.is_proven or not connection.is_open(), limit_s)
        with self.lock:
            if not connection.is_proven:
                self._drop(connection)
        return connection.is_proven and connection.is_open()

    def ranks(self) -> list[int]:
        """Return the ranks with which this one is connected."""
        with self.lock:
            return list(self._by_rank)

    def unsent(self) -> list[int]:
        """Return the ranks that have not read all that was sent to them."""
        with self.lock:
            return [rank for rank, connection in self._by_rank.items() if connection.unsent]

    def send(self, data: bytes, ranks: Iterable[int]) -> None:
        """Send a frame to those of these ranks that are connected."""
        digest = digest_of(data)
        with self.lock:
            for rank in ranks:
                if rank in self._by_rank:
                    self._by_rank[rank].send(data, digest)
                    self._watch(self._by_rank[rank])

    def catch_up(self) -> None:
        """Serve the connections that are ready, here and now. Never blocks.

        Raises:
            CoordinationError: The connections are closed.
        """
        with self.lock:
            self.refuse_closed()
            if self._selector is not None:
                self._serve(self._selector.select(0))

    def wait_until(self, over: Callable[[], bool], limit_s: float) -> bool:
        """Wait until a function returns true; it is called whenever something has arrived. Return its last result.

        Raises:
            CoordinationError: The connections are closed.
        """
        with self.lock:
            self.refuse_closed()
            if self.changed.wait_for(lambda: over() or self.is_closed(), limit_s) and not over():
                self.refuse_closed()
            return over()

    def is_closed(self) -> bool:
        """Tell whether the connections are closed, or were closed in this process by fork()."""
        return bool(self._why_closed)

    def refuse_closed(self) -> None:
        """Raise if the connections are closed.

        Raises:
            CoordinationError: They are closed.
        """
        if self._why_closed:
            raise CoordinationError(self._why_closed)

    def drop(self, rank: int) -> None:
        """Close the connection with a rank; its owner is not told."""
        with self.lock:
            if rank in self._by_rank:
                self._drop(self._by_rank[rank])
                self._return_soon()

    def pause(self, on: bool = True) -> None:
        """Stop reading from rank 0 while too many messages are buffered here, or go on; on a follower."""
        with self.lock:
            if self._is_paused != on:
                self._is_paused = on
                for connection in self._by_rank.values():
                    self._watch(connection)

    def flush(self, limit_s: float) -> None:
        """Wait for ranks that read slowly, but no longer than this; the rest is sent later."""
        with contextlib.suppress(CoordinationError):
            self.wait_until(lambda: not any(one.holds_back() for one in self._by_rank.values()), limit_s)

    def close(self, why: str, limit_s: float) -> None:
        """Say goodbye, close everything, and end the I/O thread; may be called again.

        Args:
            why: The message of the error that later calls raise.
            limit_s: The most seconds to wait for ranks that read slowly.
        """
        with self.lock:
            if self._why_closed:
                return
            self._why_closed = why
            self.changed.notify_all()
            self._end_thread()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)  # it may wait for a lock that is held below this call, in a signal handler
        with self.lock:
            if self._selector is not None:
                self._selector.unregister(self._wake_fd)
            self.send(frame(GOODBYE), self.ranks())
            end_s = time.monotonic() + limit_s
            while any(one.holds_back() for one in self._by_rank.values()) and (left_s := end_s - time.monotonic()) > 0:
                with contextlib.suppress(ReferenceError):  # no owner is left
                    self._serve(self._selector.select(left_s) if self._selector is not None else [])
            self._close_sockets()

    # --- the I/O thread

    def _start(self) -> None:
        """Start the I/O thread, unless it runs."""
        if self._selector is not None:
            return
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        _all_connections.add(self)
        self._thread = threading.Thread(target=self._run, name=IO_THREAD, daemon=True)
        self._thread.start()

    def _end_thread(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while True:
                with self.lock:
                    if self.is_closed() or self._selector is None:
                        return
                    selector = self._selector
                    wait_s = max(0.0, min(self._tick_s, self._return_s) - time.monotonic())
                events = selector.select(wait_s)
                with self.lock:
                    if self.is_closed():
                        return
                    self._serve(events)
                    if time.monotonic() >= self._tick_s:
                        self._tick()
                    self.changed.notify_all()
                if time.monotonic() >= self._return_s:
                    self._return()
        except ReferenceError:  # these ranks are not used any more
            return
        except Exception as error:  # noqa: BLE001 - else calls would wait for a thread that is gone
            _log.exception("the thread %s has failed", IO_THREAD)
            with self.lock:
                self._why_closed = f"the thread {IO_THREAD} has failed: {type(error).__name__}: {error}"
                self._close_sockets()  # the other ranks notice
                self.changed.notify_all()

    def _tick(self) -> None:
        now_s = time.monotonic()
        for stranger in list(self._strangers):
            if now_s - stranger.made_s > _STRANGER_S:
                self._drop(stranger)
        for rank, connection in list(self._by_rank.items()):
            if connection.is_unanswered():
                self._lose(connection, rank, f"nothing was acknowledged for {SILENT_MACHINE_S:g} s")
        self._tick_s = now_s + min(self._owner.tick(), SILENT_MACHINE_S / 5, _STRANGER_S / 5)

    def _return(self) -> None:
        """Try to connect with rank 0 again, so that it knows that this follower is alive, also between two saves."""
        self._returned_s, self._return_s = time.monotonic(), math.inf
        try:
            self.connect(_CONNECT_S)
        except ConnectionRefusedError:
            pass  # no process listens there any more
        except OSError:
            self._return_soon()

    def _return_soon(self) -> None:
        if self._rank:
            self._return_s = self._returned_s + _RETURN_S

    def _close_sockets(self) -> None:
        for connection in [*self._by_rank.values(), *self._strangers]:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
            # Unread bytes would make the kernel reset the connection, and the reset overtakes the goodbye.
            connection.receive()
            self._drop(connection)
        if self._listener is not None:
            close_socket(self._listener)
        self._close_selector()

    def _close_selector(self) -> None:
        if self._selector is not None:
            self._selector.close()
            os.close(self._wake_fd)
            self._selector, self._wake_fd = None, -1

    # --- inside, with the lock held

    def _watch(self, connection: Connection) -> None:
        if self._selector is None or not connection.is_open():
            return
        wanted = selectors.EVENT_WRITE if connection.unsent else 0
        wanted |= 0 if self._is_paused else selectors.EVENT_READ
        if connection.watched == wanted:
            return
        if not wanted:
            self._selector.unregister(connection.socket)
        elif connection.watched:
            self._selector.modify(connection.socket, wanted, connection)
        else:
            self._selector.register(connection.socket, wanted, connection)
        connection.watched = wanted

    def _serve(self, events: Iterable[_Event]) -> None:
        for key, mask in events:
            connection = key.data
            if key.fd == self._wake_fd:
                continue
            if connection is None:
                self._accept()
            elif connection.is_open():  # processing another connection's frame may have closed it
                connection.flush()
                self._watch(connection)
                if mask & selectors.EVENT_READ:
                    self._read(connection)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                accepted = self._listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("rank 0 accepts no connections of other ranks until the next save: %s", error)
                self.take_connections(False)  # else every wait would end at once
                return
            try:
                connection = connection_over(accepted, self.token, None)
            except OSError:  # the other side has closed it already
                continue
            self._strangers.append(connection)
            self._watch(connection)
            self._read(connection)
            if len(self._strangers) > self._count + _STRANGER_COUNT:
                self._drop(self._strangers[0])

    def _read(self, connection: Connection) -> None:
        ended = connection.receive()
        try:
            while connection.is_open() and (one := connection.next_frame()) is not None:
                self._take(connection, *one)
        except (ValueError, TypeError) as error:
            ended = str(error) if isinstance(error, Refused) else NO_MESSAGE
            if connection.rank is None:
                _log.warning("rank 0 has refused a connection: %s", ended)
        if ended is not None and connection.is_open():
            self._lose(connection, connection.rank, ended)

    def _lose(self, connection: Connection, rank: int | None, why: str) -> None:
        self._drop(connection)
        if rank is not None:
            if not connection.said_goodbye:
                self._return_soon()
            self._owner.lost(rank, why, connection.said_goodbye)

    def _take(self, connection: Connection, kind: int, number: int, payload: bytes) -> None:
        if connection.rank is None:
            is_proven = connection.answer(kind, payload)
            if connection.claimed_rank not in range(1, self._count):
                raise Refused(f"there is no rank {connection.claimed_rank}")
            self._watch(connection)
            if is_proven:
                self._greet(connection, connection.claimed_rank)
        elif not connection.is_proven:
            connection.answer(kind, payload)
        elif kind == GOODBYE:
            connection.said_goodbye = True
        else:
            self._owner.took(connection.rank, kind, number, payload)

    def _greet(self, connection: Connection, rank: int) -> None:
        """Take the connection of a follower that has proven itself, in place of its older one."""
        if rank in self._by_rank:
            self._read(self._by_rank[rank])  # frames that it sent before it lost that connection
        if rank in self._by_rank:
            self._drop(self._by_rank[rank])  # the follower itself tells which sessions this has failed
        self._strangers.remove(connection)
        self._by_rank[rank] = connection
        self._owner.greeted(rank)

    def _drop(self, connection: Connection) -> None:
        if self._selector is not None and connection.watched:
            self._selector.unregister(connection.socket)
            connection.watched = 0
        close_socket(connection.socket)
        if connection in self._strangers:
            self._strangers.remove(connection)
        if connection.rank is not None and self._by_rank.get(connection.rank) is connection:
            del self._by_rank[connection.rank]

    def _leave_to_parent(self) -> None:
        """Forget the sockets; in a forked child, where their descriptors are closed."""
        self.lock, self._connecting = threading.RLock(), threading.RLock()
        self.changed, self._thread = threading.Condition(self.lock), None
        self._why_closed = "the connections to the other ranks belong to the process that this one was forked from"
        for connection in [*self._by_rank.values(), *self._strangers]:
            connection.socket.detach()
        if self._listener is not None:
            self._listener.detach()
        self._close_selector()


def _leave_sockets_to_parent() -> None:
    close_inherited()
    for connections in list(_all_connections):
        connections._leave_to_parent()


def _close_all() -> None:
    # Before the interpreter ends its daemon threads: one may hold a lock then, for ever.
    for connections in list(_all_connections):
        connections.close("the program ends", _CONNECT_S)


os.register_at_fork(after_in_child=_leave_sockets_to_parent)
atexit.register(_close_all)
