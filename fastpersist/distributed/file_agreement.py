"""The messages about one file that the ranks write together, each with both of its ends.

In a session (`sessions`), for each such file:

    followers → coordinator   plan      the file's name, and digests of what is cut and of who writes (`shared_file`)
    coordinator → followers   describe  only if the digests differ:
    followers → coordinator   …         a sum of each cut source, so that the error can name those that differ
    coordinator → followers   look …    only if it is not known who sees whose files: `node_local.detection`
    coordinator → followers   go        the path of the pending file, where each cut source lies in it, and if there are
                                        several stores, which
    followers → coordinator   done      the CRC of each range that was written, when it is durable

Everything except the CRCs is JSON. A follower writes between *go* and *done*. The coordinator writes its early blocks
in the same time, and its late blocks, which hold CRCs, after *done* of all followers.
"""

from __future__ import annotations

import base64
import itertools
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastpersist.distributed.messages import decoded, encoded, preferring_failure_of_others
from fastpersist.distributed.replica_check import difference
from fastpersist.distributed.sessions import Session
from fastpersist.errors import ConfigError, CoordinationError

if TYPE_CHECKING:
    from fastpersist.saving.directory_files import RankSession

__all__ = ["agree_on_plans", "ask", "follow_plans", "gather_done", "hear_all", "offsets_in", "tell_done", "tell_go"]

_CRC_BYTES = 4

# --- plan, describe


def agree_on_plans(
    session: Session, plan: dict[str, Any], describe: Callable[[], dict[str, Any]], names_of: Callable[[int], list[str]]
) -> None:
    """Receive the plans of the followers, which are in `follow_plans`, and compare them; on the coordinator.

    Args:
        session: The session with the followers.
        plan: The "name" of the file, a "digest" of what is cut, and "writers", a digest of the ranks that write.
        describe: Returns "mode" and "sums" of what is cut.
        names_of: Names the tensors of a cut source, by its position.

    Raises:
        CoordinationError: The ranks do not save the same; the message says what differs on which ranks.
        ConfigError: They were given different `writers`.
        PeerError: Another rank has failed.
    """
    told = hear_all(session, plan)
    for rank, other in enumerate(told):
        if other.get("name") != plan["name"]:
            raise CoordinationError(
                f"the ranks do not save the same in the same order: rank 0 is at {plan['name']}, rank {rank} at "
                f"{other.get('name')}. All ranks save equally often, with the same steps or names. After a "
                "missed call: rebind(group) of the Checkpointer on all ranks, or a new process group"
            )
    for rank, other in enumerate(told):
        if other.get("writers") != plan["writers"]:
            raise ConfigError(
                f"cannot save {plan['name']}: ranks 0 and {rank} were given different writers=; pass the same on all "
                "ranks"
            )
    if any(other.get("digest") != plan["digest"] for other in told):
        session.answer(encoded({"describe": True}))
        described = hear_all(session, describe())
        raise difference([(one.get("mode"), one.get("sums", [])) for one in described], names_of)


def follow_plans(
    session: Session,
    plan: dict[str, Any],
    describe: Callable[[], dict[str, Any]],
    reply: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Tell the plan, answer what the coordinator asks, and return its *go*; on a follower.

    Args:
        session: The session with the coordinator.
        plan: This rank's plan, with the keys that `agree_on_plans` lists.
        describe: Returns "mode" and "sums" of what is cut.
        reply: Returns the answer to a question about which ranks see whose files.

    Raises:
        PeerError: Another rank has failed, or the plans differ.
    """
    session.tell(encoded(plan))
    with preferring_failure_of_others(session):
        while "path" not in (said := decoded(session.hear(), 0)):
            session.tell(encoded(describe() if said.get("describe") else reply(said)))
    return said


def ask(session: Session, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask the followers something before *go*, and return their answers by rank; on the coordinator."""
    session.answer(encoded(message))
    return hear_all(session, {})


def hear_all(session: RankSession, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each rank says, this one's `own` first; on the coordinator."""
    return [decoded(said, rank) for rank, said in enumerate(session.gather(encoded(own)))]


# --- go


def tell_go(session: Session, path: str, offsets: Sequence[int], stores: dict[str, Any]) -> None:
    """Let the followers write; on the coordinator.

    Args:
        session: The session with the followers.
        path: The path of the pending file.
        offsets: The offsets of the cut sources in the file.
        stores: What *go* says about stores.
    """
    session.answer(encoded({"path": path, "offsets": _packed(offsets), **stores}))


def offsets_in(go: dict[str, Any]) -> list[int]:
    """Return the offsets of the cut sources that the coordinator tells; on a follower."""
    data = zlib.decompress(base64.b64decode(go["offsets"]))
    return list(itertools.accumulate(struct.unpack(f"<{len(data) // 8}Q", data)))


def _packed(offsets: Sequence[int]) -> str:
    """Encode offsets; the distances between them repeat, so this is a small part of 8 bytes each."""
    distances = [after - before for before, after in itertools.pairwise([0, *offsets])]
    return base64.b64encode(zlib.compress(struct.pack(f"<{len(distances)}Q", *distances))).decode()


# --- done


def tell_done(session: Session, crcs: Sequence[int]) -> None:
    """Tell that all is written and durable; on a follower.

    Args:
        session: The session with the coordinator.
        crcs: The CRC-32s of the ranges that this rank has written.
    """
    session.tell(struct.pack(f"<{len(crcs)}I", *crcs))


def gather_done(session: Session, counts: Sequence[int]) -> list[list[int]]:
    """Wait until all have written, and return the CRCs of their ranges by rank; on the coordinator.

    Args:
        session: The session with the followers.
        counts: For each rank, the number of ranges that it writes.

    Raises:
        CoordinationError: A rank has written something else.
        PeerError: A rank has failed.
    """
    found: list[list[int]] = [[]]
    for rank, message in enumerate(session.gather(b"")):
        if rank == 0:
            continue
        whole = len(message) % _CRC_BYTES == 0
        crcs = [crc for (crc,) in struct.iter_unpack("<I", message)] if whole else []
        if len(crcs) != counts[rank]:
            raise CoordinationError(f"rank {rank} has not written its ranges: {counts[rank]} ranges")
        found.append(crcs)
    return found
