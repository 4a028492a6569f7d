"""benchmarks/gpu.py and gpu.sh run on the CPU, with sizes so small that the figures mean nothing, and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMALL = ["--device", "cpu", "--size-mb", "10", "--rounds", "1", "--parameters", "40000", "--budget", "200"]
TORCH_SAVES = ["torch.save", "torch.save, CRC off", "torch.save, CRC off, pinned"]
OURS = ["fp.save", "fp.save, checksum=False"]


def expect_rows(part: Any, names: list[str]) -> None:
    """All rows have had their turn, and what they moved is what it should be."""
    assert [name for name in part["rows"] if not name.startswith("disk")][: len(names)] == names
    for name, row in part["rows"].items():
        assert not row["note"], (name, row)
        assert len(row["seconds"]) == 1
        assert row["integrity"] == ("moves no state" if row["kind"] == "yardstick" else "equal")


DYING_PART = """
import sys
if "--run-part" in sys.argv and sys.argv[sys.argv.index("--run-part") + 1] == "tmpfs":
    import os, torch
    torch.save = lambda *_: os.abort()
"""


def test_every_part_says_what_it_has_found(tmp_path: Path) -> None:
    """One of them dies on its way, which costs no other its figures."""
    disk, result_path = tmp_path / "disk", tmp_path / "result.json"
    disk.mkdir()
    (tmp_path / "sitecustomize.py").write_text(DYING_PART)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(BENCHMARKS / "gpu.py"), str(disk), *SMALL, "--json", str(result_path)],
        capture_output=True,
        text=True,
        check=False,
        # No fio, whether it is there or not: its rows need more time than all others.
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "PATH": "/nowhere"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert not list(disk.iterdir())
    result = json.loads(result_path.read_text())
    parts = result["parts"]
    assert list(parts) == ["save", "tmpfs", "load", "memory", "overlap"]
    expect_rows(parts["save"], [*OURS, *TORCH_SAVES, "safetensors save_file", "dcp.async_save, until durable"])
    loads = ["fp.load(map_location)", "fp.load_into", "torch.load(map_location)", "torch.load(mmap, map_location)"]
    expect_rows(parts["load"], [*loads, "safetensors load_file(device)"])
    assert any("fio is not installed" in note for note in parts["save"]["notes"])
    assert any("page cache" in note for note in parts["load"]["notes"])
    expect_overlap(parts["overlap"]["values"]["overlap"])
    memory = parts["memory"]["values"]["memory"]
    assert len(memory["saves"]) == 5
    assert all("peak_bytes" in save for save in memory["saves"].values()), memory
    assert [parts["tmpfs"]["rows"][name]["integrity"] for name in OURS] == ["equal", "equal"]
    assert parts["tmpfs"]["rows"]["torch.save"]["first_s"] is None
    assert "this part is incomplete: exit status -6" in parts["tmpfs"]["notes"]
    assert "Fatal Python error: Aborted" in parts["tmpfs"]["log_tail"]
    assert [name for name, part in parts.items() if not part["is_complete"]] == ["tmpfs"]
    assert len(result["bars"]) == 9
    assert {bar["verdict"] for bar in result["bars"]} == {"not measured"}, "no target is met, or missed, on a CPU"
    assert all(f"| {bar['bar']}" in done.stdout for bar in result["bars"])
    assert result["bars"][-1]["found"] == "16 of 16 are"


def expect_overlap(overlap: Any) -> None:
    assert overlap["state_bytes"] == 6 * overlap["parameter_count"] > 0
    assert list(overlap["ways"]) == ["no saves", "fp.Checkpointer", "dcp.async_save, pinned staging"]
    for name, way in overlap["ways"].items():
        assert not way["note"], way
        assert way["integrity"] == ("moves no state" if name == "no saves" else "equal")
        assert [len(block) for block in way["steps"]] == [3]
        assert all(step["step_s"] > step["save_s"] + step["gate_s"] >= 0 for block in way["steps"] for step in block)


def judged(factor: float) -> dict[str, str]:
    """Return the verdicts on a run that is this many times as good as the targets want."""

    def row(kind: str, bytes_per_s: float) -> dict[str, Any]:
        return {"kind": kind, "size_bytes": 10**9, "seconds": [10**9 / bytes_per_s], "integrity": "equal"}

    def step(step_s: float, stall_s: float) -> dict[str, float]:
        return {"step_s": step_s, "save_s": stall_s, "gate_s": 0.0}

    saves = {"fp.save": row("ours", 0.9 * 5e9 * factor), "disk write": row("yardstick", 5e9)}
    loads = {"fp.load(map_location)": row("ours", 0.9 * 6e9 * factor), "disk read": row("yardstick", 7e9)}
    tmpfs = {"fp.save": row("ours", 8e9 * factor), "torch.save": row("peer", 8e8)}
    equal = {"integrity": "equal" if factor > 1 else "w is not what was saved"}
    ways = {
        "no saves": {"steps": [[step(1.0, 0.0)]], "integrity": "moves no state"},
        "fp.Checkpointer": {"steps": [[step(1 + 0.03 / factor, 0.005 / factor)]], **equal},
    }
    room_bytes = (64 << 20) + (32 << 20)
    kept = {
        "fp.save, the first": {"peak_bytes": room_bytes / factor},
        "fp.Checkpointer, max_host_bytes = half of the state": {"peak_bytes": (room_bytes + 1000) / factor},
    }
    memory = {"ring_bytes": 64 << 20, "arena_bytes": 1000, "saves": kept}
    parts = {
        "save": {"rows": saves | {"pinned D2H copy": row("yardstick", 9e9)}},
        "load": {"rows": loads | {"pinned H2D copy": row("yardstick", 6e9)}},
        "tmpfs": {"rows": tmpfs},
        "overlap": {"values": {"overlap": {"parameter_count": 10**9, "ways": ways}}},
        "memory": {"values": {"memory": memory}},
    }
    script = (
        "import json, sys, gpu_report\n"
        "print(json.dumps({one['bar']: one['verdict'] for one in gpu_report.bars(json.load(sys.stdin))}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps({"facts": {"device": "cuda:0", "core_count": 16}, "parts": parts}),
        capture_output=True,
        text=True,
        check=True,
        cwd=BENCHMARKS,
    )
    verdicts: dict[str, str] = json.loads(done.stdout)
    assert len(verdicts) == 9
    return verdicts


def test_each_target_can_be_met_and_missed() -> None:
    assert set(judged(1.02).values()) == {"PASS"}
    assert set(judged(0.98).values()) == {"FAIL"}


def test_a_run_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), str(disk), *SMALL, "--parts", "memory"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline_s = time.monotonic() + 60
        while not list(disk.glob("*/memory")):  # the process of the part has been started, or is about to
            assert time.monotonic() < deadline_s
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(disk.iterdir())


def test_the_script_explains_itself_and_gathers_what_there_is(tmp_path: Path) -> None:
    script = BENCHMARKS / "gpu.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    said = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, check=True).stdout
    assert "--quick" in said
    wrong = subprocess.run(["bash", str(script), "--what"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    work = tmp_path / "work"
    (work / "tests").mkdir(parents=True)
    (work / "stages.tsv").write_text("build\t1\t7\ntest_gpu_faults\t1\t9\ntest_gpu_streams\t124\t9\nmeasure\t124\t0\n")
    (work / "tests" / "test_gpu_faults.xml").write_text(
        '<testsuites><testsuite><testcase classname="a.b" name="good"/><testcase classname="a.b" name="bad">'
        '<failure message="m">it is wrong</failure></testcase><testcase classname="a.b" name="left">'
        '<skipped message="no second GPU"/></testcase></testsuite></testsuites>'
    )
    page = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_report.py"), str(work), "name", str(tmp_path / "results")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert page.strip() == (tmp_path / "results" / "name.md").read_text().strip()
    for expected in ("1 passed, 1 failed, 1 skipped", "FAILED b::bad", "it is wrong", "FAILED (124)", "no second GPU"):
        assert expected in page
    result = json.loads((tmp_path / "results" / "name.json").read_text())
    assert [stage["status"] for stage in result["stages"]] == [1, 1, 124, 124]
    assert {bar["verdict"] for bar in result["bars"]} == {"not measured"}
