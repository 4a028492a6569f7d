"""What the examples larger than memory share: a process in a memory cgroup, so that what it reads does not stay there.

Making such a group needs root. Without it the process runs all the same, and nothing limits its memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_VARIABLE = "EXAMPLE_MEMORY_GROUP"


def make_group(limit_bytes: int) -> Path:
    """Make a memory cgroup of version 1 or 2.

    Raises:
        OSError: Only root may, and in some containers not even root.
    """
    root = Path("/sys/fs/cgroup")
    is_unified = (root / "cgroup.controllers").exists()
    if is_unified:
        (root / "cgroup.subtree_control").write_text("+memory")
    group = (root if is_unified else root / "memory") / f"larger-than-memory-{os.getpid()}"
    group.mkdir()
    (group / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(limit_bytes))
    return group


def run_held_down(script: str, words: list[str], limit_bytes: int) -> None:
    """Run a Python script in a process that may have so much memory; it calls `join_group` first.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    group = None
    try:
        group = make_group(limit_bytes)
        print(f"in a memory cgroup of {limit_bytes / 1e6:.0f} MB", flush=True)
    except OSError as error:
        print(f"in a process whose memory nothing limits, as no memory cgroup can be made here: {error}", flush=True)
    options = [f"-W{option}" for option in sys.warnoptions]
    environment = os.environ | ({_VARIABLE: str(group)} if group else {})
    try:
        subprocess.run([sys.executable, *options, script, *words], check=True, env=environment)
    finally:
        if group is not None:
            group.rmdir()


def join_group() -> None:
    """Put this process into the group that was made for it, before torch takes memory, which would stay outside."""
    if _VARIABLE in os.environ:
        Path(os.environ[_VARIABLE], "cgroup.procs").write_text(str(os.getpid()))
