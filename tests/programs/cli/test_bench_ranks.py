"""`bench ranks`: it measures what it says with real ranks, says which of them failed, and leaves nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_runs import check_interrupted, children_of

from fastpersist.cli import main
from fastpersist.cli.bench.ranks import command as bench_ranks
from fastpersist.cli.bench.ranks import work
from fastpersist.cli.bench.ranks.processes import Failed, RankProcesses, whole_span
from fastpersist.cli.bench.ranks.tables import Result, row_json
from fastpersist.cli.bench.rows import Measured, Row, Sample
from fastpersist.errors import ConfigError

MIB = 1 << 20


def run_ranks(directory: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Run the command in this process and return its JSON."""
    target = directory / "result.json"
    assert main(["bench", "ranks", str(directory), "--json", str(target), *options]) == code
    result: dict[str, Any] = json.loads(target.read_text())
    target.unlink()
    return result


# --- the command ---


def test_every_way_is_measured_with_real_ranks_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_ranks(tmp_path, "--ranks", "3", "2", "--size-mb", "8", "--repeat", "2")

    assert (result["format"], result["command"]) == (1, "ranks")
    assert (
        result["command_line"]
        == f"fastpersist bench ranks {tmp_path} --ranks 2 3 --size-mb 8 --parts save load --repeat 2"
    )
    assert result["machine"]["torch"] == torch.__version__
    saves = {row["name"]: row for row in result["save"]}
    loads = {row["name"]: row for row in result["load"]}
    assert list(saves) == [
        *("fio write", "fio write, 2 jobs", "fio write, 3 jobs", "fp.save, one rank alone"),
        *("fp.save, 2 ranks together", "fp.save, 3 ranks together", "torch.save + fsync, rank 0"),
    ]
    assert list(loads) == ["fio read"] + [
        name
        for count in (2, 3)
        for name in (
            *(f"fp.load, {count} ranks together", f"fp.load, {count} ranks, by each"),
            f"torch.load, {count} ranks, by each",
        )
    ]
    for row in [*saves.values(), *loads.values()]:
        if row["kind"] == "ceiling" and row["note"]:
            continue  # no fio, or it cannot write here
        assert row["note"] == ""
        assert len(row["seconds"]) == 2
        if row in result["save"]:
            assert row["all_ranks_bytes_per_s"] is None
        else:
            assert row["all_ranks_bytes_per_s"] == pytest.approx(row["rank_count"] * row["bytes_per_s"])
    assert 7 * MIB < result["state_bytes"] <= 8 * MIB <= result["file_bytes"] + MIB
    together, alone = saves["fp.save, 3 ranks together"], saves["fp.save, one rank alone"]
    assert together["rank_count"] == 3
    assert together["engine"] == alone["engine"] != ""
    assert together["ratio_to_one_rank"] == pytest.approx(alone["median_s"] / together["median_s"])
    if "seconds" in saves["fio write, 3 jobs"]:
        fio = saves["fio write, 3 jobs"]
        assert together["ratio_to_fio"] == pytest.approx(together["bytes_per_s"] / fio["bytes_per_s"])
    assert list(tmp_path.iterdir()) == []
    text = capsys.readouterr().out
    assert all(name in text for name in [*saves, *loads])
    assert re.search("checked each time: (none of it was left|.* NOT COLD)", " ".join(text.split()))


