"""A file system in user space (FUSE) that passes everything on to a directory, and lacks what a test says.

    with fuse_mount(tmp_path, latency_us=1000, rename2=False) as mounted:
        fp.save(state, mounted / "state.pt")

`fuse_passthrough.cc` is the program behind it, with the meaning of each option. Nothing waits for it for ever: it takes
the mount off and ends when the block ends, when this process dies, and after five minutes in any case.

Needs root, /dev/fuse and a compiler; without them the test is skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from csrc.test_native_programs import build

_PROGRAM = "fuse_passthrough"
_CANNOT_RUN = 77
_PATIENCE_S = 30


def why_no_fuse() -> str | None:
    """Say what is missing for file systems in user space, as far as can be told; None when nothing is."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    return None


@contextmanager
def fuse_mount(
    scratch: Path,
    *,
    latency_us: int = 0,
    cache: Literal["through", "back", "none"] = "through",
    direct: bool = True,
    locks: Literal["kernel", "server", "no"] = "kernel",
    rename2: bool = True,
    fallocate: bool = True,
) -> Iterator[Path]:
    """Mount a directory below `scratch` at another one there for the block. Skips where that is not possible."""
    if (missing := why_no_fuse()) is not None:
        pytest.skip(missing)
    source, directory = scratch / "fuse-source", scratch / "fuse"
    source.mkdir(exist_ok=True)
    directory.mkdir(exist_ok=True)
    switches = {"direct": direct, "rename2": rename2, "fallocate": fallocate}
    words = [f"latency-us={latency_us}", f"cache={cache}", f"locks={locks}"]
    words += [f"{name}={'yes' if on else 'no'}" for name, on in switches.items()]
    with subprocess.Popen(
        [build(_PROGRAM, "plain"), source, directory, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            if server.stdout.readline() == "":
                _, said = server.communicate(timeout=_PATIENCE_S)
                if server.returncode == _CANNOT_RUN:
                    pytest.skip(said.strip())
                pytest.fail(f"{_PROGRAM} ended with {server.returncode}: {said}", pytrace=False)
            yield directory
        finally:
            # Lazily, whatever is still open there. Then its end answers what still waits for it.
            subprocess.run(["umount", "--lazy", str(directory)], check=False, capture_output=True)
            server.kill()
