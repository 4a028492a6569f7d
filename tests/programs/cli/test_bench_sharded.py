"""`bench ranks --sharded`: all ways take turns, what they have saved is what they load, and nothing is left."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastpersist.cli import main
from fastpersist.cli.bench.ranks import sharded_work as work
from fastpersist.cli.bench.ranks.processes import RankProcesses

MIB = 1 << 20
PEER = "torch_checkpointing"


def run_sharded(directory: Path, *options: str) -> dict[str, Any]:
    """Run the command in this process, with two ranks, and return its JSON."""
    target = directory / "result.json"
    words = ["bench", "ranks", str(directory), "--sharded", "--ranks", "2", "--size-mb", "8", "--repeat", "1"]
    assert main([*words, "--json", str(target), *options]) == 0
    result: dict[str, Any] = json.loads(target.read_text())
    target.unlink()
    assert list(directory.iterdir()) == []
    return result


def rows_of(result: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result[name]}


def test_all_ways_take_turns_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_sharded(tmp_path, "--between", "0.01")
    assert result["command_line"].endswith("--sharded --between 0.01 --repeat 1")
    assert 0.8 * 8 < result["state_bytes"] / MIB < 1.2 * 8
    expected = {"save": work.SAVE_WAYS, "load": work.LOAD_WAYS, "async": work.ASYNC_WAYS}
    has_peer = importlib.util.find_spec(PEER) is not None
    for name, ways in expected.items():
        rows = rows_of(result, name)
        assert [row for row in rows if not row.startswith("fio")] == list(ways)
        for way, row in rows.items():
            if (way == PEER and not has_peer) or way.startswith("fio"):
                continue
            assert row["note"] == ""
            assert len(row["seconds"]) == 1
            assert row["size_bytes"] == result["state_bytes"]
            assert row["peak_bytes"] is not None
    for way, row in rows_of(result, "async").items():
        if way != PEER or has_peer:
            assert 0 < row["stall_s"][0] < row["seconds"][0]
    if shutil.which("fio"):
        assert len(rows_of(result, "save")["fio write, 2 jobs"]["seconds"]) == 1
        assert len(rows_of(result, "load")["fio read"]["seconds"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert re.search("checked each time: (none of it was left|.* NOT COLD)", text)
    assert "async, 2 ranks" in text


def test_what_is_not_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither fio nor torch_checkpointing, whether they are there or not."""
    site, disk = tmp_path / "site", tmp_path / "disk"
    site.mkdir()
    disk.mkdir()
    (site / f"{PEER}.py").write_text("raise ImportError('is refused by the test')")
    monkeypatch.syspath_prepend(str(site))  # children look where we look
    monkeypatch.setenv("PATH", "")
    result = run_sharded(disk, "--flat", "--parts", "save", "load")
    assert "async" not in result
    for name in ("save", "load"):
        rows = rows_of(result, name)
        assert "is refused by the test" in rows[PEER]["note"]
        assert "apt install fio" in next(row["note"] for row in result[name] if row["kind"] == "ceiling")
        assert len(rows[work.OURS]["seconds"]) == 1
        assert rows[work.OURS]["ratio_to_fio"] is None
        assert rows["DCP, 1 thread" if name == "save" else "DCP"]["ratio_to_one_rank"] > 0
    assert "is refused by the test" in capsys.readouterr().out


def test_what_is_loaded_is_compared_with_what_was_saved(tmp_path: Path) -> None:
    with RankProcesses([2], str(tmp_path), 60) as ranks:
        ranks.call(2, work.hold_shards, 4 * MIB, 2)
        wanted = ranks.call(2, work.digest)
        ranks.call(2, work.save, str(tmp_path / "saved"), 2, work.OURS)
        ranks.call(2, work.forget)
        assert ranks.call(2, work.digest) != wanted
        ranks.call(2, work.load, str(tmp_path / "saved"), 2, "DCP")
        assert ranks.call(2, work.digest) == wanted
