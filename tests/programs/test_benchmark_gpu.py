"""benchmarks/gpu.py and gpu.sh run on the CPU, with sizes so small that the figures mean nothing, and leave nothing.

What a part does runs in forks of this process, which has imported torch already; that gpu.py starts processes for them,
and outlives them, is seen with two.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.programs import run_in_fork

import fastpersist as fp

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--device", "cpu", "--size-mb", "10", "--rounds", "1", "--parameters", "40000", "--budget", "200"]
TORCH_SAVES = ["torch.save", "torch.save, CRC off", "torch.save, CRC off, pinned"]
OURS = ["fp.save", "fp.save, checksum=False"]
LOADS = ["fp.load(map_location)", "fp.load_into", "torch.load(map_location)", "torch.load(mmap, map_location)"]


def expect_rows(part: Any, names: list[str]) -> None:
    """All rows have had their turn, and what they moved is what it should be."""
    assert [name for name in part["rows"] if not name.startswith("disk")][: len(names)] == names
    for name, row in part["rows"].items():
        assert not row["note"], (name, row)
        assert len(row["seconds"]) == 1
        assert row["integrity"] == ("moves no state" if row["kind"] == "yardstick" else "equal")


def run_part(part: str, directory: Path, change: Callable[[], object] = lambda: None) -> Any:
    """Run a part as its process would, in a fork in which something was changed; return what it has found."""
    found_path, place = directory / f"{part}.json", directory / part
    place.mkdir()

    def program() -> None:
        sys.path.insert(0, str(BENCHMARKS))
        change()
        sys.argv = ["gpu.py", str(place), *SMALL, "--run-part", part, "--found", str(found_path)]
        # No fio, whether it is there or not: its rows need more time than all others.
        os.environ["PATH"] = "/nowhere"
        runpy.run_path(str(BENCHMARKS / "gpu.py"), run_name="__main__")

    code, output, errors = run_in_fork(program, directory)
    assert code == 0, output + errors
    found = json.loads(found_path.read_text())
    assert found["values"].pop("complete")
    return found


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import one of the modules that need no torch."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_saves_are_measured_and_what_they_write_is_checked(tmp_path: Path) -> None:
    part = run_part("save", tmp_path)
    expect_rows(part, [*OURS, *TORCH_SAVES, "safetensors save_file", "dcp.async_save, until durable"])
    assert any("fio is not installed" in note for note in part["notes"])
    for name in OURS:
        row = part["rows"][name]
        spent_s = [row["first_s"], *row["seconds"]]
        assert all(0 <= part_s <= all_s for all_s, part_s in zip(spent_s, row["parts"]["write_s"], strict=True))
    assert not list((tmp_path / "save").iterdir())


def test_loads_are_measured_cold_and_what_they_read_is_checked(tmp_path: Path) -> None:
    part = run_part("load", tmp_path)
    expect_rows(part, [*LOADS, "safetensors load_file(device)"])
    assert any("page cache" in note for note in part["notes"])


def test_loads_are_measured_although_nothing_of_ours_can_be_saved(tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no save today")

    part = run_part("load", tmp_path, lambda: setattr(fp, "save", fail))
    expect_rows(part, [*LOADS, "safetensors load_file(device)"])
    assert "fp.save failed: RuntimeError: no save today" in part["notes"][0]


def test_a_training_that_saves_every_step_is_measured(tmp_path: Path) -> None:
    overlap = run_part("overlap", tmp_path)["values"]["overlap"]
    assert (overlap["rounds"], overlap["steps_per_round"]) == (1, 3)
    assert overlap["state_bytes"] == 6 * overlap["parameter_count"] > 0
    assert list(overlap["ways"]) == ["no saves", "fp.Checkpointer", "dcp.async_save, pinned staging"]
    for name, way in overlap["ways"].items():
        assert not way["note"], way
        assert way["integrity"] == ("moves no state" if name == "no saves" else "equal")
        assert [len(block) for block in way["steps"]] == [3]
        assert all(step["step_s"] > step["save_s"] + step["gate_s"] >= 0 for block in way["steps"] for step in block)


def test_the_host_memory_that_saves_take_is_measured(tmp_path: Path) -> None:
    memory = run_part("memory", tmp_path)["values"]["memory"]
    assert len(memory["saves"]) == 5
    assert all("peak_bytes" in save for save in memory["saves"].values()), memory


def test_gpudirect_is_measured_where_it_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def by_another_engine(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*arguments: Any, **options: Any) -> Any:
            named.append(options.pop("engine", "auto"))
            return move(*arguments, **options)

        return moved

    def change() -> None:
        fp.engines = lambda _: [SimpleNamespace(name="cufile", usable=True, why_not="")]  # type: ignore[assignment]
        fp.save, fp.load = by_another_engine(fp.save), by_another_engine(fp.load)

    part = run_part("gpudirect", tmp_path, change)
    names = ["fp.save, checksum=False", "fp.save, checksum=False, engine=cufile"]
    names += ["fp.save, engine=cufile", "fp.load(map_location)", "fp.load, engine=cufile"]
    expect_rows(part, names)
    assert [probe["name"] for probe in part["values"]["facts"]["engines"]] == ["cufile"]
    report = imported("gpu_report", monkeypatch)
    bars = report.bars({"facts": {"device": "cuda:0"}, "parts": {"gpudirect": part}})
    assert bars[-1]["found"] == "5 of 5 are"
    assert bars[-1]["verdict"] == "PASS"


def test_without_gpudirect_its_part_says_why(tmp_path: Path) -> None:
    def change() -> None:
        fp.engines = lambda _: [SimpleNamespace(name="cufile", usable=False, why_not="x")]  # type: ignore[assignment]

    part = run_part("gpudirect", tmp_path, change)
    assert not part["rows"]
    assert part["notes"] == ["not measured: GPUDirect Storage cannot be used: x"]


def test_without_room_in_memory_the_target_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change() -> None:
        importlib.import_module("gpu_disk").free_bytes = lambda _: 1 << 20  # type: ignore[attr-defined]

    part = run_part("tmpfs", tmp_path, change)
    row = part["rows"]["fp.save"]
    assert not row["seconds"]
    assert "not measured: no room" in row["note"]
    bars = imported("gpu_report", monkeypatch).bars({"facts": {"device": "cuda:0"}, "parts": {"tmpfs": part}})
    (bar,) = [bar for bar in bars if "8 GB/s" in bar["bar"]]
    assert bar["verdict"] == "not measured"
    assert "1048576 bytes free" in bar["found"]


def test_fio_is_used_without_tabulate(tmp_path: Path) -> None:
    (tmp_path / "fio").write_text("#!/bin/sh\n")
    (tmp_path / "fio").chmod(0o700)

    def program() -> None:
        for name in [name for name in sys.modules if name.startswith("fastpersist.cli")]:
            del sys.modules[name]
        sys.modules["tabulate"] = None  # type: ignore[assignment]
        os.environ["PATH"] = str(tmp_path)
        sys.path.insert(0, str(BENCHMARKS))
        rows, note = importlib.import_module("gpu_yardsticks").disk_write_rows(str(tmp_path), 1 << 20)
        print([row.name for row in rows], note)

    code, output, errors = run_in_fork(program, tmp_path)
    assert code == 0, errors
    assert output == "['disk write (fio)', 'disk write (O_DIRECT loop)'] \n"


def test_a_disk_that_cannot_be_probed_is_taken_for_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, disk = imported("gpu", monkeypatch), imported("gpu_disk", monkeypatch)

    def fail(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(disk.os, "posix_fallocate", fail)  # some file systems have none, and that is no reason
    assert disk.probe_write_bytes_per_s(str(tmp_path), 1 << 20) > 0
    monkeypatch.setattr(disk, "probe_write_bytes_per_s", fail)
    arguments = gpu._arguments([str(tmp_path)])
    (note,) = gpu._choose_size(arguments, str(tmp_path))
    assert "Invalid argument" in note
    assert arguments.write_rate == 0.5e9
    assert arguments.size_mb >= 64


# ------------------------------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("write_bytes_per_s", [2e9, 5e9])
@pytest.mark.parametrize("before_s", [60.0, 60.0 + 131.0])  # a build by 16 cores; tests, which may take a quarter
def test_all_of_gpu_sh_ends_in_nine_minutes_with_a_billion_parameters(
    write_bytes_per_s: float, before_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = imported("gpu_plan", monkeypatch)
    budget_s, ended_s = 525 - before_s - 35, before_s  # as gpu.sh has it
    parts = list(plan.SHARES)
    assert parts[-1] == "gpudirect", "what may hang costs no other part its time"
    for number, part in enumerate(parts):
        left_s = before_s + budget_s - ended_s
        part_s = plan.part_budget_s(part, left_s, parts[number:])
        assert part_s is not None, part
        assert part_s + 15 <= plan.part_limit_s(part_s, left_s, len(parts) - number - 1) <= left_s + 15
        took_s = part_s + 15
        if part == "overlap":
            count, why = plan.overlap_parameters(
                write_bytes_per_s, part_s, disk_bytes=64 << 30, device_bytes=139 << 30, host_bytes=100 << 30
            )
            assert count >= 950_000_000, why
            # What a step takes, had it been measured: without saves, ours, and a peer at 1 GB/s.
            step_s = 1.2 * 6 * count / (0.9 * write_bytes_per_s)
            seen_s = [step_s, step_s, max(step_s, 6 * count / 1e9)]
            before_rounds_s = plan.overlap_s(count, write_bytes_per_s, 0, 0)
            rounds, steps = plan.overlap_blocks(seen_s, part_s - before_rounds_s, 3)
            took_s = 15 + plan.overlap_s(count, write_bytes_per_s, rounds, steps)
            assert took_s <= part_s + 15 + 1
        ended_s += took_s
    assert ended_s + 35 <= 540


def test_parts_that_all_overrun_leave_each_other_time_and_end_in_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = imported("gpu_plan", monkeypatch)
    left_s, parts = 300.0, list(plan.SHARES)
    for number, part in enumerate(parts):
        budget_s = plan.part_budget_s(part, left_s, parts[number:])
        assert budget_s is not None, part
        left_s -= plan.part_limit_s(budget_s, left_s, len(parts) - number - 1)
    assert 0 > left_s >= -15


def test_a_training_is_as_large_as_disk_memory_and_time_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = imported("gpu_plan", monkeypatch)
    room = {"disk_bytes": 1 << 40, "device_bytes": 1 << 40, "host_bytes": 1 << 40}
    assert plan.overlap_parameters(5e9, 100.0, **room) == (1_000_000_000, "")
    count, why = plan.overlap_parameters(0.5e9, 100.0, **room)
    assert 200_000_000 < count < 500_000_000
    assert plan.overlap_s(count, 0.5e9, 1, 2) == pytest.approx(100.0, rel=0.01)
    assert "time" in why
    for name, said in (("disk", "disk"), ("device", "memory of the device"), ("host", "host memory")):
        count, why = plan.overlap_parameters(5e9, 100.0, **room | {f"{name}_bytes": 6_000_000_000})
        assert count * 6 * 4 <= 6_000_000_000
        assert said in why


def test_a_slow_training_has_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = imported("gpu_plan", monkeypatch)
    assert plan.overlap_blocks([1.0, 1.0, 2.0], 40.0, 3) == (3, 3)
    assert plan.overlap_blocks([1.0, 1.0, 2.0], 40.0, 1) == (1, 3)
    assert plan.overlap_blocks([1.0, 1.0, 2.0], 17.0, 3) == (2, 2)
    assert plan.overlap_blocks([1.0, 1.0, 2.0], 1.0, 3) == (1, 2)


# ------------------------------------------------------------------------------------------------ processes of parts

DYING_PART = """
import sys
if "--run-part" in sys.argv and sys.argv[sys.argv.index("--run-part") + 1] == "tmpfs":
    import os, torch
    torch.save = lambda *_: os.abort()
