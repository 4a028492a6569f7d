"""Each adapter, against the real package of its dashboard: what two saves and a load leave there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist.events.delivery import flush
from fastpersist.integrations.monitoring import mlflow, opentelemetry, prometheus, tensorboard, wandb


def save_twice_and_load(root: Path) -> list[fp.SaveStats]:
    """Save steps 10 and 20, and load the newer one; return when all is told."""
    with fp.Checkpointer(root) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, {"weight": torch.randn(1000)})
        checkpoints.wait()
        checkpoints.load()
    assert flush(60)
    return checkpoints.stats()


def fail_to_save(path: Path) -> None:
    with pytest.raises(fp.StorageError):
        fp.save({}, path / "none" / "x.pt")
    assert flush(60)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "board"))
    stop = tensorboard.attach(writer)
    stats = save_twice_and_load(tmp_path / "run")
    stop()
    fp.save({}, tmp_path / "later.pt")
    assert flush(60)
    writer.close()
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    stalls = board.Scalars("checkpoint/stall_s")
    assert [one.step for one in stalls] == [10, 20]
    assert [one.value for one in stalls] == pytest.approx([one.stall_s for one in stats])
    assert [one.step for one in board.Scalars("checkpoint/load_s")] == [20]
    assert [one.value for one in board.Scalars("checkpoint/failed")] == [0, 0]


@pytest.mark.filterwarnings("ignore:codecs.open:DeprecationWarning")  # of mlflow, in Python 3.14
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = package.MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    run_id = client.create_run(client.create_experiment("training")).info.run_id
    stop = mlflow.attach(run_id, client=client)
    stats = save_twice_and_load(tmp_path / "run")
    stop()
    history = client.get_metric_history(run_id, "checkpoint/stall_s")
    assert [(one.step, one.value) for one in history] == [
        (step, pytest.approx(one.stall_s)) for step, one in zip((10, 20), stats, strict=True)
    ]
    assert client.get_metric_history(run_id, "checkpoint/load_s")[0].step == 20


def test_wandb_keeps_the_steps_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = package.init(mode="offline", dir=str(tmp_path), project="training", settings={"x_disable_stats": True})
    try:
        stop = wandb.attach(run)
        run.log({"loss": 0.5})
        stats = save_twice_and_load(tmp_path / "run")
        run.log({"loss": 0.25})
        stop()
        assert run.summary["checkpoint/step"] == 20
        assert run.summary["checkpoint/stall_s"] == pytest.approx(stats[-1].stall_s)
        assert run.summary["loss"] == 0.25
        assert run.step == 2
    finally:
        run.finish()


def test_prometheus(tmp_path: Path) -> None:
    package = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    registry = package.CollectorRegistry()
    stop = prometheus.attach(registry, root="a")
    stats = save_twice_and_load(tmp_path / "run")
    fail_to_save(tmp_path)
    stop()

    def value(name: str, **labels: str) -> Any:
        return registry.get_sample_value(name, {"root": "a", **labels})

    assert value("fastpersist_saves_total", result="committed") == 2
    assert value("fastpersist_saves_total", result="failed") == 1
    assert value("fastpersist_stall_seconds") == pytest.approx(stats[-1].stall_s)
    assert value("fastpersist_written_bytes_total") == sum(one.bytes for one in stats)
    assert value("fastpersist_last_commit_timestamp_seconds") > 1.7e9
    assert value("fastpersist_load_seconds") > 0


def test_prometheus_text_file(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    path = tmp_path / "fastpersist.prom"
    stop = prometheus.write_to(path)
    save_twice_and_load(tmp_path / "run")
    stop()
    samples = {
        (sample.name, sample.labels.get("result")): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }
    assert samples["fastpersist_saves_total", "committed"] == 2
    assert samples["fastpersist_load_seconds", None] > 0


def test_opentelemetry(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    stop = opentelemetry.attach(provider)
    stats = save_twice_and_load(tmp_path / "run")
    fail_to_save(tmp_path)
    stop()
    found = spans.get_finished_spans()
    saves = [span for span in found if span.name == "fastpersist.save"]
    assert [span.attributes.get("fastpersist.step") for span in saves if span.attributes] == [10, 20, None]
    assert [span.status.status_code.name for span in saves] == ["UNSET", "UNSET", "ERROR"]
    first = saves[0]
    assert first.attributes is not None
    assert first.attributes["fastpersist.stall_s"] == stats[0].stall_s
    phases = [span for span in found if span.parent is not None and span.parent.span_id == first.context.span_id]
    assert [span.name for span in phases] == ["fastpersist.capture", "fastpersist.write", "fastpersist.commit"]
    edges = [first.start_time, *(span.end_time for span in phases)]
    assert [span.start_time for span in phases] == edges[:-1]
    assert edges[-1] == first.end_time
    assert [span.name for span in found if span.parent is None].count("fastpersist.load") == 1


def test_a_dashboard_that_fails_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def add_scalar(self, *_: object, **__: object) -> None:
            raise ConnectionError("no network")

    stop = tensorboard.attach(Broken())  # type: ignore[arg-type]
    assert len(save_twice_and_load(tmp_path / "run")) == 2
    stop()
    assert len([record for record in caplog.records if "callback" in record.message]) == 1
    assert json.loads((tmp_path / "run" / "step-00000020" / "MANIFEST.json").read_text())["step"] == 20
