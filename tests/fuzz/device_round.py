"""Plays a round of `fuzz_devices` from its seed, in a process of its own, and looks at what is left of it."""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_faults import Faults, FoundError, Interrupter
from device_trainings import Training
from simulated_gpu import Gpus, teach_views
from support.cuda_double import cuda_double
from support.cufile_double import SAYS_P2P, cufile_double
from support.leaks import Inventory, take_inventory

import fastpersist as fp
from fastpersist import _native
from fastpersist.checkpointer import checkpointer
from fastpersist.loading import unpickle
from fastpersist.saving import directory_save, file_save, write_file
from fastpersist.transfer import cuda, gpudirect
from fastpersist.transfer.arena import Arena

CHUNK_BYTES = 1 << 16
GRACE_S = 0.3
PATIENCE_S = 5.0


class Round:
    """A round: what it needs is set up, then it is played.

    Args:
        seed: The seed of everything that is drawn.
        directory: An empty directory for its files.
    """

    def __init__(self, seed: int, directory: Path) -> None:
        self._rng = random.Random(seed)
        self._directory = directory
        self._trainings: list[Training] = []
        self._notes: list[str] = []
        self._arenas: list[Arena] = []
        self._ring_bytes = CHUNK_BYTES * self._rng.choice([4, 4, 5, 8, 16])
        logging.getLogger("fastpersist").setLevel(logging.CRITICAL)
        os.environ["FASTPERSIST_CONFIG"] = ""
        os.environ["FASTPERSIST_CHUNK_BYTES"] = str(CHUNK_BYTES)
        os.environ["FASTPERSIST_RING_BYTES"] = str(self._ring_bytes)
        if self._rng.random() < 0.1:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
        self._before = take_inventory(directory)
        self._cuda = cuda_double()
        self._cuda.reset(self._rng.randrange(1, 4))
        self._gpus = Gpus(self._cuda, self._cuda.device_count, self._rng)
        self._cufile = self._rng.random() < 0.25
        self._faults = Faults(self._cuda, self._say)
        self._interrupter = Interrupter()
        self._replace()

    def _replace(self) -> None:
        """Put the double in the place of what a torch with CUDA would do."""
        _native.set_device_grace_s(GRACE_S)
        gpus, arenas, allocate = self._gpus, self._arenas, unpickle.new_storage
        rooms: Any = (cuda, unpickle, torch.cuda, checkpointer, gpudirect)
        teach_views()

        class NotedArena(Arena):
            def __init__(self, max_bytes: int | None = None) -> None:
                super().__init__(max_bytes)
                arenas.append(self)

        def new_storage(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
            if device.type != "cuda":
                return allocate(size_bytes, device)
            return gpus.storage(device.index or 0, size_bytes)

        rooms[0].caller_stream = gpus.stream
        rooms[1].new_storage, rooms[1]._device_for = new_storage, torch.device
        rooms[2]._lazy_init = lambda: None
        rooms[3].Arena = NotedArena
        arenas += [file_save.async_arena, write_file._gathering, directory_save._arena]
        if self._cufile:
            rooms[4]._MODULES = "/proc/self"  # which the double does not look for
            cufile_double().clear()
            cufile_double().set_way(SAYS_P2P)

    def told(self) -> list[str]:
        """Return what was done, in order."""
        return sorted([line for training in self._trainings for line in training.log] + self._notes)

    def _say(self, text: str) -> None:
        self._notes.append(f"{time.monotonic():.3f} {threading.current_thread().name} {text}")

    def play(self) -> None:
        """Train on one or several threads, then look at what is left.

        Raises:
            FoundError: Something does not hold that should.
        """
        rng = self._rng
        self._say(f"{self._gpus.count} devices, ring of {self._ring_bytes // CHUNK_BYTES}, cuFile: {self._cufile}")
        thread_count = rng.choice([1, 1, 1, 2, 3])
        count = rng.randrange(3, 25)
        if rng.random() < 0.5:
            self._faults.draw(rng, self._gpus)
        seeds = [rng.getrandbits(48) for _ in range(thread_count)]
        errors: list[BaseException] = []

        def train(index: int) -> None:
            try:
                training = self._training(str(index), random.Random(seeds[index]))
                training.run(count)
                training.end()
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                self._say(f"FOUND {error!r}")
                errors.append(error)

        threads = [threading.Thread(target=train, args=(index,), name=f"t{index}") for index in range(1, thread_count)]
        for thread in threads:
            thread.start()
        train(0)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self._end()
        self._look_at_what_is_left()

    def _training(self, name: str, rng: random.Random) -> Training:
        training = Training(self._gpus, rng, self._directory / name, self._faults, self._interrupter, self._cufile)
        self._trainings.append(training)
        return training

    def _end(self) -> None:
        """Whatever has happened, tensors of the CPU are saved; and those of devices once they are well again."""
        self._say("the end")
        self._save_on_cpu(300_000)
        violations = self._faults.end()
        if self._cufile:
            violations += cufile_double().violations
        self._say("the last training")
        last = self._training("last", self._rng)
        last.interrupts = False
        for call in (last.save, last.save_async, last.change, last.save_step, last.change, last.save_and_load_storages):
            call()
        last.end()
        if violations := violations + self._cuda.violations:
            raise FoundError("CUDA was misused: " + "; ".join(violations[:5]))

    def _save_on_cpu(self, count: int = 3) -> None:
        path = self._directory / "cpu.pt"
        fp.save({"a": torch.arange(count)}, path)
        if not torch.equal(torch.load(path)["a"], torch.arange(count)):
            raise FoundError("a save of CPU tensors is wrong")

    def _look_at_what_is_left(self) -> None:
        for training in self._trainings:
            training.forget()
        if not self._cufile:  # whose rings take back what devices let go of when they are used again
            self._await("the ring lacks buffers", lambda: _native.ring_free_count() == _native.ring_buffer_count())
        self._await("tensors are kept alive", lambda: self._gpus.live_count() == 0)
        natives = [arena._native for arena in self._arenas if arena._native is not None]
        if used_bytes := [native.used_bytes for native in natives if native.used_bytes]:
            raise FoundError(f"arenas have {used_bytes} bytes in use")
        pinned_bytes, registered_bytes = _native.pinned_bytes(), self._cuda.registered_bytes
        if registered_bytes != pinned_bytes:
            raise FoundError(f"{registered_bytes} bytes are registered, and {pinned_bytes} counted")
        if self._cuda.stream_count > self._gpus.stream_count + 2 * self._gpus.count:
            raise FoundError(f"{self._cuda.stream_count} streams, {self._gpus.stream_count} of them the trainings'")
        if not self._interrupter.count:  # Ctrl-C may come between an open() and who closes it
            self._await("left behind", lambda: not self._left(), lambda: str(self._left()))

    def _left(self) -> list[str]:
        before: Inventory = self._before
        _native.empty_pinned_cache()  # which a thread watches over
        left = take_inventory(self._directory).leaked_since(before)
        if self._cufile:  # it lets go of a file when the next one comes
            left = [one for one in left if str(self._directory) not in one]
        return [one for one in left if "cuda-double" not in one]

    def _await(self, what: str, holds: Callable[[], bool], details: Callable[[], str] = lambda: "") -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > deadline_s:
                raise FoundError(f"{what} {details()}")
            self._save_on_cpu()  # takes back what devices have let go of
            gc.collect()
            time.sleep(0.05)
