"""One file written by several ranks, which are threads here, and a directory of such files; what one rank writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.ranks_in_threads import begin, ranks_in_threads
from support.sessions import ThreadSession, run_threads
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.config import BLOCK_BYTES
from fastpersist.distributed.coordinator_file import CoordinatorFile
from fastpersist.distributed.coordinator_save import CoordinatorSave
from fastpersist.distributed.follower_file import FollowerFile
from fastpersist.distributed.follower_save import FollowerSave
from fastpersist.distributed.replica_check import replicas_of
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.formats.layout import align_up
from fastpersist.saving.containers import container_for
from fastpersist.saving.ownership import Owners
from fastpersist.saving.pending_save import Lane, SaveStats
from fastpersist.transfer.arena import Arena

MIB = 1 << 20


def share_and_write(
    session: ThreadSession,
    obj: object,
    path: Path,
    writers: list[int],
    *,
    checksum: bool = True,
    check_replicas: bool = False,
) -> Any:
    """Do one rank's part; the first returns its share and what was written, the others their share."""
    container = container_for(obj, str(path), checksum=checksum)
    together = SaveGroup(session, path.name, writers, check_replicas)  # type: ignore[arg-type]
    if session.rank:
        other = FollowerFile(container, replicas_of(container), together)
        other.write(str(path), engine="auto", durable=True)
        return other
    share = CoordinatorFile(container, replicas_of(container), together)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(fd, 0, align_up(container.size_bytes, 4096))
        written = share.write(fd, str(path), engine="auto", pending_path=str(path))
        os.ftruncate(fd, container.size_bytes)
    finally:
        os.close(fd)
    return share, written


def save_with(
    count: int,
    obj_of: Any,
    path: Path,
    writers: list[int] | None = None,
    block_bytes: int = BLOCK_BYTES,
    **options: bool,
) -> list[Any]:
    return run_threads(
        count,
        lambda session: share_and_write(
            session, obj_of(session.rank), path, list(range(count)) if writers is None else writers, **options
        ),
        block_bytes,
    )


def expected_file(obj: object, path: Path, **options: bool) -> bytes:
    other = path.parent / "alone" / path.name
    other.parent.mkdir(exist_ok=True)
    fp.save(obj, other, **options)
    return other.read_bytes()


def state_of(rank: int) -> dict[str, Any]:
    """Replicas that are alike, and things that differ from rank to rank."""
    random = torch.Generator().manual_seed(1)
    return {
        "weights": torch.randn(900_000, generator=random),
        "odd": torch.randn(3 * MIB // 4 + 77, generator=random),
        "small": torch.full((10,), float(rank)),
        "names": "x" * (10 + rank),
        "half": torch.randn(1 << 20, generator=random).to(torch.float16),
        "statistics": torch.full((1000,), rank + 0.5),
        "empty": torch.empty(0),
        "view": torch.randn(1000, 700, generator=random).t(),
        "last": torch.randint(0, 255, (2 * MIB + 1,), dtype=torch.uint8, generator=random),
    }


@contextmanager
def saved_by_two(path: Path) -> Iterator[tuple[fp.DirectorySave, FollowerSave]]:
    """Begin a directory that two ranks save: give the coordinator's end and the follower's, each on its own thread."""
    with ranks_in_threads(2) as ranks:
        first, other = (SaveGroup(session, path.name, [0, 1], False) for session in begin(ranks, str(path)))
        follower = FollowerSave(
            str(path),
            other,
            engine="auto",
            durable=True,
            arena=Arena(),
            lane=Lane("fastpersist-save"),
            stats=SaveStats(path=str(path)),
            confirms=True,
        )
        with fp.DirectorySave(path, _strategy=CoordinatorSave(first)) as files:
            yield files, follower


OWNERS = Owners(None, (), "optimizer")
"""Nothing is cut: each rank writes what is its own."""


def replicas(state: dict[str, Any]) -> Owners:
    """Return owners by which the large tensors of a state are the same on all ranks, and so are cut."""
    return Owners(None, [one for one in state.values() if isinstance(one, torch.Tensor)], "optimizer")


def end_both(files: fp.DirectorySave, follower: FollowerSave) -> list[BaseException | None]:
    """Publish on both ranks; return how it ends on the coordinator, and on the follower."""
    pending = files.publish(), follower.publish()
    return [one.exception(PATIENCE_S) for one in pending]
