"""`fastpersist report --html` and `--png`: pages and pictures of a run, from its log of events and its manifests."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from support.filesystems import FullForWrites
from support.run_logs import EPOCH_S, SIZE_BYTES, write_run

import fastpersist as fp
from fastpersist.cli import main
from fastpersist.cli.report.charts import BINS_MAX, Bars, charts_of
from fastpersist.cli.report.disk_rate import probed_rate, rate_line, tuned_rate
from fastpersist.cli.report.records import Run, read_run, steps_there
from fastpersist.cli.report.svg import nice_step, tick_text
from fastpersist.commit.filesystem import using
from fastpersist.errors import FastPersistError
from fastpersist.events.delivery import flush
from fastpersist.events.log import read_events

VOID = {"meta", "br", "img", "input", "link"}
HOSTILE = "<script>alert(1)</script>"


class Page(HTMLParser):
    """The tags of a page, with their attributes, and its texts; every tag is closed."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(made)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def names(self) -> set[str]:
        return {tag for tag, _ in self.tags}


def page_of(root: Path, *words: str) -> Page:
    path = root.parent / f"{root.name}.html"
    assert main(["report", str(root), "--html", str(path), *words]) == 0
    return Page(path.read_text())


def run_of(root: Path) -> Run:
    return read_run(str(root), read_events(root), steps_there(str(root)))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A real run: eight saves, of which the last three steps are there."""
    path = tmp_path / "run"
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    with fp.Checkpointer(path, optimizer=optimizer, keep=3) as checkpoints:
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
            checkpoints.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
            checkpoints.wait()
    assert flush(60)
    return path


# ------------------------------------------------------------------------------------------------- what it says


def test_page_of_a_real_run_has_all_its_saves(trained: Path) -> None:
    page = page_of(trained)
    assert f"Checkpoints of {trained}" in page.texts
    ids = {attributes["id"] for tag, attributes in page.tags if tag == "section" and "id" in attributes}
    assert ids == {"timeline", "durations", "stall", "rate", "steps", "content", "retention"}
    assert page.texts.count("committed") == 8
    facts = list(zip(page.texts, page.texts[1:], strict=False))
    assert {("8", "saves committed"), ("3", "steps that are there"), ("0", "saves failed")} <= set(facts)


def test_page_needs_no_network_and_runs_nothing(trained: Path) -> None:
    page = page_of(trained)
    assert page.names <= {
        *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "b", "span", "div", "section"),
        *("svg", "rect", "path", "circle", "text", "table", "thead", "tbody", "tr", "th", "td", "footer", "code"),
    }
    assert not [
        name for _, attributes in page.tags for name in attributes if name in ("src", "href") or name[:2] == "on"
    ]
    policies = [attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    text = (trained.parent / "run.html").read_text()
    assert "url(" not in text
    assert "@import" not in text


def test_bytes_are_told_by_what_they_are(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sizes,) = [chart for chart in charts_of(run_of_with_content(trained)) if chart.name == "content"]
    shown = {row.label: row.lanes[0][0].end for row in sizes.bars}
    parameters = 4 * (100 * 100 + 100)
    assert shown["model"] == parameters
    assert 2 * parameters <= shown["optimizer"] <= 2 * parameters + 64  # two moments, and the step of each parameter
    assert sum(shown.values()) == fp.inspect(trained / "step-00000007").size_bytes


def run_of_with_content(root: Path) -> Run:
    from fastpersist.cli.report.contents import content_of

    run = run_of(root)
    run.content_bytes, run.content_note = content_of(str(root), steps_there(str(root)))
    return run


def test_root_without_a_log_is_reported_from_its_manifests(trained: Path) -> None:
    (trained / "events.jsonl").unlink()
    run = run_of(trained)
    assert (run.has_log, [save.step for save in run.saves]) == (False, [5, 6, 7])
    page = page_of(trained)
    assert page.texts.count("committed") == 3
    assert any("Without a log of events, removed steps are missing." in text for text in page.texts)


def test_steps_that_are_older_than_the_log_are_added_from_their_manifests(trained: Path) -> None:
    lines = (trained / "events.jsonl").read_text().splitlines(keepends=True)
    (trained / "events.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] == 7))
    assert [save.step for save in run_of(trained).saves] == [5, 6, 7]


def test_damaged_step_is_not_there(trained: Path) -> None:
    (trained / "step-00000006" / "state.pt").unlink()
    (trained / "step-00000005" / "MANIFEST.json").write_text("{")
    assert [found.step for found in steps_there(str(trained))] == [7]


@pytest.mark.parametrize("name", ["missing", "step-00000007", "step-00000007/state.pt"])
def test_what_is_no_directory_of_checkpoints_gets_no_page(
    name: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(trained / name), "--html", str(trained.parent / "out.html")]) == 2
    assert name in capsys.readouterr().err
    assert not (trained.parent / "out.html").exists()


def test_empty_root_has_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "LATEST").write_text("")
    assert "There is no save of which anything is known." in page_of(tmp_path / "run").texts


def test_failures_stand_there_with_their_messages(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20, fails=(4, 7))
    run = run_of(tmp_path / "run")
    assert (run.failure_count, [failure[1] for failure in run.failures]) == (2, [40, 70])
    page = page_of(tmp_path / "run")
    place = page.texts.index("NoSpaceError: the disk is full")
    assert page.texts[place - 3 : place] == ["70", "0", "2"]  # the last of them, its rank, how many


def test_slow_rank_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20, ranks=4)
    run = run_of(tmp_path / "run")
    assert {number: rank.slowest_count for number, rank in run.ranks.items()} == {0: 0, 1: 0, 2: 0, 3: 20}
    assert run.ranks[3].bytes == 20 * SIZE_BYTES
    page = page_of(tmp_path / "run")
    place = page.texts.index("Who was slow")
    assert page.texts[place + 7 : place + 11] == ["3", "20", "20", "1.3 s"]
    assert "Bytes by rank, of all saves" in page.texts


def test_length_of_a_step_is_told_beside_a_save_and_without(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5)
    (chart,) = [chart for chart in charts_of(run_of(tmp_path / "run")) if chart.name == "steps"]
    found = {line.name: [y for _, y in line.points] for line in chart.lines}
    assert found["without a save"] == [None, *[0.8] * 4]
    assert found["beside a save"] == [None, *[0.81] * 4]


def test_retention_is_what_was_there_at_each_time(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 10, keep=3)
    run = run_of(tmp_path / "run")
    assert run.kept[:3] == [(pytest.approx(EPOCH_S + 8 * n + 0.6), n + 1, (n + 1) * SIZE_BYTES) for n in range(3)]
    assert run.kept[-1][1:] == (3, 3 * SIZE_BYTES)
    assert max(step_count for _, step_count, _ in run.kept) == 4


def test_timeline_has_write_sync_and_commit_at_the_end_of_a_save(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 30)
    (chart,) = [chart for chart in charts_of(run_of(tmp_path / "run")) if chart.name == "timeline"]
    assert [row.label for row in chart.bars] == [str(10 * n) for n in range(18, 30)]
    upper, lower = chart.bars[-1].lanes
    assert [(span.start, span.words) for span in upper] == [(0.0, "capture 300 ms"), (0.0, "stall 4 ms")]
    assert [span.end for span in lower] == [pytest.approx(end, abs=1e-5) for end in (0.45, 0.55, 0.6)]


# ------------------------------------------------------------------------------------------ long and hostile runs


@pytest.mark.parametrize("save_count", [1000, 10_000])
def test_number_of_drawn_elements_does_not_grow_with_the_run(save_count: int, tmp_path: Path) -> None:
    write_run(tmp_path / "run", save_count)
    run = run_of(tmp_path / "run")
    assert len(run.saves) == save_count
    for chart in charts_of(run):
        assert all(len(line.points) <= BINS_MAX + 1 for line in chart.lines)
        assert len(chart.bars) <= 16
    page = page_of(tmp_path / "run")
    assert len(page.tags) < 4000


def line_of(kind: str = "committed", **values: object) -> bytes:
    line = {"event": kind, "time_s": 1.79e9, "step": 3, "rank": 0, "path": "x", **values}
    return json.dumps(line).encode()


def test_bytes_of_a_rank_are_those_it_wrote_itself(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    lines = [line_of(bytes=1000, bytes_by_writer=400, bytes_at_gate=100), line_of(rank=1, bytes=500)]
    (root / "events.jsonl").write_bytes(b"\n".join([*lines, b""]))
    assert {number: rank.bytes for number, rank in run_of(root).ranks.items()} == {0: 500, 1: 500}


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00 no text",
        b'{"event": "committed"}',
        line_of(time_s=1e308, bytes=1e299),
        line_of(time_s=-5),
        line_of(step=99999999999999999999999, bytes=1),
        line_of(rank=9999999999999999, bytes=5),
        line_of(step=2**63 - 1, write_s=1e18, stall_s=1e18, capture_s=-1, bytes=1e18, sync_s="nan", engine=HOSTILE),
        line_of("failed", error=HOSTILE),
        line_of("failed", error=7),
        line_of()[:60],
        b"[" * 50_000,
    ],
    ids=["bytes", "bare", "huge", "negative", "step", "rank", "all", "script", "number", "cut", "deep"],
)
def test_hostile_line_does_no_harm(line: bytes, tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_run(root, 3)
    with (root / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    page = page_of(root)
    assert "script" not in page.names
    assert page.texts.count("committed") >= 3
    assert not re.search(r"\b(nan|inf)\b", (tmp_path / "run.html").read_text(), re.IGNORECASE)


def test_hostile_names_and_manifests_do_no_harm(tmp_path: Path) -> None:
    root = tmp_path / '"><script>alert(1)<'
    with fp.Checkpointer(root) as checkpoints:
        checkpoints.save(1, {HOSTILE: torch.ones(3)})
    manifest = root / "step-00000001" / "MANIFEST.json"
    stats = {"engine": HOSTILE, "write_s": 1e308, "stall_s": "long", "capture_s": -3.0}
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "stats": stats, "time_s": 6e10}))
    (root / "events.jsonl").unlink()
    out = tmp_path / "out.html"
    assert main(["report", str(root), "--html", str(out)]) == 0
    page = Page(out.read_text())
    assert "script" not in page.names
    assert HOSTILE[:40] in page.texts


def test_step_that_cannot_be_looked_into_is_said_in_place_of_its_contents(trained: Path) -> None:
    for step in (5, 6, 7):
        path = trained / f"step-{step:08d}" / "state.pt"
        path.write_bytes(bytes(path.stat().st_size))
    assert "content" not in [chart.name for chart in charts_of(run_of_with_content(trained))]
    assert page_of(trained).texts.count("committed") == 8


# ------------------------------------------------------------------------------------------------- the disk's rate


def test_rate_of_the_tuning_file_is_drawn(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = trained.parent / "tuning.toml"
    tuning.write_text(f"# Machine\n# {rate_line(3.21e9)}\nchunk_bytes = 4194304\n")
    monkeypatch.setenv("FASTPERSIST_CONFIG", str(tuning))
    assert tuned_rate(str(trained)) == 3.21e9
    texts = page_of(trained).texts
    assert {"3.21 GB/s", "the disk's own rate", "the disk's own"} <= set(texts)


@pytest.mark.parametrize("text", ["", "chunk_bytes = 4194304\n", "# Rate: fast\n", "\x00\xff"])
def test_tuning_file_without_a_rate_gives_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = tmp_path / "tuning.toml"
    tuning.write_text(text)
    monkeypatch.setenv("FASTPERSIST_CONFIG", str(tuning))
    assert tuned_rate(str(tmp_path)) is None


def test_probe_writes_and_leaves_nothing(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpersist.cli.report.disk_rate._PROBE_S", 0.01)
    before = sorted(trained.iterdir())
    assert probed_rate(str(trained)) > 0
    assert sorted(trained.iterdir()) == before
    assert any("a probe of two seconds" in text for text in page_of(trained, "--probe").texts)


def test_failed_probe_leaves_nothing(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise FastPersistError("no disk")

    monkeypatch.setattr(fp.TensorFile, "write", fail)
    before = sorted(trained.iterdir())
    with pytest.raises(FastPersistError, match="no disk"):
        probed_rate(str(trained))
    assert sorted(trained.iterdir()) == before


# ------------------------------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize(
    ("span", "step"),
    [(0.0, 1.0), (4.0, 1.0), (7.3, 2.0), (23.0, 5.0), (1e18, 2e17), (float("inf"), 1.0), (0.004, 0.001)],
)
def test_marks_of_an_axis_are_round(span: float, step: float) -> None:
    assert nice_step(span) == pytest.approx(step)


def test_marks_say_their_unit() -> None:
    assert [tick_text(0, "s"), tick_text(0.2, "s"), tick_text(2e9, "bytes/s"), tick_text(5, "count")] == [
        "0",
        "200 ms",
        "2 GB/s",
        "5",
    ]


def test_pictures_are_written_as_png(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = trained.parent / "pictures"
    assert main(["report", str(trained), "--png", str(out)]) == 0
    written = sorted(path.name for path in out.iterdir())
    assert written == sorted(
        f"{name}.png" for name in ("timeline", "durations", "stall", "rate", "steps", "content", "retention")
    )
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in written)
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_text_of_a_file_is_no_formula_in_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fastpersist.cli.report.charts import Chart, Span
    from fastpersist.cli.report.png import draw_charts

    chart = Chart("x", "title", "bytes", bars=[Bars(r"$\frac{$", [[Span(0.0, 1.0, 0, "")]], "$$")])
    assert draw_charts([chart], str(tmp_path)) == [str(tmp_path / "x.png")]


def test_without_matplotlib_it_is_said_what_to_install(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(trained), "--png", str(trained.parent / "pictures")]) == 2
    assert "pip install 'fastpersist[plots]'" in capsys.readouterr().err


def test_one_save_is_a_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)})
    out = tmp_path / "out.html"
    assert main(["report", str(tmp_path / "run"), "--html", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"{out}: 1 save, 1 step kept\n")
    assert "At the end 1 step, " in out.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--json", "--html", "x.html"], "--json prints the table"), (["--probe"], "add --html FILE or --png DIR")],
    ids=["json", "probe"],
)
def test_options_that_do_not_fit_together_are_refused(
    words: list[str], said: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(trained), *words]) == 2
    assert said in capsys.readouterr().err


def test_page_that_cannot_be_written_ends_with_2(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trained), "--html", str(trained / "missing" / "x.html")]) == 2
    assert "missing/x.html" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_report_that_cannot_be_written_leaves_the_older_one(option: str, trained: Path) -> None:
    if option == "--png":
        pytest.importorskip("matplotlib")
    out = trained.parent / "out"
    words = ["report", str(trained), option, str(out)]
    assert main(words) == 0
    before = {path: path.read_bytes() for path in (out.iterdir() if option == "--png" else [out])}
    with using(FullForWrites()):
        assert main(words) == 2
    assert {path: path.read_bytes() for path in before} == before
    assert list(out.parent.rglob("*.pending-*")) == []


def test_probe_waits_for_a_page_that_can_be_written(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastpersist.cli.report.disk_rate.probed_rate", lambda root: pytest.fail("it has measured"))
    assert main(["report", str(trained), "--probe", "--html", str(trained / "missing" / "x.html")]) == 2
    assert "missing/x.html" in capsys.readouterr().err
