"""A directory as the coordinator saves it: all files of all ranks are listed, or nothing is there on either side."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import hidden_names
from support.shared_files import OWNERS, end_both, expected_file, replicas, saved_by_two, state_of

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.step_listing import read_manifest
from fastpersist.distributed.follower_save import FollowerSave
from fastpersist.formats.manifest import FileEntry


def lead(files: fp.DirectorySave) -> None:
    """Save the file that is cut; on the coordinator."""
    state = state_of(0)
    files.save(state, "state.pt", owners=replicas(state))


def follow(follower: FollowerSave) -> None:
    """Save its counterpart on the follower."""
    state = state_of(1)
    owners = replicas(state)
    follower.save(state, "state.pt", owners, owners.look)


def test_files_of_all_ranks_are_listed_with_their_checksums(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with saved_by_two(path) as (files, follower):
        follower.add_own({"rank": 1}, "rng/1.pt", OWNERS)
        lead(files)
        files.save({"rank": 0}, "rng/0.pt", own=True)
        follow(follower)
        follower.add_own({"rank": 1}, "more.pt", OWNERS)
        files.add_bytes("note", b"of the coordinator")
        assert end_both(files, follower) == [None, None]
        low, high = sorted(files._stats.bytes_by_rank)
        assert low > 1 << 20
        assert high - low <= 4096
    names = ["more.pt", "note", "rng/0.pt", "rng/1.pt", "state.pt"]
    found = [(path / name).read_bytes() for name in names]
    entries = [FileEntry(name, len(data), _native.crc32(data)) for name, data in zip(names, found, strict=True)]
    assert sorted(read_manifest(str(path)).files, key=lambda entry: entry.name) == entries
    assert found[-1] == expected_file(state_of(0), tmp_path / "state.pt")
    assert fp.load(path / "rng/1.pt") == {"rank": 1}


def test_own_files_of_one_name_on_two_ranks_fail_the_save_on_both(tmp_path: Path) -> None:
    with saved_by_two(tmp_path / "c") as (files, follower):
        files.save({"rank": 0}, "rng.pt", own=True)
        follower.add_own({"rank": 1}, "rng.pt", OWNERS)
        errors = end_both(files, follower)
    assert {type(error) for error in errors} == {fp.ConfigError, fp.PeerError}
    assert list(tmp_path.iterdir()) == []


def test_what_the_coordinator_gives_up_fails_for_the_follower_and_leaves_nothing(tmp_path: Path) -> None:
    with saved_by_two(tmp_path / "c") as (files, follower):
        follow(follower)
        lead(files)
        files.abort()
        error = follower.publish().exception(30)
    assert isinstance(error, fp.PeerError)
    assert error.rank == 0
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_a_file_is_planned_is_told_at_once(tmp_path: Path) -> None:
    with saved_by_two(tmp_path / "c") as (files, follower):
        follow(follower)
        with pytest.raises(fp.ConfigError):
            files.save({"no tensor": 1}, "state.safetensors", owners=OWNERS)
        error = follower.publish().exception(30)  # before this rank gives its directory up
    assert isinstance(error, fp.PeerError)
    assert "cannot go into a .safetensors file" in str(error)


def test_what_cannot_be_published_is_told_to_the_follower(tmp_path: Path) -> None:
    with saved_by_two(tmp_path / "c") as (files, follower):
        lead(files)
        follow(follower)
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "theirs").touch()
        errors = end_both(files, follower)
    assert [type(error) for error in errors] == [fp.ConfigError, fp.PeerError]
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert hidden_names(tmp_path) == []
