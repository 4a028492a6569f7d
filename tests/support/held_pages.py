"""Memory whose pages keep waiting whoever touches them, until they are let go (userfaultfd).

So a test stops a thread in the middle of a copy, and knows which one, without any sleep.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
from types import TracebackType

import pytest
import torch

_SYSCALL = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1  # then no privilege is needed
_API, _REGISTER = 0xC018AA3F, 0xC020AA00
_API_VERSION, _THREAD_ID, _MISSING = 0xAA, 1 << 8, 1
_PAGE_FAULT = 0x12


class HeldPages:
    """A tensor of bytes, some of whose pages are held. A context manager that lets them go.

    Skips the test where the kernel does not let us.

    Attributes:
        tensor: The bytes, zeros.
    """

    def __init__(self, size_bytes: int, first_held: int, held_bytes: int) -> None:
        number = _SYSCALL.get(platform.machine())
        if number is None:
            pytest.skip(f"userfaultfd has no number here for {platform.machine()}")
        self._fd: int | None = ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC | _USER_MODE_ONLY)
        if self._fd == -1:
            pytest.skip(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        fcntl.ioctl(self._fd, _API, bytearray(struct.pack("QQQ", _API_VERSION, _THREAD_ID, 0)))
        self.tensor = torch.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
        start = self.tensor.data_ptr() + first_held
        fcntl.ioctl(self._fd, _REGISTER, bytearray(struct.pack("QQQQ", start, held_bytes, _MISSING, 0)))

    def toucher(self) -> str:
        """Wait until a thread touches a held page; return the name of that thread."""
        assert self._fd is not None
        event, _, _, thread = struct.unpack("B7xQQI4x", os.read(self._fd, 32))
        assert event == _PAGE_FAULT
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().strip()

    def let_go(self) -> None:
        """Let everyone go on; the pages are zeros. May be called again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> HeldPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.let_go()
