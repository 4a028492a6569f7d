"""Commands that measure, interrupted: what they have started and written is gone with them."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def children_of(parent: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
    return found


def check_interrupted(
    directory: Path,
    *words: str,
    when: str,
    child_count: int,
    number: signal.Signals = signal.SIGINT,
) -> None:
    """Send a signal to `fastpersist bench` as soon as it is at work; check its exit code, and that it leaves nothing.

    Args:
        directory: The argument DIR, an empty directory.
        words: The words of the command line behind `bench.command`.
        when: A pattern of names below DIR that show that the command is at work.
        child_count: Processes that the command has started by then.
        number: The signal.
    """
    program = "import sys; from fastpersist.cli import main; sys.exit(main())"
    bench = subprocess.Popen(
        [sys.executable, "-c", program, "bench", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + 500
        while not list(directory.glob(when)):
            assert bench.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        workers = children_of(bench.pid)
        assert len(workers) >= child_count
        said = None
        while said is None:
            # Again after a while, as users do: Python drops the exception of one that comes in a `__del__`.
            bench.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = bench.communicate(timeout=60)[1]
            assert time.monotonic() < deadline_s
    finally:
        bench.kill()
        bench.communicate()
    assert bench.returncode == 128 + number, f"{bench.returncode}: {said}"
    dropped = r"(?s)Exception ignored in: .*?\nKeyboardInterrupt:? ?\n"  # by Python, in a `__del__` of another library
    assert "Traceback" not in re.sub(dropped, "", said), said
    assert list(directory.iterdir()) == []
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
