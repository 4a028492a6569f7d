"""A step in parts is whole if some rank sees the parts of each store; else all are told which parts are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.rounds import in_rounds

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.step_listing import read_manifest
from fastpersist.distributed.node_local.split_step import StepParts, refuse_alone
from fastpersist.formats.manifest import CheckpointManifest, FileEntry, encode_manifest
from fastpersist.formats.split_manifest import PARTS_NAME, PartsRecord, SplitFile, Store, encode_parts
from fastpersist.loading.part_files import read_record
from fastpersist.saving.directory_files import manifest_now

STORES = (Store((0, 1), "node-a"), Store((2,), "node-b"))
OLD, NEW = "0" * 32, "1" * 32


def put_store(path: Path, store: int, *, token: str = NEW, stores: tuple[Store, ...] = STORES) -> Path:
    """Make the directory of a step as one store has it."""
    path.mkdir(parents=True)
    own = {f"rank-{rank:05d}.pt": b"of rank %d" % rank for rank in stores[store].ranks}
    files = {**own, PARTS_NAME: encode_parts(PartsRecord(token, stores, store, (SplitFile("state.pt", 0, None, ()),)))}
    entries = [FileEntry(name, len(data), _native.crc32(data)) for name, data in files.items()]
    for name, data in files.items():
        (path / name).write_bytes(data)
    manifest = manifest_now(entries, step=1, metrics={}, rank_count=3, stats={}, commit_number=1)
    (path / "MANIFEST.json").write_bytes(encode_manifest(manifest))
    return path


def load(paths: list[Path], work: Any = lambda parts, rank: parts) -> list[Any]:
    """Have each rank look at the step that it sees at its path; return what comes of it."""

    def look(reader: Any) -> Any:
        path = paths[reader.rank]
        manifest: CheckpointManifest | None = None
        record = None
        if (path / "MANIFEST.json").exists():
            manifest = read_manifest(str(path))
            record = read_record(str(path), manifest)
        return work(StepParts(reader, str(path), manifest, record), reader.rank)

    return in_rounds(len(paths), look)


def test_a_step_is_whole_whoever_sees_its_parts(tmp_path: Path) -> None:
    a, b = put_store(tmp_path / "a", 0), put_store(tmp_path / "b", 1)
    for parts in load([b, tmp_path / "new", a, a]):
        assert isinstance(parts, StepParts)
        assert parts.exists
        assert parts.rank_count == 3
        assert not parts.are_shards
        assert parts.own_names() == {f"rank-{rank:05d}.pt" for rank in range(3)}
        assert [parts.host_of(rank) for rank in range(4)] == ["node-a", "node-a", "node-b", "an unknown host"]
    turns = load([b, tmp_path / "new", a, a], lambda parts, rank: parts.own_turn())
    assert turns == [(0, 1), (0, 1), (0, 2), (1, 2)]


def test_a_step_that_nobody_sees_is_none(tmp_path: Path) -> None:
    assert [parts.exists for parts in load([tmp_path / "x", tmp_path / "y"])] == [False, False]


def test_whose_parts_are_missing_is_told_to_all(tmp_path: Path) -> None:
    b = put_store(tmp_path / "b", 1)
    for error in load([b, b, tmp_path / "new"]):
        assert isinstance(error, fp.FormatError)
        assert "ranks 0, 1 (written on node-a)" in str(error)
        assert "fastpersist merge" in str(error)


def test_parts_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    for error in load([put_store(tmp_path / "a", 0), put_store(tmp_path / "b", 1, token=OLD)]):
        assert isinstance(error, fp.FormatError)
        assert "parts of two saves" in str(error)


def test_what_a_save_had_replaced_when_it_died_is_the_step(tmp_path: Path) -> None:
    a, b = put_store(tmp_path / "a" / "step", 0, token=OLD), put_store(tmp_path / "b" / "step", 1, token=NEW)
    hidden = put_store(tmp_path / "b" / ".step.retired-0123456789abcdef", 1, token=OLD)
    found = load([a, b])
    assert [parts.path for parts in found] == [str(a), str(hidden)]
    damaged = hidden / "rank-00002.pt"
    damaged.write_bytes(damaged.read_bytes() + b"longer")
    assert all(isinstance(error, fp.FormatError) for error in load([a, b])), "it is not whole any more"


def test_a_step_that_one_rank_sees_whole_is_no_step_in_parts(tmp_path: Path) -> None:
    a = put_store(tmp_path / "a", 0)

    def look(reader: Any) -> Any:
        if reader.rank:
            return reader.say("read", None)
        return StepParts(reader, str(a), manifest := read_manifest(str(a)), read_record(str(a), manifest))

    error, _ = in_rounds(2, look)
    assert isinstance(error, fp.CoordinationError)
    assert "rank 1 sees all of the step" in str(error)


def own_of(parts: StepParts, rank: int) -> bytes | None:
    source = parts.own_file(f"rank-{rank:05d}.pt")
    if source is None:
        return None
    with source, open(source.fd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def test_each_rank_gets_its_own_file_from_who_sees_it(tmp_path: Path) -> None:
    a, b = put_store(tmp_path / "a", 0), put_store(tmp_path / "b", 1)
    expected = [b"of rank 0", b"of rank 1", b"of rank 2", None]
    for paths in ([a, a, b, b], [b, b, a, a], [b, a, tmp_path / "new", a]):
        assert load(paths, own_of) == expected


def test_a_damaged_file_of_another_rank_is_found_before_it_is_sent(tmp_path: Path) -> None:
    a, b = put_store(tmp_path / "a", 0), put_store(tmp_path / "b", 1)
    (a / "rank-00000.pt").write_bytes(b"of rank X")

    def own(parts: StepParts, rank: int) -> None:
        if rank:  # as `own_file` on the rank that sees it, whose failure ends the load on all
            parts._read("rank-00000.pt")

    _, error = load([b, a], own)
    assert isinstance(error, fp.ChecksumError)


def test_one_process_is_told_where_the_other_parts_are() -> None:
    with pytest.raises(fp.UnsupportedError, match=r"/d holds only a part .* rank 2 \(written on node-b\)"):
        refuse_alone("/d", PartsRecord(NEW, STORES, 0, ()))
