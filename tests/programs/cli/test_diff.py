"""`fastpersist diff`: exit codes as of cmp, text and JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fastpersist as fp
from fastpersist.cli import main


def run(tmp_path: Path, a: Any, b: Any, *options: str) -> int:
    fp.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    return main(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), *options])


def test_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"w": torch.ones(1000), "step": 1}
    assert run(tmp_path, state, state) == 0
    assert capsys.readouterr().out == "equal: 1 tensors have equal bits, 0 differ; 4.0 kB read of each\n"


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = {"w": torch.tensor([1.0, 2.0, math.nan]), "a": torch.ones(1), "d": torch.ones(2), "step": 1}
    b = {"w": torch.tensor([1.0, 2.5, 3.0]), "b": torch.ones(1), "d": torch.ones(2, dtype=torch.int64), "step": 2}
    assert run(tmp_path, a, b) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "only in A  a",
        "only in B  b",
        "tensor     d: float32 [2] / int64 [2]",
        "value      step: 1 / 2",
    ]
    assert ["w", "float32", "2", "3", "0.5", "0.2", "1/0"] in [line.split() for line in lines]
    assert lines[-1] == "different: 0 tensors have equal bits, 1 differ; 12 bytes read of each"


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, math.inf])}, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "equal": False,
        "only_in_a": [],
        "only_in_b": [],
        "described": {},
        "values": {},
        "tensors": [
            {
                "name": "w",
                "dtype": "float32",
                "shape": [2],
                "differing_count": 1,
                "max_abs": 0.0,
                "max_rel": 0.0,
                "nan_counts": [0, 0],
                "inf_counts": [0, 1],
            }
        ],
        "equal_count": 0,
        "compared_bytes": 8,
        "undecided": {},
    }


def test_quiet_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"w": torch.ones(2)}, {"w": torch.zeros(2)}, "--quiet") == 1
    assert run(tmp_path, {"w": torch.ones(2)}, {"w": torch.ones(2)}, "--quiet") == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_only_one_part(tmp_path: Path) -> None:
    a = {"model": torch.ones(2), "optimizer": torch.ones(2)}
    b = {"model": torch.ones(2), "optimizer": torch.zeros(2)}
    assert run(tmp_path, a, b, "model") == 0
    assert run(tmp_path, a, b, "opt*") == 1


@pytest.mark.parametrize("glob", ["w", "step", "metadata*"])
def test_a_name_that_nothing_has_is_trouble(glob: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"w": torch.ones(1), "step": 1}, {"w": torch.ones(1), "step": 1}, glob) == 2 * (
        glob == "metadata*"
    )
    assert ("neither has a tensor or a value" in capsys.readouterr().err) == (glob == "metadata*")


def test_step_and_safetensors(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)})
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    assert main(["diff", str(tmp_path / "run/step-00000001"), str(tmp_path / "a.safetensors")]) == 0


@pytest.mark.parametrize("trouble", ["missing", "damaged", "root"])
def test_trouble_is_no_difference(tmp_path: Path, trouble: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(200)}, path)
    other = tmp_path / "other"
    if trouble == "damaged":
        other.write_bytes(path.read_bytes()[:-3])
    elif trouble == "root":
        with fp.Checkpointer(other) as checkpoints:
            checkpoints.save(1, {"w": torch.ones(2)})
    assert main(["diff", str(path), str(other)]) == 2
    assert "other" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_compared_is_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"q": torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8), "w": torch.ones(2)}
    assert run(tmp_path, state, state) == 2
    assert "undecided  q: it is a quantized tensor" in capsys.readouterr().out
    assert run(tmp_path, state, {**state, "w": torch.zeros(2)}) == 1


_GROWN = """
import sys
from fastpersist.cli import main
from fastpersist.cli.bench.worker import resident_bytes
small, large, other = sys.argv[1:]
assert main(["diff", small, small, "--quiet"]) == 0
assert main(["stats", small, "--quiet", "--json"]) == 0
before = resident_bytes("VmHWM")
assert main(["diff", large, other, "--quiet"]) == 1
assert main(["stats", large, "--quiet", "--json"]) == 0
print(resident_bytes("VmHWM") - before, file=sys.stderr)
"""


def test_memory_does_not_depend_on_the_size_of_tensors(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(10)}, tmp_path / "small.pt")
    fp.save({"w": torch.zeros(64 << 20)}, tmp_path / "large.pt")  # 256 MiB
    fp.save({"w": torch.ones(64 << 20)}, tmp_path / "other.safetensors")
    paths = [str(tmp_path / name) for name in ("small.pt", "large.pt", "other.safetensors")]
    done = subprocess.run([sys.executable, "-c", _GROWN, *paths], capture_output=True, text=True, check=True)
    assert int(done.stderr) < 128 << 20, f"{done.stderr} bytes"
