"""Ranks find out who sees whose files: roots of one process stand for the file systems of several machines."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.runs import hidden_names

import fastpersist as fp
from fastpersist.commit.directory_commit import PendingDirectory
from fastpersist.distributed.node_local.detection import StoreMap, Stores, StoreSeeker, find_stores
from fastpersist.formats.split_manifest import PARTS_NAME

STEP = "step-00000001"


class Ranks:
    """Ranks with these roots, in one save of one step; rank 0 is the coordinator."""

    def __init__(self, roots: list[Path], stack: ExitStack) -> None:
        self.roots = roots
        self.asked: list[str] = []
        self.owned: list[int] = []
        roots[0].mkdir(parents=True, exist_ok=True)
        self.directory = PendingDirectory.create(str(roots[0] / STEP), overwrite=False)
        stack.callback(self.directory.abort)
        self.seekers = []
        for rank, root in enumerate(roots[1:], 1):
            stores = Stores(lambda rank=rank: self.owned.append(rank), "parts")  # type: ignore[misc]
            self.seekers.append(StoreSeeker(str(root / STEP), rank, stores))
        for seeker in self.seekers:
            stack.callback(seeker._give_back)

    def say(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked += {"look", "find"} & message.keys()
        return [{}, *(seeker.reply(message) for seeker in self.seekers)]

    def find(self, known: Stores) -> StoreMap | None:
        return find_stores(self.say, known, self.directory.path, overwrite=False)

    def directories(self, found: StoreMap | None) -> list[str | None]:
        go = {} if found is None else {"split": found.go()}
        return [seeker.directory(go) for seeker in self.seekers]


@contextmanager
def ranks_at(*roots: Path) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(list(roots), stack)


@pytest.fixture
def known() -> Stores:
    return Stores(lambda: None, "parts")


def test_ranks_that_see_one_directory_by_two_names_are_one_store(tmp_path: Path, known: Stores) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    with ranks_at(tmp_path / "a", tmp_path / "link", tmp_path / "a") as ranks:
        assert ranks.find(known) is None
        assert known.are_one()
        assert ranks.asked == ["look"]
        assert ranks.directories(None) == [None, None]
        assert ranks.owned == []


@pytest.mark.parametrize("names", ["aabb", "abab", "abbb", "abca", "abcd"])
def test_each_rank_writes_where_the_first_rank_of_its_store_does(tmp_path: Path, known: Stores, names: str) -> None:
    roots = [tmp_path / name for name in names]
    firsts = [names.index(name) for name in names]
    with ranks_at(*roots) as ranks:
        found = ranks.find(known)
        assert found is not None
        assert found.first_ranks == known.first_ranks == firsts
        assert not known.are_one()
        assert sorted([0, *found.names]) == sorted(set(firsts))
        assert ranks.owned == [seeker._rank for seeker in ranks.seekers if seeker.is_first()] == sorted(found.names)
        for rank, directory in enumerate(ranks.directories(found), 1):
            assert directory is not None
            assert Path(directory).is_dir()
            assert Path(directory).parent == roots[rank]
        assert [len(hidden_names(root)) for root in dict.fromkeys(roots)] == [1] * len(set(names))


def test_of_stores_that_are_known_only_the_first_ranks_make_directories(tmp_path: Path, known: Stores) -> None:
    roots = [tmp_path / name for name in "abb"]
    with ranks_at(*roots) as ranks:
        ranks.find(known)
    with ranks_at(*roots) as ranks:
        found = ranks.find(known)
        assert found is not None
        assert (found.first_ranks, list(found.names), ranks.asked) == ([0, 1, 1], [1], ["look"])
        assert ranks.owned == [1]
    known.forget()
    with ranks_at(*roots) as ranks:
        ranks.find(known)
        assert ranks.asked == ["look", "find"]


@pytest.mark.parametrize(("before", "after"), [("aa", "ab"), ("ab", "aa"), ("abb", "abc")])
def test_files_that_a_rank_does_not_see_any_more_fail_the_save(
    tmp_path: Path, known: Stores, before: str, after: str
) -> None:
    with ranks_at(*(tmp_path / name for name in before)) as ranks:
        ranks.find(known)
    with ranks_at(*(tmp_path / name for name in after)) as ranks:
        with pytest.raises(fp.StorageError, match=f"rank {len(after) - 1} does not see the same files"):
            ranks.directories(ranks.find(known))


def test_ranks_that_do_not_agree_on_who_sees_whom_are_refused(known: Stores) -> None:
    def say(message: dict[str, Any]) -> list[dict[str, Any]]:
        return [{}, *({"name": f".{rank}", "first": 3 - rank} for rank in (1, 2))]

    with pytest.raises(fp.CoordinationError, match=r"\[0, 2, 1\]"):
        find_stores(say, known, "/root/.pending", overwrite=False)


def test_a_file_system_that_is_not_mounted_is_no_store(tmp_path: Path, known: Stores) -> None:
    known.hosts = ["host"] * 2
    with ranks_at(tmp_path / "a" / "run", tmp_path / "b" / "run") as ranks:
        with pytest.raises(fp.StorageError, match=r"rank 1 on .* has no .*/b\. Is a file system") as refusal:
            ranks.find(known)
        assert refusal.value.errno == errno.ENOENT
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("used", [False, True])
def test_directories_that_rank_0_made_are_unmade_unless_somebody_uses_them(
    tmp_path: Path, known: Stores, used: bool
) -> None:
    root = tmp_path / "mount" / "run"
    root.mkdir(parents=True)
    (root / ".lock").touch()
    known.made, known.hosts = [str(root.parent), str(root)], ["node-a", "node-b"]
    with pytest.raises(fp.StorageError, match=rf"rank 0 on node-a had no {root.parent}"):
        known.require_parents({})
    if used:
        (root / "theirs").touch()
    known.forget()
    assert root.parent.exists() is used
    known.forget()


def test_a_directory_without_parts_of_ours_is_not_replaced(tmp_path: Path, known: Stores) -> None:
    step = tmp_path / "b" / STEP
    step.mkdir(parents=True)
    (step / "MANIFEST.json").write_text("{}")
    with ranks_at(tmp_path / "a", tmp_path / "b") as ranks:
        with pytest.raises(fp.ConfigError):
            ranks.find(known)
    (step / PARTS_NAME).touch()  # nobody's without rank 0's
    with ranks_at(tmp_path / "a", tmp_path / "b") as ranks:
        assert ranks.find(known) is not None
