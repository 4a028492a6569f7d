"""save_async with a share of several ranks: what they are told when, and that a failure publishes nothing. The order of
saves to one path.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.states import pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.file_commit import PendingFile
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.saving.containers import Container
from fastpersist.saving.file_save import FileOptions, save_file_async
from fastpersist.saving.ownership import Owners, Ownership
from fastpersist.saving.sources import Holders, SourceTable
from fastpersist.saving.write_file import WrittenFile, write_container
from fastpersist.transfer.progress import Poll

PATIENCE_S = 30.0
STATE = {"w": torch.arange(1000)}


class WholeShare:
    """A share that is the whole file, and notes what is done with it."""

    def __init__(self, container: Container, path: Path, failure: BaseException | None = None) -> None:
        self.container = container
        self.told: list[str] = []
        self._path = path
        self._failure = failure

    @property
    def sources(self) -> SourceTable:
        return self.container.sources

    @property
    def holders(self) -> Holders:
        return self.container.holders

    @property
    def wrappers(self) -> Sequence[torch.Tensor]:
        return self.container.wrappers

    def names_of(self, source: int) -> list[str]:
        return self.container.names_of(source)

    def fail(self, error: BaseException) -> None:
        self.told.append(f"failed: {type(error).__name__}, {len(pending_files(self._path.parent))} pending")

    def write_pending(
        self, file: PendingFile, *, engine: str, poll: Poll | None = None, snapshot: _native.Snapshot | None = None
    ) -> WrittenFile:
        self.told.append("write")
        return write_container(self.container, file.fd, file.target.path, engine=engine, poll=poll, snapshot=snapshot)

    def settle(self) -> None:
        self.told.append(f"settle, visible: {self._path.exists()}")
        if self._failure is not None:
            raise self._failure

    def tell_published(self) -> None:
        self.told.append(f"published, visible: {self._path.exists()}")

    def bytes_by_rank(self) -> list[int]:
        return [8000, 0]


def save_shared(path: Path, failure: BaseException | None = None) -> tuple[fp.PendingSave, WholeShare]:
    shares: list[WholeShare] = []

    def share(container: Container, _look: Callable[[], Ownership]) -> WholeShare:
        shares.append(WholeShare(container, path, failure))
        return shares[0]

    pending = save_file_async(STATE, str(path), Owners(None, (), "optimizer"), FileOptions(), share=share)
    return pending, shares[0]


def test_other_ranks_are_told_when_the_file_is_visible(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    pending, share = save_shared(path)
    assert pending.result(PATIENCE_S) == path
    assert torch.equal(torch.load(path)["w"], STATE["w"])
    assert share.told[:3] == ["write", "settle, visible: False", "published, visible: True"]
    assert pending.stats.bytes_by_rank == [8000, 0]


def test_other_ranks_are_told_of_a_failure_before_the_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    failure = fp.PeerError("rank 1 is gone")
    pending, share = save_shared(path, failure)
    assert pending.exception(PATIENCE_S) is failure
    assert share.told == ["write", "settle, visible: False", "failed: PeerError, 1 pending"]
    assert not path.exists()
    assert not pending_files(tmp_path)


@pytest.mark.parametrize("reason", ["it is no regular file", "skip_data"])
def test_several_ranks_do_not_write_in_place(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "state.pt"
    if reason != "skip_data":
        os.mkfifo(path)
    torch.serialization._serialization_tls.skip_data = reason == "skip_data"
    try:
        with pytest.raises(fp.UnsupportedError, match=f"several ranks cannot write .*{reason}"):
            save_shared(path)
    finally:
        torch.serialization._serialization_tls.skip_data = False


def test_a_path_that_ends_like_a_directory_is_refused(tmp_path: Path) -> None:
    for path in (f"{tmp_path}/", f"{tmp_path}/new/"):
        for save in (fp.save, fp.save_async):
            with pytest.raises(fp.ConfigError, match="names a directory"):
                save({}, path, make_parents=True)
    assert not (tmp_path / "new").exists()


def test_the_result_names_the_file_also_after_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    os.symlink(os.devnull, "in_place")
    pendings = [fp.save_async(STATE, name) for name in ("model.pt", "in_place")]
    monkeypatch.chdir("elsewhere")
    for pending, name in zip(pendings, ("model.pt", "in_place"), strict=True):
        assert pending.result() == tmp_path / name
        assert pending.stats.path == str(tmp_path / name)


def test_options_that_are_no_bools_are_refused() -> None:
    for name in ("durable", "checksum", "replace_links", "make_parents", "in_place"):
        with pytest.raises(fp.ConfigError, match=name):
            FileOptions(**{name: "no"})  # type: ignore[arg-type]


class HeldSync(Filesystem):
    """Files become durable once the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def sync(self, fd: int, path: str) -> None:
        assert self.gate.wait(PATIENCE_S)
        super().sync(fd, path)


def test_a_save_is_not_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with using(held := HeldSync()):
        earlier = fp.save_async({"state": torch.zeros(3)}, path)
        opening = threading.Timer(0.2, held.gate.set)
        opening.start()
        fp.save({"state": torch.ones(3)}, path, durable=False)
        earlier.result()
        opening.join()
    assert torch.equal(torch.load(path)["state"], torch.ones(3))


def test_a_save_may_be_made_when_an_earlier_one_to_its_path_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    saved = threading.Event()

    def again() -> None:
        fp.save({"state": torch.ones(3)}, path)
        saved.set()

    fp.save_async({"state": torch.zeros(3)}, path).when_finished(again)
    assert saved.wait(PATIENCE_S)
    assert torch.equal(torch.load(path)["state"], torch.ones(3))
