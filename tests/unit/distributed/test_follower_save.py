"""A follower's part of a directory: it makes nothing visible, and removes what it has made if the save fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.shared_files import OWNERS, end_both, replicas, saved_by_two, state_of

import fastpersist as fp
from fastpersist.distributed import follower_save
from fastpersist.errors import SkippedError


def test_it_is_done_when_the_coordinator_has_published_and_not_before(tmp_path: Path) -> None:
    with saved_by_two(tmp_path / "c") as (files, follower):
        states = state_of(0), state_of(1)
        owners = replicas(states[1])
        follower.save(states[1], "state.pt", owners, owners.look)
        pending = follower.publish()
        files.save(states[0], "state.pt", owners=replicas(states[0]))
        assert not pending.done()
        assert not (tmp_path / "c").exists()
        files.publish()
        assert pending.result(30) == tmp_path / "c"
    assert (tmp_path / "c" / "state.pt").exists()
    assert pending.stats.bytes > 1 << 20
    assert pending.stats.engine


def test_what_it_gives_up_fails_for_the_coordinator_with_the_reason(tmp_path: Path) -> None:
    with saved_by_two(tmp_path / "c") as (files, follower):
        follower.add_own({"x": torch.ones(10)}, "deep/own.pt", OWNERS)
        follower.abort(SkippedError("not today"))
        files.save({"x": 1}, "x.pt", own=True)
        error = files.publish().exception(30)
    assert isinstance(error, fp.PeerError)
    assert error.rank == 1
    assert "not today" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_after_a_failure_nothing_more_is_captured_or_written(tmp_path: Path) -> None:
    with saved_by_two(tmp_path / "c") as (files, follower):
        follower.add_own({"x": 1}, "x.pt", OWNERS)
        files.abort()
        pending = follower.publish()
        assert isinstance(pending.exception(30), fp.PeerError)
        follower.add_own(NeverPickled(), "y.pt", OWNERS)
        follower.save(NeverPickled(), "z.pt", OWNERS, OWNERS.look)


class NeverPickled:
    def __reduce__(self) -> str:
        raise AssertionError("a save that has failed takes no more files")


@pytest.mark.parametrize("how", ["unplannable", "no engine"])
def test_a_failure_of_its_own_is_raised_here_and_told_there(tmp_path: Path, how: str) -> None:
    with saved_by_two(tmp_path / "c") as (files, follower):
        if how == "unplannable":
            with pytest.raises(fp.ConfigError):
                follower.add_own({"no tensor": 1}, "x.safetensors", OWNERS)
        else:
            follower._engine = "no such engine"
            follower.add_own({"x": torch.ones(10)}, "x.pt", OWNERS)
        files.save({"x": 1}, "own.pt", own=True)
        first, other = end_both(files, follower)
    assert isinstance(first, fp.PeerError)
    assert "no such engine" in str(first) or "cannot go into a .safetensors file" in str(first)
    assert isinstance(other, fp.ConfigError if how == "no engine" else fp.PeerError)
    assert list(tmp_path.iterdir()) == []


def test_of_what_was_made_in_a_removed_directory_nothing_stays_but_what_others_made(tmp_path: Path) -> None:
    made = [tmp_path / "pending" / "a", tmp_path / "pending" / "a" / "own.pt", tmp_path / "other" / "own.pt"]
    made[0].mkdir(parents=True)
    made[1].touch()
    made[2].parent.mkdir()
    made[2].touch()
    (tmp_path / "other" / "theirs").touch()
    follower_save._remove_made([*map(str, made), str(tmp_path / "nothing")])
    assert sorted(os.listdir(tmp_path)) == ["other"]
    assert os.listdir(tmp_path / "other") == ["theirs"]
