"""Build the wheel into dist/, install it into an environment of its own, and use it outside the repository.

An editable install finds modules that a wheel may have forgotten; this is the check that none is. The new
environment has the wheel and nothing else. torch, too large to install once more, and our other dependencies
come from the environment that runs this, by a .pth file that adds its package directories. Python does not
read .pth files inside such an added directory, so the editable install there stays invisible.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

USE_IT = """
import importlib, pathlib, pkgutil, sys
import torch
import fastpersist

environment = pathlib.Path(sys.argv[1])
names = [module.name for module in pkgutil.walk_packages(fastpersist.__path__, "fastpersist.")]
names = [name for name in names if not name.endswith(".__main__")]
for name in names:
    module = importlib.import_module(name)
    assert environment in pathlib.Path(module.__file__).parents, f"{name} comes from {module.__file__}"
for name in ("fastpersist._native", "fastpersist.cli", "fastpersist.formats", "fastpersist.integrations"):
    assert name in names, f"{name} is not in the wheel"
package = pathlib.Path(fastpersist.__file__).parent
for data in ("py.typed", "_native.pyi"):
    assert (package / data).is_file(), f"{data} is not in the wheel"

from fastpersist import _native
from fastpersist.errors import ConfigError

assert not _native.HAS_FAULT_ENGINE
for name in ("FaultPlan", "set_fault_plan", "clear_fault_plan", "set_write_recording", "take_recorded_writes"):
    assert not hasattr(_native, name), f"the wheel has {name} of the fault engine"
try:
    fastpersist.save({}, "faulty.pt", engine="fault:threads")
except ConfigError as error:
    assert "there is no engine 'fault:threads'" in str(error), error
else:
    raise AssertionError("the wheel has the fault engine")

path = pathlib.Path("model.pt")
saved = {"weight": torch.arange(100_000), "step": 7}
fastpersist.save(saved, path)
for load in (fastpersist.load, torch.load):
    loaded = load(path)
    assert loaded["step"] == 7 and torch.equal(loaded["weight"], saved["weight"]), load
print(f"{len(names)} modules import, and a file saves and loads")
"""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command, without the switches of a build for tests; end this program with its output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "FASTPERSIST_FAULT_ENGINE"}
    result = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout}")
    print(result.stdout.strip().splitlines()[-1] if result.stdout.strip() else "", flush=True)


def main() -> None:
    """Build, install, use."""
    with tempfile.TemporaryDirectory(prefix="fastpersist-wheel-") as scratch_name:
        scratch = Path(scratch_name)
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            scratch,
            ".",
        )
        (wheel,) = scratch.glob("*.whl")
        environment = scratch / "environment"
        venv.create(environment, with_pip=False)
        python = environment / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
        (packages,) = environment.glob("lib/python*/site-packages")
        donors = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (packages / "dependencies.pth").write_text("\n".join(donors) + "\n")
        run(python, "-I", "-c", USE_IT, environment, cwd=scratch)
        run(environment / "bin" / "fastpersist", "--help", cwd=scratch)
        (ROOT / "dist").mkdir(exist_ok=True)
        kept = Path(shutil.copy(wheel, ROOT / "dist"))
        print(f"{kept.relative_to(ROOT)}: {kept.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
