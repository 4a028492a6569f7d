"""What goes wrong in a round of `fuzz_devices`: the driver and the disk fail, streams stand still, Ctrl-C comes."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from simulated_gpu import Gpus
from support.cuda_double import CudaDouble

from fastpersist import _native
from fastpersist.errors import DeviceError, StorageError, UnsupportedError

TRANSIENT = [1, 2, 46, 304, 801]
STICKY = [700, 719, 999, 214, 702]
CALLS = [
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuStreamCreate",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuMemHostRegister_v2",
    "cuMemGetAddressRange_v2",
    "cuMemAlloc_v2",
]


class FoundError(AssertionError):
    """What README or a docstring promises does not hold."""


class Faults:
    """What goes wrong in this process, and so which errors are right. Thread-safe as far as it has to be."""

    def __init__(self, cuda: CudaDouble, say: Callable[[str], None]) -> None:
        self.cuda = cuda
        self._say = say
        self.device = False  # a call of the driver may fail
        self.disk = False
        self.hung = False  # a stream stands still for longer than the grace time
        self._timers: list[threading.Timer] = []

    def allowed(self, engine: str = "auto") -> tuple[type[BaseException], ...]:
        found: list[type[BaseException]] = []
        if self.device or self.hung:
            found += [DeviceError]
        if self.disk:
            found += [StorageError]
        if engine == "cufile" and (self.device or self.hung or self.disk):
            found += [UnsupportedError, StorageError]
        return tuple(found)

    def may_fail(self) -> bool:
        return self.device or self.disk or self.hung

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, call)
        self._timers.append(timer)
        timer.start()

    def draw(self, rng: random.Random, gpus: Gpus) -> None:
        kind = rng.choice(["call", "call", "sticky", "async", "delay", "hold", "block", "pin", "disk", "hang"])
        self._say(f"fault {kind}")
        if kind in ("call", "sticky"):
            self.device = True
            call = rng.choice(CALLS)
            nth = rng.choice([1, 1, 2, 3, rng.randrange(1, 60), rng.randrange(1, 400)])
            error = rng.choice(TRANSIENT if kind == "call" else STICKY)
            if kind == "call" and rng.random() < 0.1:
                nth = 0
            self._say(f"  {call} {nth} {error}")
            self.cuda.fail(call, nth, error)
        elif kind == "async":
            self.device = True
            call = rng.choice(["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"])
            self.cuda.fail_async(call, rng.randrange(1, 60), rng.choice(STICKY))
        elif kind == "delay":
            self.cuda.delay_us(rng.choice([0, 20, 200, 2000]))
        elif kind == "hold":
            self.cuda.hold_copies(rng.randrange(6))
            self.later(rng.uniform(0, 0.25), lambda: self.cuda.hold_copies(-1))
        elif kind in ("block", "hang"):
            stream = gpus.stream(rng.randrange(gpus.count))
            self.cuda.stream_block(stream)
            if kind == "hang":
                self.hung = True
            self.later(rng.uniform(0, 0.2 if kind == "block" else 1.5), lambda: self.cuda.stream_unblock(stream))
        elif kind == "pin":
            self.cuda.set_registration_limit(rng.choice([0, 100_000, 1 << 20, 3 << 20]))
        elif kind == "disk":
            self.disk = True
            how = rng.choice(["errno", "errno", "short", "zero", "delay"])
            _native.set_fault_plan(
                _native.FaultPlan(
                    op=rng.choice(["any", "write", "read"]),
                    nth=rng.randrange(1, 40),
                    count=rng.choice([1, 1, 3]),
                    kind=how,
                    sys_errno=rng.choice([errno.EIO, errno.ENOSPC]),
                    delay_ms=rng.randrange(50),
                )
            )

    def end(self) -> list[str]:
        """Let everything go on; return what the double says was done wrongly, and forget all that was planned."""
        for timer in self._timers:
            timer.join()
        self.cuda.hold_copies(-1)
        violations = self.cuda.violations
        self.cuda.clear()
        _native.clear_fault_plan()
        self.device = self.disk = self.hung = False
        return violations


class Interrupter:
    """Ctrl-C for the main thread, somewhere in what it calls."""

    def __init__(self) -> None:
        self._armed = False
        self.count = 0
        signal.signal(signal.SIGALRM, self._hear)

    # Where Python itself would carry on without a word, or C++ of torch would, nothing is stopped.
    def _hear(self, _number: int, frame: FrameType | None) -> None:
        if not self._armed:
            return
        here = frame.f_code.co_filename if frame is not None else ""
        if here.endswith(("contextlib.py", "device_trainings.py", "device_faults.py")):  # it is not being called now
            signal.setitimer(signal.ITIMER_REAL, 1e-3)
            return
        while frame is not None:
            if frame.f_code.co_filename.endswith(("simulated_gpu.py", "weakref.py")):
                signal.setitimer(signal.ITIMER_REAL, 1e-3)
                return
            frame = frame.f_back
        self._armed = False
        self.count += 1
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def after(self, delay_s: float | None) -> Iterator[None]:
        if delay_s is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, max(1e-4, delay_s))
        try:
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
