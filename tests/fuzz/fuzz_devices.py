"""Fuzz saves and loads of CUDA tensors, over the double of the driver: what is drawn, what goes wrong, and what holds.

    python tests/fuzz/fuzz_devices.py --seconds 60 --seed 1

An input is the seed of a round, which a process of its own plays: see `device_rounds`. Threads play it, so a round that
failed may need some tries until it does again. Its log is printed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from device_round import Round
from fuzzing import main
from support.cuda_double import build_double
from support.cufile_double import build_cufile_double

torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()  # imports much, once for all rounds
ROUND_S = 90.0


def make_input(rng: random.Random) -> bytes:
    return str(rng.getrandbits(48)).encode()


def try_input(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-devices-") as name:
        log = Path(name, "log")
        pid = os.fork()
        if pid == 0:
            _play(int(data), Path(name, "files"), log)
        status = _await(pid)
        if status != 0:
            raise AssertionError(f"the round ended with {status}:\n{log.read_text(errors='replace')}")


def _await(pid: int) -> int:
    deadline_s = time.monotonic() + ROUND_S
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    if dump := os.environ.get("FUZZ_DEVICES_ON_HANG"):
        os.system(dump.replace("PID", str(pid)))
    os.kill(pid, signal.SIGABRT)  # faulthandler tells where its threads are
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _play(seed: int, directory: Path, log: Path) -> None:
    """In a forked process: play a round, and never return."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        faulthandler.enable()
        directory.mkdir()
        round_ = Round(seed, directory)
        try:
            round_.play()
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it is, it is the find
            traceback.print_exc()
            print("\n".join(round_.told()))
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    build_double()
    build_cufile_double()
    main(make_input, try_input)
