"""A file written by several ranks, which are threads here: byte for byte what the first rank alone writes."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sessions import ThreadSession, run_threads

import fastpersist as fp
from fastpersist import _native
from fastpersist.config import BLOCK_BYTES
from fastpersist.distributed import coordinator_file, follower_file
from fastpersist.distributed.coordinator_file import CoordinatorFile
from fastpersist.distributed.follower_file import FollowerFile
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.distributed.replica_check import replicas_of
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.formats.layout import align_up
from fastpersist.saving.containers import container_for

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


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
@pytest.mark.parametrize("checksum", [True, False])
def test_file_is_what_the_first_rank_alone_would_have_written(
    tmp_path: Path, count: int, name: str, checksum: bool
) -> None:
    def obj_of(rank: int) -> dict[str, Any]:
        state = state_of(rank)
        if name.endswith(".safetensors"):
            state = {key: value.contiguous() for key, value in state.items() if isinstance(value, torch.Tensor)}
        return state

    path = tmp_path / name
    outcomes = save_with(count, obj_of, path, checksum=checksum)
    share, written = outcomes[0]
    data = path.read_bytes()
    assert data == expected_file(obj_of(0), path, checksum=checksum)
    assert written.crc32 == (_native.crc32(data) if checksum else None)
    sizes = share.bytes_by_rank()
    assert sum(sizes) == share.cut_bytes > 5 * MIB
    assert max(sizes) - min(sizes) <= 4096


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
def test_no_page_of_any_machine_is_written_by_two_ranks(tmp_path: Path, name: str) -> None:
    page_bytes = 1 << 16
    state = {key: value.contiguous() for key, value in state_of(0).items() if isinstance(value, torch.Tensor)}
    path = tmp_path / name
    outcomes = save_with(3, lambda _: state, path, block_bytes=page_bytes)
    share, _ = outcomes[0]
    assert path.read_bytes() == expected_file(state, path)
    offsets = dict(enumerate(share.container.offsets))
    pages = []
    for rank in (1, 2):
        extents = share.extents_of(rank, offsets)
        assert sum(size_bytes for _, size_bytes in extents) > MIB
        for offset_bytes, size_bytes in extents:
            assert offset_bytes % page_bytes == size_bytes % page_bytes == 0
            pages += range(offset_bytes // page_bytes, (offset_bytes + size_bytes) // page_bytes)
    assert len(set(pages)) == len(pages)
    assert max(share.bytes_by_rank()) - min(share.bytes_by_rank()) <= page_bytes


def test_no_rank_writes_directly_where_two_of_them_write_to_one_block_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "block_bytes", lambda _fd: 4 * BLOCK_BYTES)
    state, path = state_of(0), tmp_path / "state.pt"
    engines: list[str] = []
    stock = coordinator_file.Writer

    def noted(*arguments: Any, engine: str, **options: Any) -> Any:
        engines.append(engine)
        return stock(*arguments, engine=engine, **options)

    monkeypatch.setattr(coordinator_file, "Writer", noted)
    monkeypatch.setattr(follower_file, "Writer", noted)
    save_with(3, lambda _: state, path)
    assert engines == 3 * ["threads-buffered"]
    assert path.read_bytes() == expected_file(state, path)


def test_a_direct_engine_that_is_named_is_refused_where_it_would_undo_what_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "block_bytes", lambda _fd: 4 * BLOCK_BYTES)
    container = container_for({"w": torch.ones(8)}, "state.pt", checksum=True)

    def refused(session: ThreadSession) -> str:
        share = CoordinatorFile(container, [], SaveGroup(session, "state.pt", [0], False))  # type: ignore[arg-type]
        with pytest.raises(fp.UnsupportedError) as refusal, (tmp_path / "state.pt").open("w+b") as file:
            share.write(file.fileno(), "state.pt", engine="libaio", pending_path="state.pt")
        return str(refusal.value)

    (message,) = run_threads(1, refused)
    assert "blocks of 16384 bytes" in message


def test_only_the_chosen_ranks_write(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    share, _ = save_with(4, state_of, path, writers=[0, 2])[0]
    sizes = share.bytes_by_rank()
    assert sizes[1] == sizes[3] == 0
    assert abs(sizes[0] - sizes[2]) <= 4096
    assert path.read_bytes() == expected_file(state_of(0), path)


def test_the_first_rank_leaves_the_ring_to_others_while_it_waits_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They may be what the rest waits for: a transfer in this process that wants to begin.
    monkeypatch.setenv("FASTPERSIST_CHUNK_BYTES", str(1 << 16))
    monkeypatch.setenv("FASTPERSIST_RING_BYTES", str(8 << 16))
    state = {"weights": torch.arange(8 * MIB, dtype=torch.uint8)}
    free_counts: list[int] = []

    def work(session: ThreadSession) -> Any:
        if session.rank == 0:
            gather, gathers = session.gather, itertools.count()

            def noting(own: bytes) -> list[bytes]:
                if next(gathers) == 1:  # after the plans
                    free_counts.append(_native.ring_free_count() - _native.ring_buffer_count())
                return gather(own)

            monkeypatch.setattr(session, "gather", noting)
        return share_and_write(session, state, tmp_path / "x.pt", [0])

    outcomes = run_threads(2, work)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert free_counts
    assert free_counts[0] >= -2


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 77, 4096, CUT_BYTES_MIN - 1, CUT_BYTES_MIN, CUT_BYTES_MIN + 4096 * 3 + 5])),
    st.integers(2, 4),
    st.sampled_from(["a.pt", "b.safetensors"]),
)
def test_any_sizes_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], count: int, name: str
) -> None:
    tmp_path = tmp_path_factory.mktemp("shared")
    state = {f"t{index}": torch.full((size,), index % 251, dtype=torch.uint8) for index, size in enumerate(sizes)}
    path = tmp_path / name
    outcomes = save_with(count, lambda _: state, path)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert path.read_bytes() == expected_file(state, path)
    for file in (path, path.parent / "alone" / name):
        file.unlink()


def test_each_rank_reads_only_what_it_writes(tmp_path: Path) -> None:
    # Of the cut bytes a rank does not write, the file has those of others: overwriting them here changes nothing.
    ready = threading.Barrier(2)

    def work(session: ThreadSession) -> Any:
        state = {"weights": torch.ones(4 * MIB, dtype=torch.uint8)}
        container = container_for(state, str(path), checksum=True)
        together = SaveGroup(session, path.name, [0, 1], False)  # type: ignore[arg-type]
        kind = FollowerFile if session.rank else CoordinatorFile
        share = kind(container, replicas_of(container), together)
        mine = [(part.from_bytes, part.from_bytes + part.size_bytes) for part in share.ranges]
        for low, high in itertools.pairwise([0, *itertools.chain(*mine), 4 * MIB]):
            if (low, high) not in mine:
                state["weights"][low:high] = 7
        ready.wait()
        if isinstance(share, FollowerFile):
            share.write(str(path), engine="auto", durable=False)
            return None
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, align_up(container.size_bytes, 4096))
        share.write(fd, str(path), engine="auto", pending_path=str(path))
        os.ftruncate(fd, container.size_bytes)
        os.close(fd)
        return None

    path = tmp_path / "state.pt"
    assert run_threads(2, work) == [None, None]
    assert torch.equal(torch.load(path)["weights"], torch.ones(4 * MIB, dtype=torch.uint8))
    assert fp.verify(path).ok


def changed(rank: int, which: str, how: str) -> dict[str, Any]:
    state = state_of(0)
    if rank == 2:
        if how == "all bytes":
            state[which].add_(1)
        elif how == "dtype":
            state[which] = state[which].view(torch.int32)
        elif how == "size":
            state[which] = torch.cat([state[which], torch.zeros(4096)])
        elif how == "missing":
            del state[which]
        else:
            state[which][12345] += 1
    return state


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("all bytes", r"weights on rank 2"),
        ("dtype", r"weights on rank 2"),
        ("size", r"weights on rank 2"),
        ("missing", r"rank 0 has 5 .*rank 2 4"),
    ],
)
def test_replicas_that_differ_are_named_with_their_ranks(tmp_path: Path, how: str, said: str) -> None:
    outcomes = save_with(4, lambda rank: changed(rank, "weights", how), tmp_path / "state.pt")
    assert type(outcomes[0]) is fp.CoordinationError
    with pytest.raises(fp.CoordinationError, match=said):
        raise outcomes[0]
    assert all(isinstance(outcome, fp.PeerError) for outcome in outcomes[1:])


def test_one_byte_that_differs_is_found_when_all_are_compared(tmp_path: Path) -> None:
    outcomes = save_with(3, lambda rank: changed(rank, "weights", "one"), tmp_path / "a.pt", check_replicas=True)
    with pytest.raises(fp.CoordinationError, match=r"weights on rank 2"):
        raise outcomes[0]
    outcomes = save_with(3, lambda rank: state_of(0), tmp_path / "b.pt", check_replicas=True)
    assert fp.verify(tmp_path / "b.pt").ok
    assert not isinstance(outcomes[0], Exception)


def test_ranks_that_compare_differently_are_told_so(tmp_path: Path) -> None:
    def work(session: ThreadSession) -> Any:
        path = tmp_path / "state.pt"
        return share_and_write(session, state_of(0), path, [0, 1], check_replicas=session.rank == 1)

    with pytest.raises(fp.CoordinationError, match=r"samples.*all bytes"):
        raise run_threads(2, work)[0]


def test_rank_that_does_not_see_the_file_says_so(tmp_path: Path) -> None:
    def work(session: ThreadSession) -> Any:
        if session.rank == 0:
            return share_and_write(session, state_of(0), tmp_path / "state.pt", [0, 1])
        session.hear = lambda: hear().replace(b"state.pt", b"other.pt")  # type: ignore[method-assign]
        hear = ThreadSession.hear.__get__(session)
        return share_and_write(session, state_of(0), tmp_path / "state.pt", [0, 1])

    first, other = run_threads(2, work)
    assert isinstance(first, fp.PeerError)
    assert isinstance(other, fp.StorageError)
    assert "rank 1 cannot open" in str(other)
    assert "same file system" in str(other)


def test_four_messages_a_rank_are_at_most_a_kibibyte(tmp_path: Path) -> None:
    state = {f"layer{index}": torch.zeros(CUT_BYTES_MIN // 4 + 1024 * (index % 3)) for index in range(64)}
    told: list[int] = []

    def work(session: ThreadSession) -> Any:
        tell = session.tell
        session.tell = lambda message: told.append(len(message)) or tell(message)  # type: ignore[method-assign]
        outcome = share_and_write(session, state, tmp_path / "state.pt", list(range(4)))
        return outcome if session.rank == 0 else session.message_count

    outcomes = run_threads(4, work)
    assert outcomes[1:] == [3, 3, 3]  # and one more, which tells that it is published
    assert max(told) <= 1024
