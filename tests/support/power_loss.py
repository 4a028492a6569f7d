"""Power loss, replayed: a save is recorded at the seams, and the disk rebuilt as a power cut may leave it.

What a disk may have lost. A cut comes after any prefix of the recording. In the prefix, a data operation
(write, size) is safe once a sync of its file came behind it, and a name operation once a sync of the
directory did. Each operation that is not safe may be on disk or not, whatever became of the others; a write
may also be torn, when half of its sectors are. No file system loses that much. Bytes that are allocated and
not written read as zeros.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.filesystems import Operation, WatchedFilesystem
from support.states import load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import using

SECTOR_BYTES = 512
DATA_OPERATIONS = ("allocate", "write", "truncate")
NAME_OPERATIONS = ("create", "rename", "unlink")

Names = dict[str, bytes]
"""A directory: the bytes of each file, by its path."""


class Fate(enum.Enum):
    """What becomes of an operation that no sync made safe."""

    KEPT = "kept"
    DROPPED = "dropped"
    TORN = "torn"  # writes only


class ViolationError(AssertionError):
    """After a power cut, a file is not what it has to be."""


# --- recording ---


class RecordingFilesystem(WatchedFilesystem):
    """Logs every operation, and before it the data writes that were complete when it began.

    Between them are marks: a step's save "started" or has "returned"; their size is the step.
    """

    def __init__(self) -> None:
        self.log: list[Operation] = []
        self._writing = ""  # the file that was created last

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self.take_writes()
        yield
        self.log.append(operation)
        if operation.name == "create":
            self._writing = operation.path

    def take_writes(self) -> None:
        """Log the writes that the engine has completed since the last call."""
        for offset_bytes, data in _native.take_recorded_writes():
            self.log.append(Operation("write", self._writing, offset_bytes=offset_bytes, data=data))


def record(recorder: RecordingFilesystem, path: Path, steps: list[int], size_bytes: int) -> list[Operation]:
    """Save the states of `steps` to one path, one after the other, and return all that was done."""
    _native.set_write_recording(True)
    try:
        with using(recorder):
            for step in steps:
                recorder.log.append(Operation("started", str(path), size_bytes=step))
                fp.save(make_state(step, size_bytes), path, engine="fault:threads")
                recorder.take_writes()
                recorder.log.append(Operation("returned", str(path), size_bytes=step))
    finally:
        _native.set_write_recording(False)
        _native.take_recorded_writes()
    return recorder.log


# --- rebuilding ---


def unsafe_operations(log: Sequence[Operation]) -> list[int]:
    """Return the indexes of the operations that a power cut at the end of `log` may undo."""
    unsafe = []
    synced_files: set[str] = set()
    synced_names = False
    for index in range(len(log) - 1, -1, -1):
        operation = log[index]
        if operation.name == "sync":
            synced_files.add(operation.path)
        elif operation.name == "sync_directory":
            synced_names = True
        elif (operation.name in DATA_OPERATIONS and operation.path not in synced_files) or (
            operation.name in NAME_OPERATIONS and not synced_names
        ):
            unsafe.append(index)
    return unsafe[::-1]


def apply(operation: Operation, content: bytearray, fate: Fate, rng: random.Random) -> None:
    """Do a data operation to the bytes of a file, as far as its fate lets it."""
    if operation.name == "write":
        end_bytes = operation.offset_bytes + len(operation.data)
        content.extend(bytes(max(0, end_bytes - len(content))))
        starts = range(0, len(operation.data), SECTOR_BYTES)
        for start in starts if fate is Fate.KEPT else rng.sample(starts, len(starts) // 2):
            sector = operation.data[start : start + SECTOR_BYTES]
            place = operation.offset_bytes + start
            content[place : place + len(sector)] = sector
    elif operation.name == "truncate":
        del content[operation.size_bytes :]
    content.extend(bytes(max(0, operation.size_bytes - len(content))))


def disk_after_cut(
    before: Names, log: Sequence[Operation], fates: dict[int, Fate], rng: random.Random
) -> dict[str, bytes]:
    """Rebuild the directory that `log` makes of `before`. `fates`, by index, are of what is not safe."""
    contents = [bytearray(content) for content in before.values()]
    on_disk = {path: number for number, path in enumerate(before)}  # name → which content
    in_kernel = dict(on_disk)  # what the names stood for while the save went on
    for index, operation in enumerate(log):
        fate = fates.get(index, Fate.KEPT)
        path = operation.path
        if operation.name == "create":
            contents.append(bytearray())
            in_kernel[path] = len(contents) - 1
            if fate is Fate.KEPT:
                on_disk[path] = in_kernel[path]
        elif operation.name == "rename":
            number = in_kernel[operation.target] = in_kernel.pop(path)
            if fate is Fate.KEPT:
                on_disk[operation.target] = number
                on_disk.pop(path, None)
        elif operation.name == "unlink":
            in_kernel.pop(path)
            if fate is Fate.KEPT:
                on_disk.pop(path, None)
        elif operation.name in DATA_OPERATIONS and fate is not Fate.DROPPED:
            apply(operation, contents[in_kernel[path]], fate, rng)
    return {path: bytes(contents[number]) for path, number in on_disk.items()}


def every_fate(log: Sequence[Operation]) -> Iterator[dict[int, Fate]]:
    """Yield each combination of fates of the operations that are not safe at the end of `log`."""
    unsafe = unsafe_operations(log)
    choices = [list(Fate) if log[index].name == "write" else [Fate.KEPT, Fate.DROPPED] for index in unsafe]
    for chosen in itertools.product(*choices):
        yield dict(zip(unsafe, chosen, strict=True))


# --- judging ---


@dataclass
class Judge:
    """Says whether a rebuilt directory is what the promise allows. Loads each different directory once.

    Args:
        scratch: The directory in which directories are rebuilt.
        path: The file that was saved, as the log names it.
        size_bytes: The size of the states.
        first: The step that was there before the log; None: nothing was.
    """

    scratch: Path
    path: Path
    size_bytes: int
    first: int | None
    judged_count: int = 0
    _known: dict[tuple[bytes | None, int], int | None] = field(default_factory=dict)

    def allowed(self, log: Sequence[Operation]) -> set[int | None]:
        """Return the steps that the file may hold after `log`: what returned last, or was started since."""
        steps: set[int | None] = {self.first}
        for operation in log:
            if operation.name == "started":
                steps.add(operation.size_bytes)
            elif operation.name == "returned":
                steps = {operation.size_bytes}
        return steps

    def judge(self, names: Names, log: Sequence[Operation]) -> None:
        """Check a rebuilt directory.

        Raises:
            ViolationError: The file is damaged, or absent, or older or newer than it may be.
        """
        step = self._step_in(names)
        if step not in self.allowed(log):
            done = " ".join(operation.name for operation in log)
            raise ViolationError(f"the file holds step {step}, not one of {self.allowed(log)}, after: {done}")

    def _step_in(self, names: Names) -> int | None:
        content = names.get(str(self.path))
        key = (content, len(names))
        if key not in self._known:
            self.judged_count += 1
            self._known[key] = self._load(names)
        return self._known[key]

    def _load(self, names: Names) -> int | None:
        directory = self.scratch / str(self.judged_count)
        directory.mkdir(parents=True)
        for path, content in names.items():
            (directory / Path(path).name).write_bytes(content)
        found = directory / self.path.name
        try:
            step = load_step(found, self.size_bytes) if found.exists() else None
            fp.save(make_state(0, self.size_bytes), found, durable=False)
            load_step(found, self.size_bytes)
        except (fp.FastPersistError, RuntimeError, AssertionError) as error:
            raise ViolationError(f"{found} cannot be loaded after a power cut: {error}") from error
        if left := pending_files(directory):
            raise ViolationError(f"the next save left {left} behind")
        return step
