"""Builds and steers the double of libcufile: GPUDirect Storage on a machine without a GPU, over `cuda_double`.

    storage = cufile_double()   # once loaded, the product finds it by the name libcufile.so.0
    storage.set_way(SAYS_P2P)   # what its statistics say of the transfers to come

The library is of the process and the product opens it once: what a test sets, `CuFileDouble.clear` takes back.
`cufile_interface.h` in cuda_double/ says what each function does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.cuda_double import BUILD, FLAGS, SOURCE, DoubleError, cuda_double

SONAME = "libcufile.so.0"

SAYS_POSIX, SAYS_NVFS, SAYS_P2P = 0, 1, 2  # CuFileDoubleWay
AS_DOCUMENTED, GROWN, LEFT_OUT, DISABLED, ABSURD = 0, 1, 2, 3, 4  # CuFileDoubleOddity

IO_DISABLED = 5034


def build_cufile_double() -> Path:
    """Return the path of the double's library, built unless it is there: any number of processes may build at once."""
    sources = sorted(SOURCE.glob("cufile*.cc"))
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in (*sources, *sorted(SOURCE.glob("cufile*.h"))):
        digest.update(path.read_bytes())
    library = BUILD / f"cufile-{digest.hexdigest()[:12]}" / SONAME
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler, which the double of libcufile is built with")
    library.parent.mkdir(parents=True, exist_ok=True)
    # Under a name of its own, then renamed: another process finds all of a library, or none.
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        built = Path(scratch) / SONAME
        links = ("-shared", f"-Wl,-soname,{SONAME}", "-Wl,-z,nodelete", "-ldl")
        command = [*compiler.split(), *FLAGS, *map(str, sources), *links, "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise DoubleError(f"the double of libcufile does not build:\n{result.stdout}{result.stderr}")
        built.replace(library)
    return library


class CuFileDouble:
    """The double of this process. Thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.cufile_double_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        library.cufile_double_call_count.argtypes = [ctypes.c_char_p]
        library.cufile_double_violation.restype = ctypes.c_char_p
        for count in ("call_count", "host_transfer_count", "unregistered_transfer_count", "file_count", "buffer_count"):
            getattr(library, f"cufile_double_{count}").restype = ctypes.c_int64

    def clear(self) -> None:
        """Forget plans, counts, statistics and violations."""
        self.library.cufile_double_clear()

    def set_way(self, way: int) -> None:
        """Choose what the statistics say of the transfers to come."""
        self.library.cufile_double_set_way(way)

    def set_oddity(self, oddity: int) -> None:
        """Choose what is odd about the statistics."""
        self.library.cufile_double_set_oddity(oddity)

    def fail(self, call: str, nth: int, error: int) -> None:
        """Make the nth call (from 1; 0: each) by that name from now on fail; below 5000 the error is an errno."""
        self.library.cufile_double_fail(call.encode(), nth, error)

    def call_count(self, call: str) -> int:
        return int(self.library.cufile_double_call_count(call.encode()))

    @property
    def host_transfer_count(self) -> int:
        return int(self.library.cufile_double_host_transfer_count())

    @property
    def unregistered_transfer_count(self) -> int:
        return int(self.library.cufile_double_unregistered_transfer_count())

    @property
    def file_count(self) -> int:
        return int(self.library.cufile_double_file_count())

    @property
    def buffer_count(self) -> int:
        return int(self.library.cufile_double_buffer_count())

    @property
    def violations(self) -> list[str]:
        """What was done that cuFile forbids, in words."""
        texts = (self.library.cufile_double_violation(i) for i in range(self.library.cufile_double_violation_count()))
        return [text.decode() for text in texts]


@functools.cache
def cufile_double() -> CuFileDouble:
    """Return the double of this process, loaded by the first call; skips the test where it is of no use."""
    cuda_double()
    library = ctypes.CDLL(str(build_cufile_double()), mode=ctypes.RTLD_GLOBAL)
    if not hasattr(ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), "cufile_double_violation_count"):
        pytest.skip("this torch, which is built for CUDA, has loaded the real libcufile, and the product takes that")
    return CuFileDouble(library)
