"""Take io_uring away from the calling process, as the default security profiles of container engines do.

A seccomp filter answers EPERM to io_uring_setup, io_uring_enter and io_uring_register. This shows how we do without,
it is no security boundary: other ways into the kernel stay open.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

from fastpersist.errors import UnsupportedError

__all__ = ["deny_io_uring"]

# linux/audit.h: the numbers that the kernel gives the filter for "which table is the system call's number from".
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The same on every architecture, as all numbers from 424 on are.
_IO_URING_SETUP, _IO_URING_REGISTER = 425, 427

# linux/prctl.h, linux/seccomp.h
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_SECCOMP_RET_ALLOW, _SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000

# linux/bpf_common.h: load a word of struct seccomp_data; jump if equal, if greater or equal; return.
_LOAD_WORD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_OFFSET_OF_NUMBER, _OFFSET_OF_ARCHITECTURE = 0, 4


class _Instruction(ctypes.Structure):
    """struct sock_filter: what to do, instructions to skip if true and if false, operand."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("skip_if_true", ctypes.c_uint8),
        ("skip_if_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def deny_io_uring() -> None:
    """Make every io_uring system call fail with EPERM, for the rest of this thread's life and its descendants'.

    Call it before any other thread is started: threads that exist already keep io_uring.

    Raises:
        UnsupportedError: The kernel takes no filter, or the architecture is not known here.

    Source: seccomp(2), "Filters"; Documentation/userspace-api/seccomp_filter.rst.
    """
    architecture = _AUDIT_ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise UnsupportedError(f"no system call filter is known for {platform.machine()}")
    instructions = (_Instruction * 7)(
        _Instruction(_LOAD_WORD, 0, 0, _OFFSET_OF_ARCHITECTURE),
        _Instruction(_JUMP_EQUAL, 0, 3, architecture),
        _Instruction(_LOAD_WORD, 0, 0, _OFFSET_OF_NUMBER),
        _Instruction(_JUMP_GREATER_EQUAL, 0, 1, _IO_URING_SETUP),
        _Instruction(_JUMP_GREATER_EQUAL, 0, 1, _IO_URING_REGISTER + 1),
        _Instruction(_RETURN, 0, 0, _SECCOMP_RET_ALLOW),
        _Instruction(_RETURN, 0, 0, _SECCOMP_RET_ERRNO | errno.EPERM),
    )
    program = _Program(len(instructions), instructions)
    # Without new privileges for whatever it executes, a process may filter itself without being root.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, None)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


def _prctl(operation: int, value: int, pointer: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(operation, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)):
        reason = os.strerror(ctypes.get_errno())
        raise UnsupportedError(f"the kernel takes no system call filter (prctl {operation}: {reason})")