"""


def test_a_part_that_dies_costs_no_other_its_figures(tmp_path: Path) -> None:
    disk, result_path = tmp_path / "disk", tmp_path / "result.json"
    disk.mkdir()
    (tmp_path / "sitecustomize.py").write_text(DYING_PART)
    command = [sys.executable, "-W", "error", str(BENCHMARKS / "gpu.py"), str(disk), *SMALL]
    done = subprocess.run(
        [*command, "--parts", "gpudirect", "tmpfs", "--json", str(result_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "PATH": "/nowhere"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert not list(disk.iterdir())
    result = json.loads(result_path.read_text())
    parts = result["parts"]
    assert list(parts) == ["tmpfs", "gpudirect"]
    assert any(probe["usable"] for probe in result["facts"]["engines"]), "the part that lives has said so"
    assert [parts["tmpfs"]["rows"][name]["integrity"] for name in OURS] == ["equal", "equal"]
    assert parts["tmpfs"]["rows"]["torch.save"]["first_s"] is None
    assert "this part is incomplete: exit status -6" in parts["tmpfs"]["notes"]
    assert "Fatal Python error: Aborted" in parts["tmpfs"]["log_tail"]
    assert [name for name, part in parts.items() if not part["is_complete"]] == ["tmpfs"]
    assert result["facts"]["fastpersist"] == fp.__version__
    assert len(result["bars"]) == 9
    assert {bar["verdict"] for bar in result["bars"]} == {"not measured"}, "no target is met, or missed, on a CPU"
    assert all(f"| {bar['bar']}" in done.stdout for bar in result["bars"])
    assert result["bars"][-1]["found"] == "2 of 2 are"


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


def test_what_the_stages_left_is_gathered(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "tests").mkdir(parents=True)
    (work / "stages.tsv").write_text("build\t1\t7\ntest_gpu_faults\t1\t9\ntest_gpu_streams\t124\t9\nmeasure\t124\t0\n")
    with (work / "stages.tsv").open("a") as stages:
        stages.write("test_gpu_overlap\t137\t9\n")
    (work / "logs").mkdir()
    (work / "logs" / "test_gpu_streams.log").write_text(f"{'=' * 20} 3 passed in 2.10s {'=' * 20}\n")
    (work / "tests" / "test_gpu_streams.xml").write_text("<testsuites/>")
    (work / "logs" / "test_gpu_overlap.log").write_text(
        "tests/gpu/test_gpu_overlap.py::test_a[two words] PASSED   [ 25%]\n"
        "tests/gpu/test_gpu_overlap.py::test_b SKIPPED (one GPU)   [ 50%]\n"
        "tests/gpu/test_gpu_overlap.py::test_c FAILED   [ 75%]\n"
        "tests/gpu/test_gpu_overlap.py::test_d \nTimeout!\n"
    )
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
    for expected in ("2 passed, 2 failed, 2 skipped", "FAILED b::bad", "it is wrong", "FAILED (124)", "no second GPU"):
        assert expected in page
    for expected in ("FAILED (137)", "one GPU", "all passed, but its process did not end (124)", "::test_d has not"):
        assert expected in page
    result = json.loads((tmp_path / "results" / "name.json").read_text())
    assert [stage["status"] for stage in result["stages"]] == [1, 1, 124, 124, 137]
    assert {bar["verdict"] for bar in result["bars"]} == {"not measured"}


# ------------------------------------------------------------------------------------------------ gpu.sh

STAND_IN = """#!/bin/sh
# Stands in for python3: runs the report, and nothing else.
case "$*" in
  *gpu_report.py*) exec "$REAL_PYTHON" "$@" ;;
  *setup.py*) readlink build > "$SEEN/build" ;;
  *benchmarks/gpu.py*)
    printf '%s\\n' "$@" > "$SEEN/words"
    while [ $# -gt 0 ]; do
      case $1 in
        --memory-dir) stat -f -c %T "$2" > "$SEEN/kind"; echo "$2" > "$SEEN/place" ;;
        --json) echo '{"command": "", "facts": {}, "parts": {}, "bars": []}' > "$2" ;;
      esac
      shift
    done
    if [ -n "$STAYS" ]; then echo $$ > "$SEEN/pid.new"; mv "$SEEN/pid.new" "$SEEN/pid"; exec sleep 100; fi ;;
