"""Run a command that sees emulated GPUs.

    python tests/support/emulated_gpu/run.py --devices 2 pytest -m gpu tests/gpu

A torch that was built for CUDA runs with all of its own code, over doubles of what it takes from NVIDIA: the driver
(cuda_double), the runtime, and a little of NVML, which are preloaded; its kernels are computed on the host, by
kernels.py. So its allocator, streams, events, hooks and pickles are the real ones, copies are asynchronous, and device
memory is out of the CPU's reach. No speed can be measured so, and what the doubles do not know, no test finds.

Needs a torch for CUDA 13 and the headers of nvidia-cuda-crt: `make emulated-gpu` makes such an environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import site
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parents[1]
DRIVER = FOLDER.parent / "cuda_double"
BUILD = TESTS.parent / "build" / "emulated-gpu"

FLAGS = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared"]


def libraries() -> list[Path]:
    """Return what is to be preloaded, built unless it is there. SystemExit says what is missing."""
    include = next((path for one in site.getsitepackages() for path in Path(one).glob("nvidia/cu13/include")), None)
    if include is None or not (include / "crt" / "host_defines.h").exists():
        sys.exit("the headers of CUDA 13 are missing: pip install nvidia-cuda-runtime nvidia-cuda-crt")
    sources = sorted(path for folder in (DRIVER, FOLDER) for path in folder.iterdir() if path.is_file())
    digest = hashlib.sha256(str(include).encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    built = BUILD / digest
    names = ("libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1")
    if not built.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=BUILD))
        (scratch / "driver_exports.map").write_text("{ global: cu*; double_*; local: *; };\n")
        _link(
            scratch / names[0],
            [*(DRIVER / f"{name}.cc" for name in ("control", "cuda_double", "machine")), FOLDER / "driver_rest.cc"],
            ["-Wl,-z,nodelete", f"-Wl,--version-script={scratch}/driver_exports.map"],
        )
        _link(
            scratch / names[1],
            [FOLDER / "runtime_double.cc", FOLDER / "unsupported.cc", scratch / names[0]],
            ["-isystem", str(include), f"-Wl,--version-script={FOLDER}/runtime_exports.map", "-ldl"],
        )
        _link(scratch / names[2], [FOLDER / "nvml_double.cc"], [])
        scratch.chmod(0o755)
        try:
            scratch.rename(built)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    return [built / name for name in names]


def _link(library: Path, sources: list[Path], flags: list[str]) -> None:
    compiler = (os.environ.get("CXX") or "g++").split()
    command = [*compiler, *FLAGS, f"-Wl,-soname,{library.name}", *map(str, sources), *flags, "-o", str(library)]
    subprocess.run(command, check=True)


def main() -> None:
    """Replace this process by the command, in an environment with emulated GPUs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--devices", type=int, default=1, help="so many GPUs (default: 1)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a program and its arguments; python is this one")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("there is no command")
    paths = [str(FOLDER), str(TESTS), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["LD_PRELOAD"] = " ".join(map(str, libraries()))
    os.environ["FASTPERSIST_CUDA_DEVICES"] = str(arguments.devices)
    program, *rest = arguments.command
    if program == "python":
        program = sys.executable
    os.execvp(program, [program, *rest])


if __name__ == "__main__":
    main()
