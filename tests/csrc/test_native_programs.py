"""Builds and runs the C++ test programs, tests/csrc/*_test.cc, one test for each.

A program has no framework: it exits with 0 when all is well, with 77 when it cannot run here (its output says
why), and with anything else when it failed. `--native-variant=address` runs them under ASan and UBSan,
`--native-variant=thread` under TSan.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path.stem for path in Path(__file__).parent.glob("*_test.cc"))

SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:check_initialization_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1",
}

# The first program to be built compiles all of csrc/ too, and sanitizers make both building and running slow.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def variant(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--native-variant"))


def build(program: str, variant: str) -> Path:
    if shutil.which("make") is None:
        pytest.skip("make is not installed, and these programs are built with it")
    binary = ROOT / "build" / f"programs-{variant}" / program
    jobs = len(os.sched_getaffinity(0))
    command = [
        "make",
        "-f",
        "tests/csrc/Makefile",
        f"-j{jobs}",
        f"VARIANT={variant}",
        str(binary.relative_to(ROOT)),
    ]
    # An outer make hands down a job server that this one could not use.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.fail(f"{program} does not build:\n{result.stdout}{result.stderr}", pytrace=False)
    return binary


@pytest.mark.parametrize("program", PROGRAMS)
def test_native_program_exits_with_success(program: str, variant: str, tmp_path: Path) -> None:
    command = [str(build(program, variant))]
    if variant == "thread":
        # TSan of gcc before 14 cannot place its shadow memory when the kernel randomises more than 28 bits.
        # Some sandboxes forbid to turn that off; there it is left to luck.
        fixed_layout = ["setarch", platform.machine(), "--addr-no-randomize"]
        if subprocess.run([*fixed_layout, "true"], capture_output=True, check=False).returncode == 0:
            command = [*fixed_layout, *command]
    environment = {**os.environ, **SANITIZER_OPTIONS, "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    output = (result.stdout + result.stderr).strip()
    if result.returncode == 77:
        pytest.skip(output or f"{program} cannot run here and does not say why")
    if result.returncode != 0:
        pytest.fail(f"{program} ({variant}) exited with {result.returncode}:\n{output}", pytrace=False)


@pytest.mark.parametrize("engine", ["cufile", "fault:cufile"])
def test_contract_of_engines_holds_for_cufile_over_the_doubles(engine: str, variant: str, tmp_path: Path) -> None:
    if variant != "plain":
        pytest.skip("a sanitizer's library does not go behind preloaded ones; cufile_engine_test runs under it")
    program = build("engine_contract_test", variant)
    doubles = " ".join(str(program.parent / name) for name in ("libcuda.so.1", "libcufile.so.0"))
    result = subprocess.run(
        [program, tmp_path, engine],
        env={**os.environ, "LD_PRELOAD": doubles},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert "1 engines, 0 failures" in result.stdout, result.stdout + result.stderr
