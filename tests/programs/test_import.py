"""Importing the package: what it says when it was never built, and what it does not drag in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import fastpersist


def run(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a directory, which is the first place that imports look at."""
    return subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, check=False)


def test_source_tree_without_the_native_module_says_make_setup(tmp_path: Path) -> None:
    package = Path(fastpersist.__file__).parent
    shutil.copytree(package, tmp_path / "fastpersist", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # Without the finder of the editable install, which would find the native module of the real package.
    no_finder = "import sys; sys.meta_path = [f for f in sys.meta_path if 'ditable' not in repr(f)]"
    done = run(f"{no_finder}; import fastpersist", tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "make setup" in done.stderr


def test_import_brings_in_nothing_that_only_some_need(tmp_path: Path) -> None:
    done = run("import sys, fastpersist; print(*{name.partition('.')[0] for name in sys.modules})", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not {"tabulate", "safetensors"} & set(done.stdout.split())  # tqdm comes with torch


def test_the_compiler_is_not_imported_by_saving(tmp_path: Path) -> None:
    script = (
        "import sys, torch, fastpersist as fp\n"
        "fp.save({'x': torch.ones(3)}, sys.argv[1]); fp.load(sys.argv[1])\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.pt")], check=True)
