"""Sharded steps of ranks that share no file system: each store has its ranks' parts of a DCP checkpoint."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_groups import rank_endings, run_ranks
from support.runs import hidden_names
from support.sameness import assert_same
from support.sharded_runs import ShardedRun, expected, mesh_of_all, whole
from support.store_runs import step_path, two_stores

import fastpersist as fp
from fastpersist.checkpointer.merge import merge
from fastpersist.distributed import sessions as session_room
from fastpersist.distributed.node_local import exchange, publishing
from fastpersist.distributed.node_local.exchange import PartsExchange, Piece
from fastpersist.distributed.shared_reader import SharedReader
from fastpersist.loading import selection

torch.set_num_threads(1)


def train(rank: int, count: int, roots: list[Path], steps: int) -> None:
    run = ShardedRun(mesh_of_all())
    with fp.Checkpointer(
        roots[rank], optimizer=run.optimizer, process_group=dist.group.WORLD, sharded=True, node_local="parts"
    ) as checkpoints:
        for _ in range(steps):
            run.advance()
            checkpoints.save(run.step, run.state(), rank_state={"rank": rank})


def load(rank: int, count: int, roots: list[Path], own_state: bool = True) -> None:
    """Load whole tensors, and then shards in place."""
    run = ShardedRun(mesh_of_all(), blank=True)
    with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD) as checkpoints:
        found = checkpoints.load(verify=True)
        assert_same(found["model"], expected(2)["model"])
        assert_same(found["position"], expected(2)["position"])
        assert found.get("rank_state") == ({"rank": rank} if own_state else None)
        found = checkpoints.load(into=run.targets())
    assert found["step"] == 2
    assert_same(dict(whole(run.model.state_dict())), expected(2)["model"])
    assert_same(whole(run.optimizer.state_dict()), expected(2)["optimizer"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(4, train, two_stores(directory, 4), 2)
    return directory


def test_each_store_has_its_ranks_parts_and_merged_they_are_the_state(saved: Path, tmp_path: Path) -> None:
    for name, ranks in (("a", (0, 1)), ("b", (2, 3))):
        path = step_path(saved / name, 2)
        names = {found.name for found in path.iterdir()}
        own = {f"__{rank}_0.distcp" for rank in ranks} | {f"rank-{rank:05d}.pt" for rank in ranks}
        assert names == {"MANIFEST.json", "PARTS.json", ".metadata", *own}
        assert fp.verify(path).ok
        assert hidden_names(saved / name) == []
        assert fp.Checkpointer(saved / name).steps() == [1, 2]
    merge([step_path(saved / name, 2) for name in ("a", "b")], tmp_path / "state.pt")
    assert_same(torch.load(tmp_path / "state.pt")["model"], expected(2)["model"])
    with pytest.raises(fp.FormatError, match=r"ranks 2, 3 \(written on "):
        merge([step_path(saved / "a", 2)], tmp_path / "other.pt")


def test_parts_are_exchanged_whoever_loads_them(saved: Path, tmp_path: Path) -> None:
    roots = two_stores(saved, 4)
    run_ranks(4, load, roots)
    run_ranks(4, load, roots[::-1])

    def load_fewer(rank: int, count: int, roots: list[Path]) -> None:
        with pytest.warns(RuntimeWarning, match="was saved by 4 ranks"):
            load(rank, count, roots, own_state=False)

    run_ranks(2, load_fewer, [saved / "b", saved / "a"])
    run_ranks(3, load_fewer, [tmp_path / "new", saved / "b", saved / "a"])


def test_one_file_in_memory_has_what_a_rank_reads_of_other_stores(saved: Path) -> None:
    def load_own(rank: int, count: int, roots: list[Path]) -> None:
        made: list[str] = []
        create = os.memfd_create

        def counted(name: str, flags: int) -> int:
            made.append(name)
            return create(name, flags)

        os.memfd_create = counted
        run = ShardedRun(mesh_of_all(), blank=True)
        with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD) as checkpoints:
            checkpoints.load(into=run.targets())
            # Its shards are in its own part, and objects in the first one, which store a has.
            assert len(made) == (0 if rank < 2 else 1)
            made.clear()
            checkpoints.load()
            assert len(made) == 1  # both parts of the other store are in one

    run_ranks(4, load_own, two_stores(saved, 4))


def own_shard(rank: int) -> torch.Tensor:
    return torch.arange(200_000) + rank  # more than what comes along unasked


def save_own_shard(rank: int, count: int, roots: list[Path]) -> None:
    with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD, sharded=True, node_local="parts") as checkpoints:
        checkpoints.save(1, {f"of rank {rank}": own_shard(rank), "step": 1}).result()


def load_own_shard(rank: int, count: int, roots: list[Path]) -> int:
    """Load from a store that has the parts of others; return the bytes that went by collectives of all ranks."""
    broadcast_bytes = 0
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        nonlocal broadcast_bytes
        broadcast_bytes += tensor.nbytes
        return broadcast(tensor, *arguments, **options)

    dist.broadcast = counted
    target = torch.zeros(200_000, dtype=torch.int64)
    with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD) as checkpoints:
        checkpoints.load(1, into={f"of rank {rank}": target})
    assert_same(target, own_shard(rank))
    return broadcast_bytes


@pytest.mark.parametrize("turns", [32, 2])
def test_what_one_rank_wants_goes_to_that_rank_alone(
    tmp_path: Path, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_TURNS", turns)
    monkeypatch.setattr(exchange, "cut_pieces", partial(exchange.cut_pieces, piece_bytes=65_536))
    roots = two_stores(tmp_path, 4)
    run_ranks(4, save_own_shard, roots)
    for broadcast_bytes in run_ranks(4, load_own_shard, roots[::-1]):
        assert broadcast_bytes < 100_000  # of 6,400,000: objects


@pytest.mark.parametrize("piece", [0, 5])
def test_a_rank_that_cannot_read_what_another_one_wants_fails_the_load_of_all(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_TURNS", 2)
    monkeypatch.setattr(exchange, "cut_pieces", partial(exchange.cut_pieces, piece_bytes=65_536))
    roots = two_stores(tmp_path, 4)
    run_ranks(4, save_own_shard, roots)

    def work(rank: int, count: int) -> None:
        read_piece, read_count = PartsExchange._read_piece, 0

        def fail_once(self: PartsExchange, wanted: Piece, buffer: torch.Tensor) -> None:
            nonlocal read_count
            if wanted.size_bytes == 65_536:
                read_count += 1
                if rank == 1 and read_count == piece + 1:
                    raise fp.StorageError(errno.EIO, "for the test", "a part")
            read_piece(self, wanted, buffer)

        PartsExchange._read_piece = fail_once  # type: ignore[method-assign]
        load_own_shard(rank, count, roots[::-1])

    for rank, ending in enumerate(rank_endings(4, work)):
        assert ending.error_type is (fp.StorageError if rank == 1 else fp.PeerError), (rank, ending.trace)
        assert "for the test" in ending.error_text


def test_one_process_is_told_whose_parts_are_elsewhere_and_loads_them_when_they_were_brought(
    saved: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        shutil.copytree(saved / name, tmp_path / name)
    with pytest.raises(fp.UnsupportedError, match=r"ranks 2, 3 \(written on .*fastpersist merge"):
        fp.Checkpointer(tmp_path / "a").load()
    for part in step_path(tmp_path / "b", 2).glob("*.distcp"):
        shutil.copy(part, step_path(tmp_path / "a", 2))
    with pytest.warns(RuntimeWarning, match="was saved by 4 ranks"):
        assert_same(fp.Checkpointer(tmp_path / "a").load()["model"], expected(2)["model"])


@pytest.mark.parametrize("damage", ["damaged", "missing", "store missing"])
def test_part_that_is_damaged_or_missing_is_named_with_its_rank(saved: Path, tmp_path: Path, damage: str) -> None:
    for name in ("a", "b"):
        shutil.copytree(saved / name, tmp_path / name)
    part = step_path(tmp_path / "b", 2) / "__3_0.distcp"
    if damage == "damaged":
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    elif damage == "missing":
        part.unlink()
    else:
        shutil.rmtree(step_path(tmp_path / "b", 2))

    def work(rank: int, count: int) -> None:
        fp.Checkpointer(two_stores(tmp_path, 4)[rank], process_group=dist.group.WORLD).load(2, verify=True)

    told = [ending.error_text for ending in rank_endings(4, work)]
    for text in told:
        assert ("ranks 2, 3 (written on " if damage == "store missing" else "__3_0.distcp") in text
    if damage == "damaged":
        assert any("rank 3 wrote it" in text for text in told)


@pytest.mark.parametrize("sharded_rank", [0, 1])
def test_ranks_of_which_one_saves_shards_and_one_replicas_are_told(tmp_path: Path, sharded_rank: int) -> None:
    def work(rank: int, count: int) -> BaseException | None:
        checkpoints = fp.Checkpointer(
            two_stores(tmp_path)[rank],
            process_group=dist.group.WORLD,
            sharded=rank == sharded_rank,
            node_local="parts",
            on_error="warn",
        )
        return checkpoints.save(1, {"a": torch.ones(3)}).exception()

    first, second = run_ranks(2, work)
    assert isinstance(first, fp.CoordinationError)
    assert isinstance(second, fp.PeerError)
    assert "do not save the same" in str(first)


# --- metadata that are longer than a message, or than what is gathered should be


def many_tensors(rank: int) -> dict[str, torch.Tensor]:
    """Small tensors, whose names are most of what there is to say."""
    return {f"{rank}.{number}.{'n' * 100}": torch.full((2,), float(rank + number)) for number in range(600)}


def train_many(rank: int, count: int, roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_room, "MESSAGE_LIMIT_BYTES", 100_000)
    monkeypatch.setattr(publishing, "_PIECE_BYTES", 10_000)
    with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD, sharded=True, node_local="parts") as checkpoints:
        checkpoints.save(1, many_tensors(rank))


def test_metadata_longer_than_a_message_reach_every_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [tmp_path / name for name in "abb"]
    run_ranks(3, train_many, roots, monkeypatch)
    metadata = [(step_path(root, 1) / ".metadata").read_bytes() for root in roots]
    assert len(metadata[0]) > 200_000
    assert metadata[1] == metadata[0]
    assert all(fp.verify(step_path(root, 1)).ok for root in roots)


def test_metadata_go_to_who_lacks_them_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = two_stores(tmp_path)
    run_ranks(2, train_many, roots, monkeypatch)
    metadata_bytes = (step_path(roots[0], 1) / ".metadata").stat().st_size

    def work(rank: int, count: int, roots: list[Path]) -> tuple[int, int]:
        said, wanted = [0], [0]
        say, read_piece = SharedReader._say, PartsExchange._read_piece

        def noting(self: SharedReader, own: Any) -> Any:
            heard = say(self, own)
            said[0] = max(said[0], len(pickle.dumps(heard)))
            return heard

        def reading(self: PartsExchange, piece: Any, buffer: torch.Tensor) -> None:
            wanted[0] += piece.size_bytes
            read_piece(self, piece, buffer)

        monkeypatch.setattr(SharedReader, "_say", noting)
        monkeypatch.setattr(PartsExchange, "_read_piece", reading)
        monkeypatch.setattr(selection, "_SMALL_BYTES", 1)  # or all the other tensors, which are small, come along
        with fp.Checkpointer(roots[rank], process_group=dist.group.WORLD) as checkpoints:
            name = f"1.5.{'n' * 100}"
            found = checkpoints.load(into={name: torch.zeros(2)})
            assert found[name].tolist() == [6, 6]
        return said[0], wanted[0]

    for said, handed_out in run_ranks(2, work, roots):
        assert said < 20_000
        assert handed_out < 20_000  # nobody lacks them
    told = run_ranks(3, work, [*roots, tmp_path / "new"])
    assert all(said < 20_000 for said, _ in told)
    assert metadata_bytes <= sum(handed_out for _, handed_out in told) < 2 * metadata_bytes