def test_what_limits_ranks_and_what_agreement_costs_is_measured_when_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--ranks 3 --size-mb 8 --repeat 2 --warm --load-ways --limits --one-core-each --parts save load agreement"
    result = run_ranks(tmp_path, *words.split())
    assert result["command_line"] == (
        f"fastpersist bench ranks {tmp_path} --ranks 3 --size-mb 8 --parts save load agreement --warm --load-ways "
        "--limits --one-core-each --repeat 2"
    )
    rows = {row["name"]: row for name in ("save", "load", "agreement") for row in result[name]}
    limits = ("bare pwrite, one file", "bare pwrite, a file each", "null engine", "memcpy")
    names = [f"{limit}, {ranks}" for limit in limits for ranks in ("1 rank", "3 ranks")]
    names += [f"fp.load, 3 ranks together: {way}" for way in ("ahead", "alone")]
    for name in names:
        assert rows[name]["note"] == ""
        assert len(rows[name]["seconds"]) == 2
    for name in ("4 KiB, 1 rank", "4 KiB, 3 ranks"):
        assert len(rows[name]["seconds"]) == len(rows[name]["stall_s"]) == 20
        assert all(
            0 < stall_s <= whole_s
            for stall_s, whole_s in zip(rows[name]["stall_s"], rows[name]["seconds"], strict=True)
        )
    text = " ".join(capsys.readouterr().out.split())
    assert re.search("checked each time: (all of it was there|up to [0-9]+ bytes were missing)", text)
    assert "is kept on one core" in text
    assert list(tmp_path.iterdir()) == []


def test_rows_fail_alone_and_only_our_own_make_the_command_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(work, "save_by_torch", work.drop_state)  # which takes no path
    result = run_ranks(tmp_path, "--ranks", "2", "--size-mb", "4", "--repeat", "1")
    saves = {row["name"]: row for row in result["save"]}
    assert saves["torch.save + fsync, rank 0"]["note"].startswith(
        "failed: Failed: rank 0 of 1 failed in drop_state: TypeError: "
    )
    assert "apt install fio" in saves["fio write, 2 jobs"]["note"]
    assert saves["fp.save, 2 ranks together"]["note"] == ""
    assert saves["fp.save, 2 ranks together"]["ratio_to_fio"] is None
    assert "failed in drop_state" in capsys.readouterr().out

    monkeypatch.setattr(work, "load_alone", work.drop_state)
    result = run_ranks(tmp_path, "--ranks", "2", "--size-mb", "4", "--repeat", "1", code=1)
    loads = {row["name"]: row for row in result["load"]}
    assert "rank " in loads["fp.load, 2 ranks, by each"]["note"]
    assert loads["torch.load, 2 ranks, by each"]["note"] == ""
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_cannot_save_at_all_are_an_answer_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", "unheard-of")
    assert main(["bench", "ranks", str(tmp_path), "--ranks", "2", "--size-mb", "4"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "of 2 failed in save_together" in said
    assert "unheard-of" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_being_stopped_removes_every_file_and_ends_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    words = ["ranks", str(tmp_path), "--ranks", "2", "--size-mb", "16", "--repeat", "100000"]
    check_interrupted(tmp_path, *words, when=".fastpersist-bench-*/run*", child_count=2, number=number)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size-mb", str(10**9)], "ask for less"),
        (["--json", "none/x.json"], "x.json"),
        (["--parts", "async"], "--sharded"),
        (["--sharded", "--limits"], "--limits is about one file"),
        (["--sharded", "--parts", "agreement"], "agreement is about one file"),
    ],
)
def test_what_cannot_be_measured_here_is_refused_at_once(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ranks", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_disk_without_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": MIB}))
    assert main(["bench", "ranks", str(tmp_path), "--size-mb", "4"]) == 2
    assert "smaller --size-mb" in capsys.readouterr().err


def test_one_rank_is_no_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "ranks", str(tmp_path), "--ranks", "1"])
    assert ended.value.code == 2
    assert "must be at least 2, at most 64" in capsys.readouterr().err


def test_directory_behind_the_numbers_is_an_answer_that_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "ranks", "--ranks", "2", str(tmp_path)])
    assert ended.value.code == 2
    assert f"'{tmp_path}' is no whole number (DIR goes before the options)" in capsys.readouterr().err


def test_ranks_may_be_asked_for_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def refuse(arguments: argparse.Namespace) -> None:
        asked.append(arguments.ranks)
        raise ConfigError("asked")

    monkeypatch.setattr(bench_ranks, "_check", refuse)
    for words in (["--ranks", "2", "--ranks", "3"], ["--ranks", "2", "3"], []):
        assert main(["bench", "ranks", str(tmp_path), *words]) == 2
    assert asked == [[2, 3], [2, 3], [2, 4]]


