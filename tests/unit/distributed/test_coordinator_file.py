"""The coordinator's part of a file: with those of the followers, the bytes that one rank alone would have written."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sessions import ThreadSession, run_threads
from support.shared_files import MIB, expected_file, save_with, share_and_write, state_of

import fastpersist as fp
from fastpersist import _native
from fastpersist.config import BLOCK_BYTES
from fastpersist.distributed import coordinator_file, follower_file
from fastpersist.distributed.coordinator_file import CoordinatorFile
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.distributed.shared_file import SaveGroup
from fastpersist.saving.containers import container_for


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
    assert sum(sizes) > 5 * MIB
    assert max(sizes) - min(sizes) <= 4096


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


@settings(max_examples=25)
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
