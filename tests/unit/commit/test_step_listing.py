"""Which steps a root holds, what is wrong with those that do not count, and in which order they were committed."""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.filesystems import failing_lookup

from fastpersist.commit import step_listing
from fastpersist.commit.locks import HeldDirectory
from fastpersist.commit.removal import hidden_path
from fastpersist.commit.step_listing import (
    Commit,
    candidate_steps,
    check_files,
    committed_steps,
    in_commit_order,
    next_commit_number,
    read_commits,
    read_committed,
    read_manifest,
)
from fastpersist.errors import CheckpointNotFoundError, FormatError, StorageError
from fastpersist.formats.manifest import (
    COMMIT_NUMBER_MAX,
    MANIFEST_LIMIT_BYTES,
    CheckpointManifest,
    FileEntry,
    encode_manifest,
    step_name,
)

CONTENT = b"seven b"


def make_step(root: Path, step: int, *, number: int | None = None, time_s: float = 1.0, where: str = "") -> Path:
    """Make a committed step of one file, under its own name or another."""
    path = root / (where or step_name(step))
    path.mkdir(parents=True)
    (path / "state.pt").write_bytes(CONTENT)
    files = (FileEntry("state.pt", len(CONTENT)),)
    manifest = CheckpointManifest(files, step, time_s, {"loss": float(step)}, {}, {}, {}, number)
    (path / "MANIFEST.json").write_bytes(encode_manifest(manifest))
    return path


# --- which steps there are


def test_candidates_are_all_directories_of_steps_under_final_or_retired_names(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-123456789", ".step-00000003.retired-0f", ".step-00000004.pending-0f"):
        (tmp_path / name).mkdir()
    for name in ("LATEST", ".lock", "step-1", "step-00000005.pt", "best"):
        (tmp_path / name).touch()
    assert candidate_steps(str(tmp_path)) == {1, 3, 123456789}


def test_root_that_is_not_there_has_none_and_a_file_is_no_root(tmp_path: Path) -> None:
    assert candidate_steps(str(tmp_path / "run")) == set()
    (tmp_path / "run").touch()
    with pytest.raises(StorageError, match=r"listing .*run"):
        candidate_steps(str(tmp_path / "run"))


def test_committed_steps_are_those_whose_files_are_all_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3, 4):
        make_step(tmp_path, step)
    (tmp_path / step_name(2) / "state.pt").unlink()
    (tmp_path / step_name(3) / "MANIFEST.json").write_text("{")
    (tmp_path / step_name(4) / "MANIFEST.json").unlink()
    make_step(tmp_path, 5, where=os.path.basename(hidden_path(str(tmp_path / step_name(5)), "retired")))
    found = committed_steps(str(tmp_path))
    assert {step: manifest.step for step, manifest in found.items()} == {1: 1, 5: 5}
    told = [record.getMessage() for record in caplog.records if "is no committed step" in record.getMessage()]
    assert sorted(line.split(" is no")[0] for line in told) == [str(tmp_path / step_name(step)) for step in (2, 3, 4)]


# --- one step


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "state.pt.*cannot be read: No such file"),
        (lambda file: file.write_bytes(CONTENT[:-1]), "has 6 bytes, its manifest says 7"),
        (lambda file: (file.unlink(), file.mkdir()), "is no regular file"),
    ],
)
def test_file_that_is_not_as_the_manifest_says_is_an_error(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = make_step(tmp_path, 1)
    manifest = read_manifest(str(path))
    check_files(str(path), manifest)
    damage(path / "state.pt")
    with pytest.raises(FormatError, match=message):
        check_files(str(path), manifest)
    with pytest.raises(FormatError, match=message):
        read_committed(str(tmp_path), 1, lambda _, manifest: manifest)
    found = read_committed(str(tmp_path), 1, lambda _, manifest: manifest, checks_files=lambda manifest: False)
    assert found == manifest


def test_file_that_cannot_be_looked_up_is_an_error_of_the_disk_and_no_damage(tmp_path: Path) -> None:
    path = make_step(tmp_path, 1)
    with failing_lookup(path / "state.pt"), pytest.raises(StorageError, match=r"looking up .*state\.pt: Input/output"):
        check_files(str(path), read_manifest(str(path)))


def test_missing_file_of_a_rank_names_the_rank(tmp_path: Path) -> None:
    manifest = CheckpointManifest((FileEntry("rank-00012.pt", 1),), 1, 0.0, {}, {}, {}, {})
    with pytest.raises(FormatError, match=r"\(rank 12 wrote it\)"):
        check_files(str(tmp_path), manifest)


def test_manifest_that_is_missing_or_too_long_is_an_error(tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "nowhere", make_step(tmp_path, 1) / "state.pt"):
        with pytest.raises(CheckpointNotFoundError, match="never finished, or is no checkpoint"):
            read_manifest(str(missing))
    with open(tmp_path / "MANIFEST.json", "wb") as file:
        file.truncate(MANIFEST_LIMIT_BYTES + 1)
    with pytest.raises(FormatError):
        read_manifest(str(tmp_path))


def test_step_that_is_replaced_while_it_is_read_is_read_anew(tmp_path: Path) -> None:
    make_step(tmp_path, 1, number=1)
    numbers = []

    def read(held: HeldDirectory, manifest: CheckpointManifest) -> int | None:
        numbers.append(manifest.commit_number)
        if len(numbers) == 1:
            shutil.rmtree(tmp_path / step_name(1))
            make_step(tmp_path, 1, number=2)
            raise FormatError("its bytes are gone", path=held.place)
        return manifest.commit_number

    assert read_committed(str(tmp_path), 1, read) == 2
    assert numbers == [1, 2]


def test_step_that_is_replaced_again_and_again_is_given_up(tmp_path: Path) -> None:
    make_step(tmp_path, 1)

    def read(held: HeldDirectory, _: CheckpointManifest) -> None:
        shutil.rmtree(tmp_path / step_name(1))
        make_step(tmp_path, 1)
        raise FormatError("its bytes are gone", path=held.place)

    with pytest.raises(StorageError, match=r"step 1 .* was replaced again and again"):
        read_committed(str(tmp_path), 1, read)


def test_step_that_is_removed_while_it_is_looked_for_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_step(tmp_path, 1)
    make_step(tmp_path, 2)
    candidates = candidate_steps(str(tmp_path))
    shutil.rmtree(tmp_path / step_name(2))
    monkeypatch.setattr(step_listing, "candidate_steps", lambda root: candidates)
    assert list(committed_steps(str(tmp_path))) == list(read_commits(str(tmp_path))) == [1]
    with pytest.raises(CheckpointNotFoundError, match="there is no step 2"):
        read_committed(str(tmp_path), 2, lambda *_: None)


@pytest.mark.parametrize("list_steps", [committed_steps, read_commits])
def test_steps_that_replace_all_those_that_were_listed_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, list_steps: Callable[[str], dict[int, object]]
) -> None:
    make_step(tmp_path, 1)
    find = step_listing.committed_path
    last = 1

    def find_late(parent: str, name: str) -> str | None:
        nonlocal last
        if last < 4:  # as retention that keeps one step, of a run that saves faster than this process looks
            shutil.rmtree(tmp_path / step_name(last))
            last += 1
            make_step(tmp_path, last)
        return find(parent, name)

    monkeypatch.setattr(step_listing, "committed_path", find_late)
    assert list(list_steps(str(tmp_path))) == [4]


