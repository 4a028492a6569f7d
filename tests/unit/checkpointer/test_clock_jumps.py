"""A clock that jumps, as when it is set or a machine wakes, ends no wait and changes no order."""

from __future__ import annotations

import ast
import itertools
import time
from pathlib import Path

import pytest
import torch
from support.ranks_in_threads import assert_went_well, begin, ranks_in_threads, say_all

import fastpersist as fp

ROOT = Path(fp.__file__).parent

READS_WALL_CLOCK = {
    "saving/directory_files.py": 1,  # notes in the manifest when a checkpoint was made, for people
    "commit/file_commit.py": 1,  # what a dead save left is a day old, by the file system's clock
    "commit/removal.py": 1,  # the same
    "events/delivery.py": 1,  # when an event was, for people
    "saving/pending_save.py": 2,  # the same
}


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the wall clock jump by a day to and fro, between any two looks at it."""
    jumps = itertools.cycle([0.0, 86_400.0, -86_400.0, 1e9, -1e9])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))


def test_nothing_that_waits_or_measures_looks_at_the_wall_clock() -> None:
    found: dict[str, int] = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("cli/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_time = isinstance(node, ast.Attribute) and (
                (isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("time", "time"))
                or node.attr in ("now", "utcnow", "today")
            )
            if is_time or (isinstance(node, ast.ImportFrom) and node.module == "time" and "time" in _names(node)):
                found[name] = found.get(name, 0) + 1
    assert found == READS_WALL_CLOCK
    native = ROOT.parent / "csrc"
    assert [str(path) for path in native.rglob("*.[ch]*") if "system_clock" in path.read_text()] == []


def _names(node: ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names]


def test_ranks_wait_for_each_other_as_long_as_before(jumping: None) -> None:
    with ranks_in_threads(3) as ranks:
        for _ in range(5):
            assert_went_well(say_all(begin(ranks)))


def test_the_order_of_steps_is_that_of_their_saves(tmp_path: Path, jumping: None) -> None:
    with fp.Checkpointer(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3, 4, 5, 6):
            checkpoints.save(step, {"w": torch.full((4,), float(step))}).result()
        checkpoints.save(2, {"w": torch.full((4,), 2.0)}, overwrite=True).result()  # the newest now
        assert checkpoints.steps() == [2, 5, 6]
    with fp.Checkpointer(tmp_path) as checkpoints:
        assert torch.equal(checkpoints.load()["w"], torch.full((4,), 2.0))
    assert [path.name for path in tmp_path.glob(".step-*")] == []
