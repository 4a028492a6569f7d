"""A training of `fuzz_devices`: what one thread has on its devices, how it saves and loads that, and what has to hold.

It knows at every moment what each of its tensors holds, in the order of its stream, and what each of its files has to
hold. Which errors are right follows from the faults that were drawn.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from device_faults import Faults, FoundError, Interrupter
from simulated_gpu import DTYPES, Contents, Entry, Gpus, contents_of, differences

import fastpersist as fp
from fastpersist.errors import DeviceError, FastPersistError, SkippedError, UnsupportedError

PATIENCE_S = 20.0
SIZES = [0, 1, 3, 8, 100, 511, 512, 513, 4000, 4096, 4097, 20_000, 65_536, 70_000, 263_000, 300_000, 900_001]
ENGINES = ["auto", "auto", "auto", "threads", "threads-buffered", "uring", "libaio", "uring-buffered"]
FAULTY_ENGINES = ["fault:threads", "fault:threads-buffered", "fault:uring", "fault:libaio"]


class _Async(NamedTuple):
    pending: fp.PendingSave
    path: Path
    contents: Contents
    engine: str


class ForeignSGD(torch.optim.SGD):
    """An optimizer that is not torch's own: it may work over streams of its own."""


class Training:
    """What one thread trains and saves."""

    def __init__(
        self,
        gpus: Gpus,
        rng: random.Random,
        directory: Path,
        faults: Faults,
        interrupter: Interrupter,
        use_cufile: bool,
    ) -> None:
        self.gpus, self.rng, self.directory, self.faults = gpus, rng, directory, faults
        self.interrupter = interrupter
        self.engines = ENGINES + (["cufile"] * 4 if use_cufile else [])
        self.cufile = use_cufile
        directory.mkdir()
        self.owned: dict[str, Entry] = {}
        self.free: dict[str, Entry] = {}
        self.files: dict[Path, list[Contents | None]] = {}  # what may be under a name: the last is the newest
        self.unfinished: list[_Async] = []
        self.log: list[str] = []
        self.checkpointer: fp.Checkpointer | None = None
        self.step_files: dict[int, Contents] = {}
        self.step_saves: list[tuple[int, fp.PendingSave | None, Contents]] = []
        self.step = 0
        self.now = 1
        self.has_steps_no_more = False
        self.interrupts = True
        self.in_directory: list[fp.PendingSave] = []
        self.manual = rng.random() < 0.2
        self._make_owned()
        for index in range(rng.randrange(1, 12)):
            self.add_free(f"f{index}")

    def say(self, text: str) -> None:
        self.log.append(f"{time.monotonic():.3f} {threading.current_thread().name} {text}")

    # --- the state

    def _ordinal(self) -> int | None:
        return self.rng.choice([None, *range(self.gpus.count), 0, 0])

    def _size(self) -> int:
        size = self.rng.choice(SIZES)
        return size + self.rng.choice([0, 0, self.rng.randrange(300)])

    def _tensor(self, ordinal: int | None, dtype: torch.dtype) -> torch.Tensor:
        count = self._size() // dtype.itemsize
        shape = (count,) if count % 2 or not count else (2, count // 2)
        if ordinal is None:
            return torch.empty(shape, dtype=dtype)
        return self.gpus.tensor(ordinal, dtype, shape)

    def _make_owned(self) -> None:
        parameters = []
        for index in range(self.rng.choice([1, 3, 10, 60])):
            ordinal = self._ordinal()
            parameter = torch.nn.Parameter(self._tensor(ordinal, self.rng.choice([torch.float32, torch.bfloat16])))
            parameters.append(parameter)
            self.owned[f"p{index}"] = Entry(parameter, ordinal)
        self.is_foreign = self.rng.random() < 0.3
        self.optimizer = (ForeignSGD if self.is_foreign else torch.optim.SGD)(parameters, lr=0.1)
        for index, parameter in enumerate(parameters):
            if self.rng.random() < 0.5:
                ordinal = self.owned[f"p{index}"].ordinal
                state = self._tensor(ordinal, torch.float32)
                self.optimizer.state[parameter]["exp_avg"] = state
                self.owned[f"s{index}"] = Entry(state, ordinal)
        for entry in self.owned.values():
            entry.change(self.gpus, self.rng)

    def add_free(self, name: str) -> None:
        ordinal = self._ordinal()
        if ordinal is not None and self.rng.random() < 0.5:
            value: Any = self.gpus.storage(ordinal, self._size())
        else:
            value = self._tensor(ordinal, self.rng.choice(list(DTYPES)))
        self.free[name] = Entry(value, ordinal)
        self.free[name].change(self.gpus, self.rng)

    def draw_state(self) -> tuple[dict[str, Any], Contents]:
        entries = {**self.owned, **self.free}
        names = list(entries)
        self.rng.shuffle(names)
        if self.rng.random() < 0.3:
            names = names[: self.rng.randrange(len(names) + 1)]
        if self.rng.random() < 0.2:
            names = [name for name in names if entries[name].ordinal is None]
        state = {name: entries[name].value for name in names}
        self.now += 1
        for name in names:
            entries[name].saved_at = self.now
            value = entries[name].value
            if isinstance(value, torch.Tensor) and self.rng.random() < 0.1:
                state[f"{name}-again"] = value.detach()  # shares the storage
        contents = {name: entries[name.removesuffix("-again")].contents for name in state}
        return state, contents

    # --- checking

    def check_file(self, path: Path) -> None:
        """What is under a name is one of the contents that may be there, whole."""
        allowed = self.files.get(path, [None])
        if not path.exists():
            if None not in allowed:
                raise FoundError(f"{path.name} is gone")
            return
        found = self.read(path)
        if found not in allowed:
            newest = allowed[-1]
            wrong = "it should not be there" if newest is None else differences(found, newest)
            raise FoundError(f"{path.name} holds what was never saved under that name: {wrong}")
        self.files[path] = [found]

    def read(self, path: Path) -> Contents:
        if path.suffix == ".safetensors" or self.rng.random() < 0.5:
            loaded = fp.load(path, map_location="cpu", weights_only=False)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=False)
        return {name: contents_of(value) for name, value in loaded.items()}

    def has_devices(self, state: dict[str, Any]) -> bool:
        entries = {**self.owned, **self.free}
        return any(entries[name.removesuffix("-again")].ordinal is not None for name in state)

    @contextlib.contextmanager
    def trying(self, what: str, engine: str, interrupt_s: float | None = None) -> Iterator[list[BaseException]]:
        """Run what may fail for the faults that were drawn, and for no others."""
        errors: list[BaseException] = []
        before = self.faults.allowed(engine)
        interrupt_count = self.interrupter.count
        self.say(what)
        try:
            with self.interrupter.after(interrupt_s):
                yield errors
        except KeyboardInterrupt as error:
            if interrupt_s is None:
                raise
            errors.append(error)
        except Exception as error:
            allowed = (*before, *self.faults.allowed(engine))
            if interrupt_s is not None and self.interrupter.count > interrupt_count:
                errors.append(KeyboardInterrupt())  # of which torch's C++ makes another one
            elif not isinstance(error, allowed):
                raise FoundError(f"{what}: {type(error).__name__}, though nothing was drawn that allows it") from error
            else:
                errors.append(error)
        if errors:
            self.say(f"  {type(errors[0]).__name__}: {errors[0]}"[:200])

    def draw_engine(self) -> tuple[str, bool]:
        if self.faults.disk and self.rng.random() < 0.7:
            return self.rng.choice(FAULTY_ENGINES), self.rng.random() < 0.7
        engine = self.rng.choice(self.engines)
        return engine, engine != "cufile" and self.rng.random() < 0.7

    def draw_interrupt(self) -> float | None:
        is_main = threading.current_thread() is threading.main_thread()
        if self.rng.random() < 0.75 or not is_main or not self.interrupts:
            return None
        return self.rng.choice([0.001, 0.01, 0.05, 0.2]) * self.rng.random()

    # --- what it does

    def save(self) -> None:
        state, contents = self.draw_state()
        path = self.directory / f"{self.rng.randrange(3)}.pt"
        if self.rng.random() < 0.15:
            state = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            state = {
                name: value
                for name, value in state.items()
                if not name.endswith("-again") and value.dtype != torch.complex128
            }
            contents = {name: contents[name] for name in state}
            path = path.with_suffix(".safetensors")
        self.finish_those_at(path)
        engine, checksum = self.draw_engine()
        interrupt_s = self.draw_interrupt()
        before = self.files.get(path, [None])
        what = f"save {path.name} {len(state)} {engine} {checksum} {interrupt_s}"
        only_host = not self.has_devices(state) and engine != "cufile"
        with self.trying(what, engine, interrupt_s) as errors:
            fp.save(state, path, engine=engine, checksum=checksum, durable=self.rng.random() < 0.2)
        if errors and only_host and isinstance(errors[0], DeviceError):
            raise FoundError("a save of CPU tensors failed for the device") from errors[0]
        if not errors:
            self.files[path] = [contents]
            if checksum and self.rng.random() < 0.2 and not fp.verify(path).ok:
                raise FoundError(f"the checksums of {path.name} are wrong")
        elif isinstance(errors[0], KeyboardInterrupt):
            self.files[path] = [*before, contents]
        self.check_file(path)

    def finish_those_at(self, path: Path | None) -> None:
        kept = []
        for one in self.unfinished:
            if path is not None and one.path != path:
                kept.append(one)
                continue
            self.finish(one)
        self.unfinished = kept

    def finish(self, one: _Async) -> None:
        interrupt_s = self.draw_interrupt()
        error: BaseException | None = None
        with self.trying(f"result {one.path.name}", one.engine, interrupt_s):
            with contextlib.suppress(KeyboardInterrupt):
                one.pending.result(PATIENCE_S)
        try:
            error = one.pending.exception(PATIENCE_S)
        except TimeoutError:
            raise FoundError(f"{one.path.name} is not over after {PATIENCE_S} s") from None
        if error is None:
            self.files[one.path] = [one.contents]
        elif isinstance(error, KeyboardInterrupt):
            self.files[one.path] = [*self.files.get(one.path, [None]), one.contents]
        self.check_file(one.path)

    def save_async(self) -> None:
        state, contents = self.draw_state()
        path = self.directory / f"{self.rng.randrange(3)}.pt"
        self.finish_those_at(path)
        engine, checksum = self.draw_engine()
        interrupt_s = self.draw_interrupt()
        with_optimizer = self.rng.random() < 0.6
        what = f"save_async {path.name} {len(state)} {engine} {checksum} {with_optimizer} {interrupt_s}"
        with self.trying(what, engine, interrupt_s) as errors:
            pending = fp.save_async(
                state,
                path,
                optimizer=self.optimizer if with_optimizer else None,
                gate="manual" if self.manual else "optimizer",
                engine=engine,
                checksum=checksum,
                durable=False,
            )
            self.unfinished.append(_Async(pending, path, contents, engine))
        if errors and isinstance(errors[0], KeyboardInterrupt):
            # It may go on behind, if the interrupt came when it had begun.
            self.files[path] = [*self.files.get(path, [None]), contents]

    def save_step(self) -> None:
        if self.has_steps_no_more:
            return
        if self.checkpointer is None:
            room = self.rng.choice([None, 0, 1 << 20, 1 << 21, 5 << 21, 1 << 26])
            self.checkpointer = fp.Checkpointer(
                self.directory / "steps",
                optimizer=self.optimizer if self.rng.random() < 0.8 else None,
                gate="manual" if self.manual else "optimizer",
                max_host_bytes=room,
                busy=self.rng.choice(["wait", "wait", "latest", "skip"]),
                paranoid=self.rng.random() < 0.2,
                engine=self.rng.choice([*ENGINES, *FAULTY_ENGINES]),
            )
        state, contents = self.draw_state()
        self.step += 1
        interrupt_s = self.draw_interrupt() if self.rng.random() < 0.3 else None
        with self.trying(f"step {self.step} {len(state)} {interrupt_s}", "auto", interrupt_s) as errors:
            pending = self.checkpointer.save(self.step, state, rank_state={"r": 1} if self.rng.random() < 0.2 else None)
            self.step_saves.append((self.step, pending, contents))
        if errors:
            self.step_saves.append((self.step, None, contents))
            if isinstance(errors[0], KeyboardInterrupt):
                # Where the lock of the root had just been taken, there is nobody to give it up.
                self.has_steps_no_more = self.checkpointer._root._root_lock is None

    def close_steps(self) -> None:
        if self.checkpointer is None:
            return
        with self.trying("close", "auto"):
            self.checkpointer.close()
        may_be: dict[int, Contents] = {}
        must_be: dict[int, Contents] = {}
        for step, pending, contents in self.step_saves:
            may_be[step] = contents
            if pending is None:
                continue
            error = pending.exception(0)
            if error is None:
                must_be[step] = contents
            elif isinstance(error, SkippedError) or not isinstance(error, KeyboardInterrupt):
                del may_be[step]
        there = set(self.checkpointer.steps())
        if not set(must_be) <= there or not there <= set(may_be):
            raise FoundError(f"steps {sorted(there)}; published {sorted(must_be)}, perhaps {sorted(may_be)}")
        for step in there:
            found = self.read(self.directory / "steps" / f"step-{step:08d}" / "state.pt")
            if found != may_be[step]:
                raise FoundError(f"step {step}: {differences(found, may_be[step])}")
        self.checkpointer = None

    def save_directory(self) -> None:
        path = self.directory / f"folder-{self.rng.randrange(1 << 30)}"
        many = [self.draw_state() for _ in range(self.rng.randrange(1, 4))]
        optimizer = self.optimizer if self.rng.random() < 0.5 else None
        with self.trying(f"directory of {len(many)}", "auto") as errors:
            with fp.DirectorySave(path) as files:
                for index, (state, _) in enumerate(many):
                    files.save(state, f"{index}.pt", optimizer=optimizer)
                pending = files.publish()
            self.in_directory = [pending]
            if self.rng.random() < 0.5:
                self.change()
            pending.result(PATIENCE_S)
        self.in_directory.clear()
        if errors:
            if path.exists():
                raise FoundError("a directory was published although its save failed")
            return
        for index, (_, contents) in enumerate(many):
            if (found := self.read(path / f"{index}.pt")) != contents:
                raise FoundError(f"{index}.pt of a directory: {differences(found, contents)}")

    def change(self) -> None:
        """A step of the optimizer, or something else that the training does with its tensors."""
        rng = self.rng
        how = rng.choice(["step", "step", "step", "free", "drop", "captured", "switch"])
        self.say(f"change: {how}")
        self.now += 1
        if how == "step":
            if self.manual:
                self._wait_captured()
            self.optimizer.step()
            self._change([entry for entry in self.owned.values() if rng.random() < 0.8], by_anybody=self.is_foreign)
        elif how == "free":
            self._change([entry for entry in self.free.values() if rng.random() < 0.8], by_anybody=False)
        elif how == "drop":
            for name in list(self.free):
                if rng.random() < 0.5:
                    del self.free[name]
                    self.add_free(f"f{rng.randrange(1 << 30)}")
        elif how == "switch":
            self.gpus.switch_stream(rng.randrange(self.gpus.count))
        elif how == "captured":
            self._wait_captured()
            every = (*self.owned.values(), *self.free.values())
            self._change([entry for entry in every if rng.random() < 0.5], by_anybody=True)

    def _unfinished(self) -> list[fp.PendingSave]:
        return (
            self.in_directory
            + [one.pending for one in self.unfinished]
            + [save for _, save, _ in self.step_saves if save is not None]
        )

    def _wait_captured(self) -> None:
        for save in self._unfinished():
            save.wait_captured()

    def _change(self, entries: list[Entry], *, by_anybody: bool) -> None:
        """Change entries over the current streams; or, by anybody, over others, which nobody has told to wait.

        That is right where a save that was captured has read an entry since it was changed: that change has been made.
        Not where something may have failed: nothing is captured then.
        """
        streams = {ordinal: self.gpus.new_stream(ordinal) for ordinal in range(self.gpus.count)} if by_anybody else {}
        for entry in entries:
            is_free = entry.saved_at > entry.changed_at and not self.faults.may_fail() and not self.interrupter.count
            stream = streams.get(entry.ordinal, 0) if is_free and entry.ordinal is not None else 0
            entry.change(self.gpus, self.rng, stream, self.now)
        for ordinal, stream in streams.items():
            self.gpus.cuda.stream_wait(self.gpus.stream(ordinal), stream)

    def load(self) -> None:
        path = self.rng.choice([*self.files, self.directory / "0.pt"])
        self.finish_those_at(path)
        if not path.exists() or path.suffix == ".safetensors":
            return
        allowed = self.files.get(path, [None])
        if self.rng.random() < 0.3:
            self.check_file(path)
            return
        engine, _ = self.draw_engine()
        wanted = self.rng.choice(["cpu", {"cuda:0": "cpu"}, None])
        interrupt_s = self.draw_interrupt()
        with self.trying(f"load {path.name} {engine} {wanted} {interrupt_s}", engine, interrupt_s) as errors:
            try:
                loaded = fp.load(path, map_location=wanted, weights_only=False, engine=engine)
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, FastPersistError):
                    raise
                return  # a torch without CUDA cannot make tensors there; it was filled all the same
        if not errors:
            found = {name: contents_of(value) for name, value in loaded.items()}
            if found not in allowed:
                raise FoundError(f"loaded from {path.name}: {differences(found, allowed[-1] or {})}")

    def save_and_load_storages(self) -> None:
        """Storages alone, which a torch without CUDA can have on a device after loading, too."""
        ordinal = self.rng.randrange(self.gpus.count)
        entries = {
            f"x{k}": Entry(self.gpus.storage(ordinal, self._size()), ordinal) for k in range(self.rng.randrange(9))
        }
        for entry in entries.values():
            entry.change(self.gpus, self.rng)
        contents = {name: entry.contents for name, entry in entries.items()}
        path = self.directory / f"storages-{self.rng.randrange(1 << 30)}.pt"
        engine, checksum = self.draw_engine()
        with self.trying(f"save storages {len(entries)} {engine}", engine) as errors:
            fp.save({name: entry.value for name, entry in entries.items()}, path, engine=engine, checksum=checksum)
        del entries
        if errors:
            if path.exists():
                raise FoundError("a failed save was published")
            return
        for _ in range(self.rng.randrange(1, 3)):
            to = self.rng.randrange(self.gpus.count)
            wanted = self.rng.choice([None, f"cuda:{to}", {f"cuda:{ordinal}": f"cuda:{to}"}, "cpu"])
            engine, _ = self.draw_engine()
            interrupt_s = self.draw_interrupt()
            with self.trying(f"load storages {engine} {wanted} {interrupt_s}", engine, interrupt_s) as errors:
                verify = checksum and self.rng.random() < 0.3
                loaded = fp.load(path, map_location=wanted, weights_only=False, verify=verify, engine=engine)
            if not errors:
                found = {name: contents_of(value) for name, value in loaded.items()}
                if found != contents:
                    raise FoundError(f"loaded to {wanted}: {differences(found, contents)}")
            loaded = None

    def load_into(self) -> None:
        """Fill tensors on a device in place."""
        ordinal = self.rng.randrange(self.gpus.count)
        tensors = {f"t{k}": self._tensor(ordinal, torch.float32) for k in range(self.rng.randrange(1, 6))}
        entries = {name: Entry(tensor, ordinal) for name, tensor in tensors.items()}
        for entry in entries.values():
            entry.change(self.gpus, self.rng)
        contents = {name: entry.contents for name, entry in entries.items()}
        path = self.directory / f"into-{self.rng.randrange(1 << 30)}.{self.rng.choice(['pt', 'safetensors'])}"
        engine, checksum = self.draw_engine()
        with self.trying(f"save for load_into {len(tensors)} {engine}", engine) as errors:
            fp.save(tensors, path, engine=engine, checksum=checksum)
        for entry in entries.values():
            entry.change(self.gpus, self.rng)
        if errors:
            return
        interrupt_s = self.draw_interrupt()
        engine, _ = self.draw_engine()
        with self.trying(f"load_into {engine} {interrupt_s}", engine, interrupt_s) as errors:
            fp.load_into(path, tensors, engine=engine)
        if not errors:
            found = {name: contents_of(tensor) for name, tensor in tensors.items()}
            if found != contents:
                raise FoundError(f"load_into: {differences(found, contents)}")

    def fork(self) -> None:
        """A child saves tensors of the CPU."""
        self.say("fork")
        path = self.directory / f"child-{self.rng.randrange(1 << 30)}.pt"
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
                fp.save({"w": torch.arange(100_000)}, path)
                pending = fp.save_async({"w": torch.arange(100_000)}, path)
                pending.result()
                code = 0
            except BaseException as error:  # noqa: BLE001
                sys.stderr.write(f"in the child: {error!r}\n")
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise FoundError(f"a child that saves tensors of the CPU ended with {code}")
        if not torch.equal(torch.load(path)["w"], torch.arange(100_000)):
            raise FoundError("a child has saved something else")

    def save_captured(self) -> None:
        """A stream that is being captured into a graph cannot be saved from."""
        state, _ = self.draw_state()
        ordinals = {
            entry.ordinal
            for name, entry in {**self.owned, **self.free}.items()
            if name in state and entry.ordinal is not None
        }
        path = self.directory / "captured.pt"
        with contextlib.ExitStack() as stack:
            for ordinal in range(self.gpus.count):
                stack.enter_context(self.gpus.cuda.captured(self.gpus.stream(ordinal)))
            self.say("save captured")
            try:
                fp.save(state, path)
            except UnsupportedError as error:
                if not ordinals:
                    raise FoundError("no device, and yet a graph was minded") from error
            except (*self.faults.allowed(), KeyboardInterrupt):
                pass
            else:
                if ordinals:
                    raise FoundError("a stream that is being captured was saved from")
        path.unlink(missing_ok=True)

    def run(self, count: int) -> None:
        rng = self.rng
        what: list[tuple[int, Callable[[], None]]] = [
            (5, self.save),
            (5, self.save_async),
            (5, self.save_step),
            (9, self.change),
            (1, self.save_directory),
            (3, self.load),
            (3, self.save_and_load_storages),
            (2, self.load_into),
            (1, self.fork),
            (4, lambda: self.faults.draw(rng, self.gpus)),
            (1, lambda: self.finish_those_at(None)),
        ]
        if threading.active_count() == 1:
            what.append((1, self.save_captured))
        for _ in range(count):
            rng.choices([call for _, call in what], [weight for weight, _ in what])[0]()

    def end(self) -> None:
        self.finish_those_at(None)
        self.close_steps()
        for path in list(self.files):
            self.check_file(path)

    def forget(self) -> None:
        """Let go of all tensors and saves."""
        self.owned.clear()
        self.free.clear()
        self.step_saves.clear()
        self.unfinished.clear()
        del self.optimizer