# --- the order of commits


def test_commits_are_what_the_manifests_say(tmp_path: Path) -> None:
    make_step(tmp_path, 1, number=7, time_s=5.0)
    make_step(tmp_path, 2)
    (make_step(tmp_path, 3) / "MANIFEST.json").write_text("{")
    (make_step(tmp_path, 4, number=8) / "state.pt").unlink()  # loads go by it, too, and go back from such a step
    assert read_commits(str(tmp_path)) == {
        1: Commit(7, 5.0, {"loss": 1.0}),
        2: Commit(None, 1.0, {"loss": 2.0}),
        3: None,
        4: Commit(8, 1.0, {"loss": 4.0}),
    }


def commit(number: int | None, time_s: float = 0.0) -> Commit:
    return Commit(number, time_s, {})


@pytest.mark.parametrize(
    ("commits", "expected"),
    [
        ({}, []),
        ({10: commit(1), 30: commit(2), 11: commit(3)}, [10, 30, 11]),
        ({1: commit(1, 30.0), 2: commit(2, 10.0), 3: commit(3, 20.0)}, [1, 2, 3]),  # the clock was set back
        # Without numbers: by time; among those with one, before the first that is younger.
        ({4: commit(None, 100.0), 3: commit(None, 200.0), 2: commit(5, 300.0), 1: commit(None, 400.0)}, [4, 3, 2, 1]),
        # A manifest that cannot be read: right behind the step below it, or before all.
        ({10: commit(3), 11: None, 12: None, 20: commit(1), 30: commit(2)}, [20, 30, 10, 11, 12]),
        ({1: None, 2: commit(1)}, [1, 2]),
        # At the greatest number there is, the time decides.
        ({1: commit(COMMIT_NUMBER_MAX, 2.0), 2: commit(COMMIT_NUMBER_MAX, 1.0)}, [2, 1]),
    ],
)
def test_order_of_commits(commits: dict[int, Commit | None], expected: list[int]) -> None:
    for listed in itertools.islice(itertools.permutations(commits.items()), 24):
        assert in_commit_order(dict(listed)) == expected


def test_what_is_committed_next_is_the_newest_whatever_happened_before() -> None:
    chance = random.Random(1)
    for _ in range(200):
        commits: dict[int, Commit | None] = {}
        for step in chance.sample(range(100), 12):
            number = chance.choice([None, chance.randrange(COMMIT_NUMBER_MAX - 1)])
            commits[step] = chance.choice([None, commit(number, chance.uniform(0.0, 9.0))])
        last = chance.choice([step for step in range(101) if step not in commits])
        commits[last] = commit(next_commit_number(commits.values()), chance.uniform(0.0, 9.0))
        behind = in_commit_order(commits)[in_commit_order(commits).index(last) + 1 :]
        assert all(commits[step] is None or commits[step].number is None for step in behind)  # type: ignore[union-attr]
        assert sorted(in_commit_order(commits)) == sorted(commits)


def test_next_number_has_a_limit() -> None:
    assert next_commit_number([]) == next_commit_number([None, commit(None, math.inf)]) == 1
    assert next_commit_number([commit(4), None, commit(9), commit(2)]) == 10
    assert next_commit_number([commit(COMMIT_NUMBER_MAX)]) == COMMIT_NUMBER_MAX
