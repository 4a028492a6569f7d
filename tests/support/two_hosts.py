"""Two hosts, as far as one kernel can have them: networks of their own, joined by a cable that can be cut.

with two_hosts() as names:      # of two network namespaces, 10.213.77.1 and 10.213.77.2; needs root
    with inside(names[0]): ...  # sockets that this thread makes are of the first
    cut_cable(names[1])         # from now on every packet is lost: no host hears that the other one is gone
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

import pytest

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words: str) -> None:
    """Run `ip`; skip the test where it cannot be done."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Give the names of two network namespaces, joined by a pair of interfaces."""
    names = (f"fp{os.getpid()}a", f"fp{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for address, name in zip(ADDRESSES, names, strict=True):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def enter(name: str) -> None:
    """Have this thread make its sockets in a network namespace from now on."""
    _set_network(f"/run/netns/{name}")


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Have this thread make its sockets in a network namespace."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(name)
        yield
    finally:
        _set_network(f"/proc/self/fd/{own}")
        os.close(own)


def cut_cable(name: str) -> None:
    """Take the interface of a host down: the other one's packets are lost without an answer."""
    ip("-n", name, "link", "set", "eth0", "down")


def _set_network(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        network_namespace = 0x40000000
        if ctypes.CDLL(None, use_errno=True).setns(fd, network_namespace) != 0:
            pytest.skip(f"setns: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
