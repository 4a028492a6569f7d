"""All stores publish their parts, the coordinator's last; what was published and never committed is taken back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ranks_in_threads import at_once, begin, ranks_in_threads
from support.runs import hidden_names

import fastpersist as fp
from fastpersist.commit.step_listing import read_manifest
from fastpersist.distributed.node_local import publishing
from fastpersist.distributed.node_local.detection import Stores
from fastpersist.distributed.node_local.publishing import CoordinatorStores, FollowerStore, SplitShares
from fastpersist.distributed.sessions import Session
from fastpersist.formats.byte_ranges import Extent
from fastpersist.formats.manifest import FileEntry
from fastpersist.formats.split_manifest import PARTS_NAME, parse_parts
from fastpersist.saving.directory_save import Publication

STEP = "step-00000001"
SHARES = SplitShares("state.pt", 30, 7, {0: [Extent(0, 10)], 1: [Extent(10, 20)]}, {0: 1, 1: 2})


class Two:
    """Two ranks, each with a file system of its own, that have written their parts of a file."""

    def __init__(self, directory: Path, sessions: list[Session], **files: bytes) -> None:
        self.sessions = sessions
        self.paths = [directory / name / STEP for name in "ab"]
        self.paths[0].parent.mkdir(exist_ok=True)
        self.first = CoordinatorStores(Stores(lambda: None, "parts"), sessions[0])
        self.other = FollowerStore(str(self.paths[1]), 1, Stores(lambda: None, "parts"))
        pending = directory / "pending"
        pending.mkdir(exist_ok=True)
        self.first.find(lambda message: [{}, self.other.reply(message)], str(pending), overwrite=True)
        written_to = self.other.directory(self.first.go())
        assert written_to is not None
        Path(written_to, "state.pt.part-00001").write_bytes(bytes(20))
        Path(written_to, "rank-00001.pt").write_bytes(b"own")
        assert self.first.take_shares(SHARES) == []
        assert not self.first.takes_own(1, FileEntry("rank-00001.pt", 3, 4))
        for name, data in files.items():
            (pending / name).write_bytes(data)
            assert self.first.takes(FileEntry(name, len(data), None))
        self.record = self.first.record(str(pending))

    def end(self, lead: Callable[[], object]) -> list[Any]:
        """Have the coordinator do something, and the follower end its save; return what comes of each."""

        def follow() -> bytes:
            return self.other.end(self.sessions[1], {"bytes": 20, "path": "not told"}, lambda: None)

        return at_once([lead, follow])

    def commit(self) -> None:
        self.first.commit(Publication(1, {"loss": 0.5}, 9, True, lambda: None))


@contextmanager
def two(directory: Path, **files: bytes) -> Iterator[Two]:
    with ranks_in_threads(2) as ranks:
        made = Two(directory, begin(ranks), **files)
        try:
            yield made
        finally:
            made.other.abort()


def test_a_store_has_its_parts_and_a_record_of_all_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_PIECE_BYTES", 100)
    small = os.urandom(1234)
    with two(tmp_path, metadata=small, nothing=b"") as ranks:

        def lead() -> None:
            ranks.commit()
            assert ranks.paths[1].exists(), "other stores are first"
            ranks.sessions[0].answer(ranks.first.end(str(ranks.paths[0]), {}))

        assert ranks.end(lead)[0] is None
        manifest = read_manifest(str(ranks.paths[1]))
        by_name = {entry.name: entry for entry in manifest.files}
        assert by_name["state.pt.part-00001"] == FileEntry("state.pt.part-00001", 20, 2)
        assert by_name["rank-00001.pt"] == FileEntry("rank-00001.pt", 3, 4)
        assert (ranks.paths[1] / "metadata").read_bytes() == small
        assert by_name.keys() == {"state.pt.part-00001", "rank-00001.pt", "metadata", "nothing", PARTS_NAME}
        assert (manifest.step, manifest.metrics) == (1, {"loss": 0.5})
        assert "not told" not in str(manifest)
        other = parse_parts((ranks.paths[1] / PARTS_NAME).read_bytes(), "b")
        assert ranks.record is not None
        first = parse_parts(ranks.record, "a")
        assert (first.token, first.stores, first.store, other.store) == (other.token, other.stores, 0, 1)
        assert [[part.rank for part in one.files[0].parts] for one in (first, other)] == [[0], [1]]
        assert [store.ranks for store in first.stores] == [(0,), (1,)]


@pytest.mark.parametrize("replaces", [False, True])
def test_what_rank_0_could_not_publish_is_taken_back(tmp_path: Path, replaces: bool) -> None:
    if replaces:
        older = tmp_path / "b" / STEP
        older.mkdir(parents=True)
        (older / PARTS_NAME).touch()
        (older / "MANIFEST.json").write_text("older")

    with two(tmp_path) as ranks:

        def lead() -> None:
            ranks.commit()
            ranks.first.undo(str(ranks.paths[0]))
            ranks.sessions[0].fail(fp.StorageError(28, "no room"))

        _, error = ranks.end(lead)
    assert isinstance(error, fp.PeerError)
    assert "no room" in str(error)
    assert hidden_names(tmp_path / "b") == []
    if replaces:
        assert (tmp_path / "b" / STEP / "MANIFEST.json").read_text() == "older"
    else:
        assert not (tmp_path / "b" / STEP).exists()


def test_nothing_is_taken_back_of_what_is_visible_after_all(tmp_path: Path) -> None:
    with two(tmp_path) as ranks:

        def lead() -> None:
            ranks.commit()
            ranks.paths[0].mkdir()
            assert ranks.record is not None
            (ranks.paths[0] / PARTS_NAME).write_bytes(ranks.record)
            ranks.first.undo(str(ranks.paths[0]))  # the rename was done, and its sync failed
            ranks.sessions[0].fail(fp.StorageError(5, "the disk is gone"))

        _, error = ranks.end(lead)
        assert isinstance(error, fp.PeerError)
        ranks.other.abort(error)
    assert ranks.paths[1].exists()


def test_what_was_replaced_goes_when_rank_0_has_published(tmp_path: Path) -> None:
    older = tmp_path / "b" / STEP
    older.mkdir(parents=True)
    (older / PARTS_NAME).touch()
    (older / "MANIFEST.json").write_text("older")
    with two(tmp_path) as ranks:

        def lead() -> None:
            ranks.commit()
            assert len(hidden_names(tmp_path / "b")) == 1, "until the end it is what is committed"
            ranks.sessions[0].answer(ranks.first.end(str(ranks.paths[0]), {}))

        assert not [one for one in ranks.end(lead) if isinstance(one, Exception)]
        ranks.other.finish()
    assert hidden_names(tmp_path / "b") == []
    assert "older" not in (older / "MANIFEST.json").read_text()


@pytest.mark.parametrize("sent", [b"", b"x" * 11])
def test_a_file_of_another_length_than_was_told_is_refused(sent: bytes) -> None:
    told = iter([b"123", sent])
    with pytest.raises(fp.CoordinationError, match="not as long as it has said"):
        publishing._joined(lambda: next(told), 10)


def test_where_there_is_one_store_nothing_is_told_of_stores(tmp_path: Path) -> None:
    with ranks_in_threads(2) as ranks:
        session, _ = begin(ranks)
        stores = CoordinatorStores(None, session)
        assert not stores.may_be_several()
        assert stores.go() == {}
        assert stores.record(str(tmp_path)) is None
        assert stores.takes_own(1, FileEntry("rank-00001.pt", 3, 4))
        assert [entry.name for entry in stores.take_shares(SHARES)] == ["state.pt.part-00001"]
        stores.commit(Publication(1, {}, 9, True, lambda: None))
        stores.undo(str(tmp_path))
        assert stores.end(str(tmp_path), {}) == b"{}"
        assert session.message_count == 0
