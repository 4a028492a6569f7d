"""`bench stream`: limits and shares from what was measured, shards, and the options that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastpersist.cli import main
from fastpersist.cli.bench.rows import Kind, Measured, Row, Sample
from fastpersist.cli.bench.stream import command, model
from fastpersist.cli.bench.stream.report import Limits, stream_json, stream_text
from fastpersist.cli.bench.stream.rows import Case, PassSample
from fastpersist.cli.bench.stream.ways import MAPPED, OURS, RESIDENT

CASE = Case(batch_size=1, prompt_len=8, gen_len=4, budgets=(100,), memory_bytes=500)
SIZES = {"weight_bytes": 1000, "pass_bytes": 900}
FACTS = dict.fromkeys(
    ("date", "device", "device_model", "file_system", "mount_options", "directory", "kernel", "architecture",
     "cpu_model", "fastpersist", "torch", "python", "fio"), "",
) | {"cpu_count": 2, "memory_bytes": 1 << 30, "load_average": 0.0}  # fmt: skip


def generated(name: str, kind: Kind, pass_s: float, size_bytes: int = 900, **answer: Any) -> Measured:
    full = {
        "first_token_s": 2.0, "prefill_s": 1.0, "peak_bytes": 1 << 20, "device_peak_bytes": None, "written_bytes": 0,
        "tokens": [[1]],
    } | answer  # fmt: skip
    return Measured(Row(name, kind, None), "", [PassSample(pass_s, size_bytes, answer=full, group_peak_bytes=None)])


def read(name: str, seconds: float) -> Measured:
    return Measured(Row(name, "ceiling", None), "", [Sample(seconds, 1000)])


def results() -> list[Measured]:
    return [
        read("fio read", 2.0),
        read("bare read by TensorFile", 1.0),
        generated(OURS, "fastpersist", 1.0),
        generated("another", "peer", 3.0),
        generated(MAPPED, "peer", 2.0),
        Measured(Row("missing", "peer", None), "not installed"),
        generated(RESIDENT, "ceiling", 0.25, prefill_s=0.5),
    ]


def test_limit_is_the_better_disk_or_the_processor() -> None:
    limits = Limits.of(results())
    assert (limits.bytes_per_s, limits.resident_pass_s, limits.resident_prefill_s) == (1000.0, 0.25, 0.5)
    assert limits.pass_s(900) == 0.9
    assert limits.pass_s(100) == 0.25
    assert Limits(None, None, None).pass_s(900) is None


def test_rows_are_compared_with_limit_peers_and_memory() -> None:
    report = stream_json("command", FACTS, [], CASE, SIZES, results())
    rows = {row["name"]: row for row in report["rows"]}
    ours = rows[OURS]
    assert ours["of_limit"] == pytest.approx(0.9)
    assert ours["of_best_peer"] == pytest.approx(2.0)
    assert ours["of_one_read"] == pytest.approx(2.0 / 0.9)
    assert ours["of_resident"] == pytest.approx(0.5)
    assert ours["group_peak_bytes"] is None
    assert "tokens" not in ours["runs"][0]
    assert rows["missing"] == {"name": "missing", "kind": "peer", "note": "not installed"}
    assert report["limits"]["bytes_per_s"] == 1000.0


def test_table_is_printed_without_what_could_not_be_measured() -> None:
    alone = [generated(OURS, "fastpersist", 1.0)]
    text = stream_text("command", FACTS, ["a note"], CASE, SIZES, alone)
    assert "no limit could be measured" in text
    assert "- a note" in text
    text = stream_text("command", FACTS, [], CASE, SIZES, results())
    assert "reading a pass 0.900 s, computing it 0.250 s" in text
    assert "missing: not installed" in text


def test_other_tokens_than_the_mapped_model_fail_our_row_alone() -> None:
    same, other = results(), results()
    other[2] = generated(OURS, "fastpersist", 1.0, tokens=[[2]])
    other[3] = generated("another", "peer", 1.0, tokens=[[2]])
    command._compare_tokens(same)
    command._compare_tokens(other)
    assert [one.note for one in same] == ["", "", "", "", "", "not installed", ""]
    assert [one.note for one in other if one.note] == [f"failed: other tokens than {MAPPED}", "not installed"]


def test_shards_are_cut_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_SHARD_BYTES", 100)
    sizes = {"a": 60, "b": 40, "c": 1, "d": 500, "e": 7}
    weights = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert model._shards(weights) == [["a", "b"], ["c"], ["d"], ["e"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gen-len", "1"], "must be at least 2"),
        (["--budget", "much"], "such as"),
        (["--repeat", "0"], "must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "stream", str(tmp_path), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_missing_packages_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["bench", "stream", str(tmp_path)]) == 2
    assert "needs transformers, accelerate, safetensors" in capsys.readouterr().err
