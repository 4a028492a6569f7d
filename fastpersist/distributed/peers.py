"""What ranks need to connect: their machines and addresses, protocol versions, enough descriptors, a port."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import resource
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from fastpersist.errors import ConfigError

__all__ = [
    "hosts_of",
    "is_dead",
    "listening_socket",
    "loopback_place",
    "own_hosts",
    "own_process",
    "rank_in",
    "refuse_other_versions",
    "require_descriptors",
]

_log = logging.getLogger("fastpersist")

_SIOCGIFADDR = 0x8915
_OTHER_DESCRIPTOR_COUNT = 256  # left for the files of saves, and for what the program opens


def rank_in(process_group: Any) -> int:
    """Return this process's rank in a group.

    Raises:
        ConfigError: This process is not in the group, or torch does not know the group.
    """
    import torch.distributed as dist

    try:
        rank = dist.get_rank(process_group)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"torch knows no such process_group: it was destroyed, or this {type(process_group).__name__} is none; "
            "pass one that is alive, or None if this process is alone"
        ) from error
    if rank < 0:
        raise ConfigError("this process is not a rank of the process group that it was given")
    return rank


def own_process() -> tuple[int, str, str]:
    """Return an identity of this process while it lives: its pid, the pid namespace, and its start time."""
    pid = os.getpid()
    try:
        return pid, str(os.stat("/proc/self/ns/pid").st_ino), _begin_of(pid)
    except OSError:
        return pid, "", ""


def is_dead(process: tuple[int, str, str] | None) -> bool:
    """Tell whether a process, as `own_process` names it, has ended; False for None, and for one not seen from here."""
    if process is None:
        return False
    pid, namespace, begin = process
    try:
        if not begin or namespace != str(os.stat("/proc/self/ns/pid").st_ino):
            return False
        return _begin_of(pid) != begin
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _begin_of(pid: int) -> str:
    """Return when a process has begun, in ticks since the machine has; "ended" for a zombie."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]


def loopback_place() -> tuple[str, str]:
    """Return an identity of this running machine and its network: equal identities share 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
        return machine, str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return socket.gethostname(), ""


def own_hosts() -> list[str]:
    """Return the addresses at which other machines may reach this one, the best first."""
    found: list[str] = []
    # Connecting a datagram socket sends nothing: it asks the kernel which address it would send from. The last two are
    # reserved for documentation, so they go where everything goes.
    for target in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1", "2001:db8::1"):
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(target or None, 9, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    own = [ipaddress.ip_address(host.split("%")[0]) for host in dict.fromkeys(found)]
    return [str(host) for host in own if not (host.is_loopback or host.is_link_local or host.is_unspecified)]


def hosts_of(interface: str) -> list[str]:
    """Return the addresses of a network interface of this machine, IPv4 first.

    Args:
        interface: The name of the interface; or an address, which is returned.

    Raises:
        ConfigError: There is no interface of this name, or it has no address that other machines can use.

    Source: netdevice(7), SIOCGIFADDR; proc_pid_net(5), if_inet6.
    """
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(interface))]
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConfigError(
            f"FASTPERSIST_INTERFACE is the name of a network interface of rank 0's machine ({', '.join(names)}), or an "
            f"address of it; not {interface!r}"
        )
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntop(socket.AF_INET, answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:
        for address, _, _, _, _, name in (line.split() for line in lines):
            host = ipaddress.IPv6Address(bytes.fromhex(address))
            if name == interface and not host.is_link_local:
                found.append(str(host))
    if not found:
        raise ConfigError(f"the network interface {interface}, which FASTPERSIST_INTERFACE names, has no address")
    return found


def require_descriptors(count: int) -> None:
    """Raise this process's limit of open files, as far as it may, so that there is one for each follower.

    Raises:
        OSError: EMFILE: it may not have so many.
    """
    soft_count, hard_count = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_count = len(os.listdir("/proc/self/fd")) + count + _OTHER_DESCRIPTOR_COUNT
    if soft_count == resource.RLIM_INFINITY or needed_count <= soft_count:
        return
    if needed_count > hard_count != resource.RLIM_INFINITY:
        raise OSError(
            errno.EMFILE,
            f"rank 0 has a connection with each of {count - 1} followers, needs {needed_count} open files with those "
            f"that it has, and may have {hard_count}: raise the limit of its process (ulimit -Hn, LimitNOFILE= of "
            "systemd, --ulimit nofile= of docker)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed_count, hard_count))
    _log.info("rank 0 raised its limit of open files from %d to %d", soft_count, needed_count)


def listening_socket(host: str, both: bool, ports: Iterable[int], backlog: int) -> socket.socket:
    """Listen at the first port that is free; with `both`, for IPv4 and IPv6."""
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    tried = []
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, dualstack_ipv6=both, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            tried.append(port)
    raise OSError(errno.EADDRINUSE, f"no port of {tried[0]} to {tried[-1]} is free: FASTPERSIST_PORTS allows no other")


def refuse_other_versions(rank: int, told: Sequence[dict[str, Any]]) -> None:
    """Raise on all ranks if they cannot understand each other; warn on the first if their torch differs.

    Raises:
        ConfigError: The ranks run versions of fastpersist with different protocols.
    """
    protocols = [one["protocol"] for one in told]
    if len(set(protocols)) > 1:
        other = next(index for index, protocol in enumerate(protocols) if protocol != protocols[0])
        raise ConfigError(
            f"ranks 0 and {other} run versions of fastpersist that do not understand each other: "
            f"{told[0]['versions'].get('fastpersist')} and {told[other]['versions'].get('fastpersist')} "
            f"(protocols {protocols[0]} and {protocols[other]}); install the same version on all ranks"
        )
    torches = {str(one["versions"].get("torch")) for one in told}
    if rank == 0 and len(torches) > 1:
        _log.warning("the ranks run different versions of torch (%s); rank 0's writes", ", ".join(sorted(torches)))