def test_help_says_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "ranks", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("process_group", "torch.save on rank 0 with fsync", "out of the page cache", "fio"):
        assert words in text


# --- the ranks ---


def test_rank_that_dies_is_an_error_not_a_hang_and_no_more_is_asked(tmp_path: Path) -> None:
    before = set(children_of(os.getpid()))
    with RankProcesses([2], str(tmp_path), 60) as ranks:
        assert ranks.call(2, work.hold_state, 4 * MIB)[1] > 3 * MIB
        victim = next(
            pid for pid in set(children_of(os.getpid())) - before if "bench.ranks.processes" in command_of(pid)
        )
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(Failed, match=r"rank [01] of 2 has died in hold_state"):
            ranks.call(2, work.hold_state, 4 * MIB)
        with pytest.raises(Failed, match="has died in hold_state"):
            ranks.call(1, work.drop_state)
        started = set(children_of(os.getpid())) - before
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_ranks_meet_in_any_directory_that_a_shell_can_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scratch = Path("of #1?")
    scratch.mkdir()
    with RankProcesses([1], str(scratch), 60) as ranks:
        ranks.call(1, work.drop_state)
        assert list(scratch.iterdir())


def test_a_rank_that_fails_ends_the_call_and_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "x.pt")
    with RankProcesses([2], str(tmp_path), 30) as ranks, pytest.raises(Failed, match="of 2 failed in save"):
        ranks.call(2, work.hold_state, 4 << 20)
        ranks.call(2, work.save_together, missing, 2)


def test_a_span_is_from_the_first_beginning_to_the_last_end() -> None:
    assert whole_span([(2.0, 5.0), (1.5, 3.0), (4.0, 4.5)]) == 3.5


def test_bare_writes_of_all_ranks_are_the_state(tmp_path: Path) -> None:
    with RankProcesses([2], str(tmp_path), 60) as ranks:
        size_bytes = ranks.call(2, work.hold_state, 4 * MIB)[0]
        ranks.call(1, work.save_alone, str(tmp_path / "state.pt"))
        for path, one_each in (("one", False), ("each", True)):
            ranks.call(2, work.write_bare, str(tmp_path / path), 2, one_each)
    weights = torch.load(tmp_path / "state.pt", weights_only=True)["weights"].values()
    whole = b"".join(tensor.numpy().tobytes() for tensor in weights)
    assert len(whole) == size_bytes
    assert (tmp_path / "one").read_bytes() == whole
    assert (tmp_path / "each.0").read_bytes() + (tmp_path / "each.1").read_bytes() == whole


def test_files_of_all_ways_hold_the_same(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt")]
    with RankProcesses([2], str(tmp_path), 60) as ranks:
        ranks.call(2, work.hold_state, 4 * MIB)
        ranks.call(2, work.save_together, paths[0], 2)
        ranks.call(1, work.save_alone, paths[1])
        ranks.call(1, work.save_by_torch, paths[2])
        for load in (work.load_together, work.load_alone, work.load_by_torch):
            assert whole_span(ranks.call(2, load, paths[0], 2)) > 0
    first, *others = [torch.load(path, weights_only=True)["weights"] for path in paths]
    for other in others:
        assert list(first) == list(other)
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_rates_are_of_the_one_file_and_of_all_ranks() -> None:
    fio = Measured(Row("fio read", "ceiling", None), "", [Sample(1.0, 100)])
    ours = Measured(Row("fp.load, 4 ranks together", "fastpersist", None), "", [Sample(2.0, 100)])
    row = row_json(Result(ours, 4, fio), "load")
    assert (row["bytes_per_s"], row["all_ranks_bytes_per_s"], row["ratio_to_fio"]) == (50, 200, 0.5)
    assert row["ratio_to_one_rank"] is None
