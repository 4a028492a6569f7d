"""`fastpersist convert`: options, what it says, exit codes, and its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.archives import flip_bit

import fastpersist as fp
from fastpersist.cli import main


def test_text_says_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp.save({"model": {"w": torch.ones(1000)}, "step": 3, "lr": 0.5}, tmp_path / "a.pt")
    out = tmp_path / "b.safetensors"
    assert main(["convert", str(tmp_path / "a.pt"), str(out)]) == 0
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()
    assert first.startswith(f"{out}: 1 tensor, 8.1 kB in ")
    assert first.endswith(" s; 1 compared with CRCs of the source")
    assert second == "left out, since they are no tensors: 2 values (step, lr)"
    assert not printed.err


def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp.save({"module": {"w": torch.ones(2), "b": torch.ones(2)}, "optimizer": torch.ones(2)}, tmp_path / "a.pt")
    out = tmp_path / "out"
    options = ["--keys", "module.*", "--rename", "module.=", "--dtype", "float16", "--format", "safetensors", "--quiet"]
    assert main(["convert", str(tmp_path / "a.pt"), str(out), *options]) == 0
    assert not capsys.readouterr().out
    found = load_file(out)
    assert {name: one.dtype for name, one in found.items()} == {"w": torch.float16, "b": torch.float16}


def test_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({f"w{n}": torch.ones(250) for n in range(6)}, tmp_path / "a.safetensors")
    out = str(tmp_path / "hf")
    assert main(["convert", str(tmp_path / "a.safetensors"), out, "--shard-bytes", "2kB"]) == 0
    assert " in 3 files in " in capsys.readouterr().out
    assert main(["diff", out, str(tmp_path / "a.safetensors")]) == 0


@pytest.mark.parametrize("options", [["--rename", "module."], ["--dtype", "int8"]], ids=["rename", "dtype"])
def test_options_that_make_no_sense(tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), *options])
    assert raised.value.code == 2
    assert options[1] in capsys.readouterr().err


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a.pt"
    fp.save({"w": torch.ones(1000)}, source)
    out = str(tmp_path / "b.pt")
    assert main(["convert", str(tmp_path / "nothing.pt"), out]) == 2
    assert main(["convert", str(source), out, "--shard-bytes", "many"]) == 2
    assert "--shard-bytes" in capsys.readouterr().err
    assert main(["convert", str(source), out]) == 0
    assert main(["convert", str(source), out]) == 2
    assert "--overwrite" in capsys.readouterr().err
    flip_bit(source, fp.inspect(source).tensors[0].offset_bytes + 5)
    assert main(["convert", str(source), out, "--overwrite"]) == 1
    assert "w are damaged" in capsys.readouterr().err
    assert torch.equal(torch.load(out)["w"], torch.ones(1000)), "what was there is still there"


_GROWN = """
import sys
import torch
from fastpersist.cli import main
from fastpersist.cli.bench.worker import resident_bytes
main(["convert", sys.argv[1], sys.argv[2], "--quiet"])
before = resident_bytes("VmHWM")
assert main(["convert", sys.argv[3], sys.argv[4], "--quiet", "--dtype", "bfloat16"]) == 0
print(resident_bytes("VmHWM") - before)
"""


def test_memory_does_not_depend_on_the_size_of_tensors(tmp_path: Path) -> None:
    fp.save({"w": torch.ones(10)}, tmp_path / "small.pt")
    fp.save({"w": torch.zeros(64 << 20)}, tmp_path / "large.pt")  # 256 MiB
    names = ["small.pt", "small.safetensors", "large.pt", "large.safetensors"]
    paths = [str(tmp_path / name) for name in names]
    done = subprocess.run([sys.executable, "-c", _GROWN, *paths], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 128 << 20, f"{done.stdout} bytes"
