"""What every test shares: the options, the check that fastpersist is installed, and the facts in the header.

A test writes to `tmp_path`, which is on a real disk when `--fp-dir` names one, and asks for `leak_check` when
it must leave no descriptor, thread or pending file behind.
"""

from __future__ import annotations

import gc
import importlib
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastpersist")
    group.addoption("--fp-dir", metavar="DIR", help="write test files below DIR, such as a directory on an NVMe disk")
    group.addoption("--kills", type=int, default=20, metavar="N", help="rounds of the kill -9 harness (default: 20)")
    group.addoption(
        "--native-variant",
        choices=("plain", "address", "thread"),
        default="plain",
        help="how to build the C++ test programs: plain, with ASan and UBSan, or with TSan (default: plain)",
    )


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, and in many CI systems
        # Ignored here as before; but programs that tests start inherit what is ignored, and no handler.
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("a slow machine is no failure", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("a slow machine is no failure")
    os.environ["FASTPERSIST_CONFIG"] = ""  # what somebody has tuned on this machine is not what the tests are about
    if config.option.markexpr != "gpu":  # in a process that uses a GPU, torch starts threads, and forks are refused
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        importlib.import_module("fastpersist._native")
        importlib.import_module("fastpersist.integrations")  # found when installed, not from the source tree
    except ImportError as error:
        pytest.exit(
            f"fastpersist cannot be imported ({error}): run `make setup`, then .venv/bin/pytest",
            returncode=4,
        )
    explain_missing_fault_engine()
    directory = config.getoption("--fp-dir")
    if directory is not None:
        if not Path(directory).is_dir():
            raise pytest.UsageError(f"--fp-dir={directory} is not a directory")
        # pytest's own switch for the place of tmp_path; unlike --basetemp it does not empty the directory.
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(Path(directory).resolve())


QUICK_PLACES = ("tests/unit/", "tests/crash/test_kill.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(QUICK_PLACES) and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.quick)


def explain_missing_fault_engine() -> None:
    """Let the tests that make requests fail say what is missing where the native module was built without that."""
    from fastpersist import _native

    def needs_fault_engine(*_arguments: object, **_named: object) -> None:
        pytest.fail("this needs the fault engine, which a wheel does not have: run `make build`", pytrace=False)

    if _native.HAS_FAULT_ENGINE:
        return
    for name in ("FaultPlan", "set_fault_plan", "clear_fault_plan", "set_write_recording", "take_recorded_writes"):
        setattr(_native, name, needs_fault_engine)


def filesystem_type(directory: Path) -> str:
    """Return the name of the directory's file system as stat(1) gives it, such as "ext2/ext3" or "tmpfs"."""
    result = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(directory)], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def pytest_report_header(config: pytest.Config) -> list[str]:
    import torch

    import fastpersist

    directory = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())
    kind = filesystem_type(directory)
    advice = (
        " (memory, where direct I/O may differ from a disk's: --fp-dir names another place)" if kind == "tmpfs" else ""
    )
    return [
        f"fastpersist: {Path(fastpersist.__file__).parent}, torch {torch.__version__}",
        f"machine: Linux {platform.release()} {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs",
        f"test files: {directory}, {kind}{advice}",
    ]


def pytest_collection_finish() -> None:
    # What has been imported by now stays. To walk through all of it again took more time than many a test, whenever the
    # test or a trainer asks for a collection.
    gc.freeze()


@pytest.fixture
def leak_check(tmp_path: Path) -> Iterator[None]:
    """Fail the test if it leaves a descriptor, a thread or a pending file (below tmp_path) behind."""
    from support.leaks import no_leaks

    with no_leaks(tmp_path):
        yield
