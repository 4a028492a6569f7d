"""What a Checkpointer tells: stats, manifest, log, explain, warnings; and which arguments it refuses."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import Run, held_writers
from support.training import PATIENCE_S

import fastpersist as fp

STATE = {"weights": torch.arange(1000.0), "name": "a state"}


def manifest_in(path: Path) -> Any:
    return json.loads((path / "MANIFEST.json").read_text())


# --- what is told


def test_stats_say_where_the_bytes_went(tmp_path: Path) -> None:
    run = Run().advance()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {**run.state(), "copied": torch.ones(5000)}, rank_state={"own": torch.ones(3)})
    for step, stats in zip((1, 2), checkpointer.stats(), strict=True):
        path = tmp_path / f"step-{step:08d}"
        assert stats.step == step
        assert Path(stats.path) == path
        assert stats.error is None
        assert stats.bytes == sum((path / name).stat().st_size for name in ("state.pt", "rank-00000.pt"))
        assert stats.bytes_before_return >= 20_000
        assert stats.bytes_by_writer + stats.bytes_at_gate >= 3 * 4 * 35_007
        assert stats.engine in {probe.name for probe in fp.engines(tmp_path)}
        for seconds in (stats.stall_s, stats.plan_s, stats.capture_s, stats.write_s, stats.sync_s, stats.commit_s):
            assert 0 < seconds < PATIENCE_S
        assert stats.plan_s <= stats.stall_s


def test_manifest_says_what_was_saved_when_and_what_it_cost(tmp_path: Path) -> None:
    began_s = time.time()
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, STATE, rank_state={"a": 1}, metrics={"loss": 0.5, "bad": math.nan})
    manifest = manifest_in(tmp_path / "step-00000005")
    assert manifest["format"] == 1
    assert manifest["step"] == 5
    assert began_s <= manifest["time_s"] <= time.time()
    assert manifest["metrics"] == {"loss": 0.5, "bad": "nan"}
    assert manifest["versions"]["torch"] == torch.__version__
    assert {"fastpersist", "python"} <= set(manifest["versions"])
    assert manifest["host"]["pid"] == os.getpid()
    assert {"stall_s", "capture_s", "write_s", "sync_s", "bytes_by_writer", "engine"} <= set(manifest["stats"])
    for entry in manifest["files"]:
        data = (tmp_path / "step-00000005" / entry["name"]).read_bytes()
        assert entry["size_bytes"] == len(data)
        assert int(entry["crc32"], 16) == zlib.crc32(data)
    assert [entry["name"] for entry in manifest["files"]] == ["rank-00000.pt", "state.pt"]


def test_checkpointer_says_what_it_is(tmp_path: Path) -> None:
    checkpointer = fp.Checkpointer(tmp_path, keep=3, keep_best=(1, "loss", "min"))
    with held_writers():
        checkpointer.save(1, STATE, metrics={"loss": 1.0})
        rules = "keep=3, keep_best=(1, 'loss', 'min')"
        assert repr(checkpointer) == f"<Checkpointer of {tmp_path}: {rules}, 1 unfinished>"
    checkpointer.close()
    assert repr(checkpointer) == f"<Checkpointer of {tmp_path}: {rules}, closed>"
    assert repr(fp.Checkpointer(tmp_path)) == f"<Checkpointer of {tmp_path}: every step is kept>"


@pytest.mark.parametrize(
    "options",
    [
        {"busy": "never"},
        {"on_error": "ignore"},
        {"gate": "none"},
        {"keep": 0},
        {"keep_every": -1},
        {"keep_best": (1, "loss", "up")},
        {"max_host_bytes": -1},
        {"optimizer": object()},
        {"constant": 5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_make_no_sense_are_refused_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(fp.ConfigError):
        fp.Checkpointer(tmp_path, **options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"metrics": {"loss": "low"}}, "loss"),
        ({"metrics": {"loss": None}}, "loss"),
        ({"metrics": {"loss": torch.ones(2)}}, "loss"),
        ({"metrics": {"loss": 10**400}}, "loss"),
        ({"metrics": {5: 1.0}}, "5"),
        ({"metrics": {"\ud800": 1.0}}, "surrogate"),
        ({"state": {"rank_state": 1}, "rank_state": 2}, "rank_state"),
    ],
    ids=["text", "none", "vector", "huge", "number-as-name", "no-text", "two-rank-states"],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(fp.ConfigError, match=said):
            checkpointer.save(1, **{"state": STATE, **arguments})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "value", [2, 0.5, True, torch.tensor(0.5), torch.ones(1, requires_grad=True).sum(), torch.tensor([3])]
)
def test_metrics_may_be_anything_that_is_one_number(tmp_path: Path, value: Any) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE, metrics={"loss": value})
    assert manifest_in(tmp_path / "step-00000001")["metrics"] == {"loss": float(torch.as_tensor(value).detach())}


@pytest.mark.parametrize("make", [lambda: 5, lambda: [1, 2], lambda: torch.arange(4), lambda: {"a": 1}, lambda: 0])
def test_rank_state_may_be_any_object(tmp_path: Path, make: Callable[[], Any]) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE, rank_state=make())
        loaded = checkpointer.load()["rank_state"]
    assert torch.equal(loaded, make()) if isinstance(loaded, torch.Tensor) else loaded == make()
