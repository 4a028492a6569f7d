"""setup.py: a user's build needs a compiler, and no more."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SETUP = Path(__file__).parents[2] / "setup.py"


def test_a_build_needs_no_symbolic_links(tmp_path: Path) -> None:
    shutil.copy(SETUP, tmp_path)
    for name in ("binding/module.cc", "binding/fault_plan.cc", "engine/fault_engine.cc"):
        source = tmp_path / "csrc" / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.touch()
    (tmp_path / "csrc/binding/module.cc").write_text('extern "C" void* PyInit__native() { return nullptr; }\n')
    (tmp_path / "build" / "native").mkdir(parents=True)  # so that no link can be made, as on exFAT
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300)
