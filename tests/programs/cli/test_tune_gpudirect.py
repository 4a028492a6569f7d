"""The trial of GPUDirect that `fastpersist tune` holds in a process of its own: what comes of it is told.

What a trial looks at is tested in tests/devices/test_gpudirect.py, what the command makes of it in test_tune.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.cuda_double import cuda_double
from support.cufile_double import SAYS_P2P, SAYS_POSIX, build_cufile_double

from fastpersist import _native
from fastpersist.cli.child_process import ChildProcess
from fastpersist.cli.tune import gpudirect
from fastpersist.cli.tune.gpudirect import try_gpudirect
from fastpersist.transfer.gpudirect import Trial

TRIAL_BYTES = 16 << 16
SETTINGS = {"engine": "threads-buffered", "chunk_bytes": 1 << 16, "ring_bytes": 4 << 16}

# The process, over the doubles of driver and library, below a torch that has a device. Every transfer takes a second,
# by the ring two.
OVER_DOUBLES = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from support.cuda_double import cuda_double, cuda_storage
from support.cufile_double import cufile_double
from fastpersist import _native
from fastpersist.transfer import gpudirect as cufile
from fastpersist.transfer import cuda as devices
from fastpersist.cli.tune import gpudirect as tune_gpudirect

cufile_double().set_way({way})
stream = cuda_double().stream_new(0)
devices.caller_stream = lambda ordinal: stream
cufile._MODULES = os.devnull
cufile._BUFFER_BYTES = 1 << 16
now_s = 0.0


def clock():
    global now_s
    now_s += 1.0
    return now_s


def slow(transfer):
    def run(*arguments):
        global now_s
        now_s += 1.0
        transfer(*arguments)
        assert _native.ring_buffer_count() == 4, "it is not as the settings have it"

    return run


cufile.time.perf_counter = clock
tune_gpudirect._device_memory = lambda size_bytes: cuda_storage(os.urandom(size_bytes))
tune_gpudirect._write_by_ring = slow(tune_gpudirect._write_by_ring)
tune_gpudirect._read_by_ring = slow(tune_gpudirect._read_by_ring)
tune_gpudirect.main()
"""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a driver, and torch is built for it."""
    cuda_double()
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA loads the real libcufile")
@pytest.mark.parametrize(
    ("way", "found"),
    [
        (SAYS_P2P, Trial("", 2.0, 2.0, "calls", "no faster than calls at writing (1.000 s to 1.000 s)")),
        (SAYS_POSIX, Trial("compatibility mode: through host memory")),
    ],
)
def test_what_the_trial_finds_is_what_is_told(
    way: int, found: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_cufile_double()
    tests = str(Path(__file__).parents[2])
    monkeypatch.setattr(gpudirect, "_PROGRAM", OVER_DOUBLES.format(tests=tests, way=way))
    monkeypatch.setenv("FASTPERSIST_ENGINE", "warp")  # what the environment says is no part of it
    assert try_gpudirect(str(tmp_path), TRIAL_BYTES, SETTINGS) == found
    assert os.listdir(tmp_path) == ["tuning.toml"]  # the command removes the directory


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_torch_without_a_device_is_told(tmp_path: Path) -> None:
    assert try_gpudirect(str(tmp_path), TRIAL_BYTES, SETTINGS) == Trial("this torch finds no CUDA device")


def test_nothing_is_started_where_there_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpudirect, "ChildProcess", None)
    monkeypatch.setattr(_native, "cuda_driver_why_not", lambda: "the driver is from 2009")
    assert try_gpudirect(str(tmp_path), TRIAL_BYTES, SETTINGS) == Trial("the driver is from 2009")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert try_gpudirect(str(tmp_path), TRIAL_BYTES, SETTINGS) == Trial("this torch is not built for CUDA")


def test_process_that_ends_in_the_middle_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpudirect, "_PROGRAM", "raise SystemExit(3)")
    assert "has ended (exit status 3)" in try_gpudirect(str(tmp_path), TRIAL_BYTES, SETTINGS).why_lost


def test_process_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpudirect, "_PROGRAM", "import threading; threading.Event().wait()")
    monkeypatch.setattr(gpudirect, "_LIMIT_S", 0.1)
    pids: list[int] = []

    class Known(ChildProcess):
        def end(self) -> None:
            pids.append(self.pid)
            super().end()

    monkeypatch.setattr(gpudirect, "ChildProcess", Known)
    found = try_gpudirect(str(tmp_path), TRIAL_BYTES, SETTINGS)
    assert "was ended" in found.why_lost
    assert "was ended" in found.why_not_batch
    assert len(pids) == 2  # once more, without batches
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_process_that_batches_hold_up_is_followed_by_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, ...]] = []

    def hold(_scratch: str, _size_bytes: int, _environment: object, apis: tuple[str, ...]) -> tuple[Trial, bool]:
        tried.append(apis)
        return (Trial("it was ended"), True) if "batch" in apis else (Trial("", 2.0, 3.0), False)

    monkeypatch.setattr(gpudirect, "_tried", hold)
    found = try_gpudirect(str(tmp_path), TRIAL_BYTES, SETTINGS)
    assert found == Trial("", 2.0, 3.0, "calls", "it was ended")
    assert tried == [("calls", "batch"), ("calls",)]