esac
"""


class Script:
    """gpu.sh with an interpreter that does nothing, in a copy of what it needs of the tree."""

    def __init__(self, tmp_path: Path) -> None:
        self.seen, self.disk, self.temporary = (tmp_path / name for name in ("seen", "a disk", "tmp dir"))
        self.tree = tmp_path / "a tree"
        for path in (self.seen, self.disk, self.temporary, self.tree, self.tree / "csrc", tmp_path / "bin"):
            path.mkdir()
        (self.tree / "benchmarks").mkdir()
        for name in ("gpu.sh", "gpu_report.py"):
            (self.tree / "benchmarks" / name).symlink_to(BENCHMARKS / name)
        (self.tree / "tests" / "gpu").mkdir(parents=True)
        for name in ("setup.py", "csrc/a file.cc", "tests/gpu/test_gpu_one.py"):
            (self.tree / name).touch()
        self.programs = tmp_path / "bin"
        self.program("a python", STAND_IN)
        self.environment = {name: value for name, value in os.environ.items() if name not in ("OUT", "RESULTS")} | {
            "PYTHON": str(self.programs / "a python"), "REAL_PYTHON": sys.executable, "SEEN": str(self.seen),
            "TMPDIR": str(self.temporary), "PATH": f"{self.programs}:{os.environ['PATH']}", "STAYS": "",
        }  # fmt: skip

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o700)

    def start(self, words: Sequence[str] = ("--no-build",), **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.tree / "benchmarks" / "gpu.sh"), str(self.disk), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | environment,
        )

    def run(self, words: Sequence[str] = ("--no-build",), **environment: str) -> tuple[int, str, str]:
        with self.start(words, **environment) as process:
            output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def expect_nothing_left(self) -> None:
        assert not list(self.temporary.iterdir())
        assert not list(self.disk.iterdir())
        assert str(self.temporary).replace(" ", "\\040") not in Path("/proc/self/mounts").read_text()


def test_the_script_explains_itself(tmp_path: Path) -> None:
    script = BENCHMARKS / "gpu.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    said = subprocess.run(["bash", str(script), "--help"], capture_output=True, text=True, check=True).stdout
    assert "--quick" in said
    assert "(default: 525)" in said, "the plan's test counts on it"
    assert "can import" in said[said.index("--no-build") :]
    wrong = subprocess.run(["bash", str(script), "--what"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2


def test_results_go_where_something_can_be_written(tmp_path: Path) -> None:
    script = Script(tmp_path)
    code, output, errors = script.run()
    assert code == 0, output + errors
    assert [path.suffix for path in sorted((script.tree / "benchmarks" / "results").iterdir())] == [".json", ".md"]
    (tmp_path / "file").touch()
    refused = str(tmp_path / "file" / "results")  # to root, too
    out = tmp_path / "the out"
    code, output, errors = script.run(RESULTS=refused, OUT=str(out))
    assert code == 0, output + errors
    assert [path.suffix for path in sorted(out.iterdir())] == [".json", ".log", ".md"]
    code, output, errors = script.run(RESULTS=refused, OUT=refused)
    assert code == 0, output + errors
    assert "# FastPersist on a GPU" in output
    assert '"stages": [' in output
    assert "nothing can be written to" in errors
    script.expect_nothing_left()


def test_a_build_in_a_tree_that_cannot_be_written_is_made_elsewhere_and_may_fail(tmp_path: Path) -> None:
    script = Script(tmp_path)
    (script.tree / "build").touch()
    code, output, errors = script.run([])  # nothing is built by the stand-in, but it imports all
    assert code == 1, output + errors
    assert (script.seen / "build").read_text().startswith(str(script.temporary))
    assert "FAILED (1)" in output
    assert "what is measured is the fastpersist that python3 imports" in output[output.index("# FastPersist") :]
    script.expect_nothing_left()


def test_without_a_file_system_in_memory_one_is_mounted_and_goes(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.program("df", "#!/bin/sh\nexit 1\n")
    code, output, errors = script.run()
    assert code == 0, output + errors
    words = (script.seen / "words").read_text().splitlines()
    if "--memory-dir" in words:
        assert (script.seen / "kind").read_text() == "tmpfs\n"
    elif "--memory-mount" not in words:
        pytest.skip("neither may this process mount anything, nor may it in a namespace of its own")
    script.expect_nothing_left()


def test_a_namespace_of_its_own_mounts_one_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = imported("gpu", monkeypatch)._with_mount(str(tmp_path), ["stat", "-f", "-c", "%T %n", str(tmp_path)])
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(done.stderr)
    assert done.stdout == f"tmpfs {tmp_path}\n", done.stderr
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_script_that_is_stopped_ends_what_it_has_begun(tmp_path: Path, number: signal.Signals) -> None:
    script = Script(tmp_path)
    script.program("df", "#!/bin/sh\nexit 1\n")
    with script.start(STAYS="yes") as process:
        deadline_s = time.monotonic() + 60
        while not (script.seen / "pid").exists():
            assert time.monotonic() < deadline_s
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=30)  # and not after the 100 s that it would sleep
    assert process.returncode == 128 + number
    assert not Path("/proc", (script.seen / "pid").read_text().strip()).exists()
    script.expect_nothing_left()
