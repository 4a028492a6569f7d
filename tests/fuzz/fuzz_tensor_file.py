"""Fuzz TensorFile: arguments that may be anything, and sequences of requests against a bytearray.

    python tests/fuzz/fuzz_tensor_file.py --seconds 5 --seed 1

An input is a program in JSON: how the file is opened, and steps. Steps that make no sense must raise ConfigError and
change nothing; a read beyond the end must say how much is there; everything else must leave what a bytearray would
hold. Several requests may be under way at once, as long as they do not overlap.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from fuzzing import EDGES, main

import fastpersist as fp
from fastpersist.errors import ConfigError, EndOfFileError, StorageError

torch.set_num_threads(1)
os.environ["FASTPERSIST_CONFIG"] = ""
warnings.filterwarnings("ignore", category=UserWarning)  # torch's, of sparse and nested tensors

ENGINES = ["auto", "uring", "libaio", "threads", "threads-buffered", "uring-buffered", "libaio-buffered"]
SIZES = [0, 1, 7, 511, 512, 513, 4095, 4096, 4097, 8192, 12_289, 20_000, 70_000]
LENGTH_MAX = 300_000

WILD_NUMBERS: list[Any] = [*EDGES, -1, -(1 << 63), 1 << 70, 1.5, float("nan"), "x", "", None, [], {}, [1]]
WILD_OPTIONS: dict[str, list[Any]] = {
    "path": ["", ".", "no/such/file", "a\0b", "\ud800", 3, None, [], 1.5, "/proc/self/mem/x"],
    "mode": ["a", "rw", "rt", "bb", "R", "", None, 0, [], {}, "r\0", True],
    "engine": ["abacus", "", None, 0, [], {}, "fault:abacus", "URING", "uring\0"],
    "queue_depth": [0, -1, 4097, 1 << 70, 1.5, "8", [], True, float("nan")],
    "chunk_bytes": [0, -4096, 4095, 5000, 1 << 31, 1 << 70, "4096", 4096.0, [], True],
    "threads": [0, -1, 1 << 20, 1.5, "2", [], False],
}
WILD_TENSORS: dict[str, Any] = {
    "none": lambda: None,
    "bytes": lambda: b"abcd",
    "list": lambda: [1, 2],
    "class": lambda: torch.Tensor,
    "transposed": lambda: torch.zeros(2, 3).t(),
    "strided": lambda: torch.zeros(9)[::2],
    "expanded": lambda: torch.zeros(1).expand(4),
    "sparse": lambda: torch.zeros(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "conjugated": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "freed": lambda: _freed(),
    "zero": lambda: torch._efficientzerotensor(3),
}
WILD_LISTS: dict[str, Any] = {
    "none": lambda good: None,
    "number": lambda good: 5,
    "tensor": lambda good: [good],
    "single": lambda good: [(good,)],
    "triple": lambda good: [(good, 0, 0)],
    "turned": lambda good: [(0, good)],
    "late": lambda good: [(good, 0), (good, 8), (None, 0)],
    "wild offset": lambda good: [(good, 0), (good, -5)],
}

outcomes: Counter[str] = Counter()
_directory = tempfile.TemporaryDirectory(prefix="fuzz-tensor-file-")
_path = Path(_directory.name) / "file"
_usable = ["auto", *(probe.name for probe in fp.engines(_directory.name) if probe.usable)]


def _freed() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


# ------------------------------------------------------------------------------------------------------ inputs


def place(rng: random.Random) -> list[int]:
    """Size, offset, and how far behind the start of a page the tensor lies."""
    size = rng.choice([*SIZES, rng.randrange(30_000)])
    return [size, rng.choice([*SIZES, rng.randrange(100_000)]), rng.choice([0, 0, 1, 8, 512, 2048])]


def step(rng: random.Random) -> list[Any]:
    chance = rng.random()
    if chance < 0.55:
        name = rng.choice(["write", "read", "write", "read", "write_async", "read_async"])
        return [name, place(rng)]
    if chance < 0.70:
        return [rng.choice(["write_list", "read_list"]), [place(rng) for _ in range(rng.randrange(6))]]
    if chance < 0.78:
        return [rng.choice(["truncate", "allocate"]), rng.choice([*SIZES, rng.randrange(100_000)])]
    if chance < 0.86:
        return [rng.choice(["sync", "size", "reopen", "wait", "drop"]), None]
    if chance < 0.90:
        return [rng.choice(["wild truncate", "wild allocate"]), rng.choice(WILD_NUMBERS)]
    if chance < 0.94:
        return ["wild offset", rng.choice(WILD_NUMBERS)]
    if chance < 0.97:
        return ["wild tensor", rng.choice(list(WILD_TENSORS))]
    return ["wild list", rng.choice(list(WILD_LISTS))]


def make_input(rng: random.Random) -> bytes:
    options: dict[str, Any] = {
        "engine": rng.choice(ENGINES),
        "queue_depth": rng.choice([None, 1, 2, 7, 64]),
        "chunk_bytes": rng.choice([4096, 8192, 65_536, 1 << 20]),
        "threads": rng.choice([1, 2, 3]),
    }
    program = {
        "start": rng.choice([*SIZES, rng.randrange(100_000)]),
        "seed": rng.randrange(1 << 30),
        "options": options,
        "steps": [step(rng) for _ in range(rng.randrange(1, 14))],
        "wild": {},
    }
    if rng.random() < 0.3:
        name = rng.choice(list(WILD_OPTIONS))
        program["wild"] = {name: rng.choice(WILD_OPTIONS[name])}
    return json.dumps(program).encode()


# ------------------------------------------------------------------------------------------------------- trying


def tensor_of(data: bytes, shifted_bytes: int) -> torch.Tensor:
    memory = torch.zeros(len(data) + 8192, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096 + shifted_bytes
    tensor = memory[start : start + len(data)]
    if data:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy())


class Run:
    """A file, the bytearray that it has to be equal to, and what is under way."""

    def __init__(self, program: dict[str, Any]) -> None:
        self._options = program["options"]
        if self._options["engine"] not in _usable:
            self._options["engine"] = "auto"
        self._rng = random.Random(program["seed"])
        self.model = bytearray(self._rng.randbytes(program["start"]))
        _path.write_bytes(self.model)
        self.file = self._opened()
        self._under_way: list[tuple[fp.PendingIO, int, int, torch.Tensor, bytes | None]] = []

    def _opened(self) -> fp.TensorFile:
        return fp.TensorFile(_path, "r+", **self._options)

    def do(self, name: str, argument: Any) -> None:
        outcomes[name] += 1
        if name.endswith("_async"):
            size, offset, shifted_bytes = argument
            if any(offset < end and start < offset + size for _, start, end, _, _ in self._under_way):
                self.wait()
            getattr(self, name)(size, offset, shifted_bytes)
            return
        if name in ("drop", "wait"):
            if name == "drop" and not any(wanted is not None for *_, wanted in self._under_way):
                self._under_way.clear()  # writes come to their end all the same
                gc.collect()
            self.wait()
            return
        self.wait()
        if name.startswith("wild "):
            self.refused(name.removeprefix("wild "), argument)
        elif name in ("write_list", "read_list"):
            getattr(self, name)(argument)
        elif name in ("write", "read"):
            getattr(self, name)(*argument)
        elif name in ("truncate", "allocate"):
            getattr(self.file, name)(argument)
            if name == "truncate":
                del self.model[argument:]
            self.model.extend(bytes(max(0, argument - len(self.model))))
        elif name == "reopen":
            self.file.close()
            self.file = self._opened()
        elif name == "sync":
            self.file.sync()

    def wait(self) -> None:
        for pending, start, end, tensor, wanted in self._under_way:
            if pending.result(60) != end - start:
                raise AssertionError("another number of bytes was moved")
            if wanted is not None and bytes_of(tensor) != wanted:
                raise AssertionError(f"read other bytes at {start}")
        self._under_way.clear()

    def _put(self, data: bytes, offset: int) -> None:
        if data:
            self.model.extend(bytes(max(0, offset - len(self.model))))
            self.model[offset : offset + len(data)] = data

    def write_async(self, size: int, offset: int, shifted_bytes: int) -> None:
        data = self._rng.randbytes(size)
        tensor = tensor_of(data, shifted_bytes)
        self._under_way.append((self.file.write_async(tensor, offset), offset, offset + size, tensor, None))
        self._put(data, offset)

    def read_async(self, size: int, offset: int, shifted_bytes: int) -> None:
        length = len(self.model)
        if any(wanted is None and end >= length for _, _, end, _, wanted in self._under_way):
            self.wait()  # where the file ends is not known while it grows
        size = max(0, min(size, length - offset))
        tensor = tensor_of(bytes(size), shifted_bytes)
        wanted = bytes(self.model[offset : offset + size])
        self._under_way.append((self.file.read_async(tensor, offset), offset, offset + size, tensor, wanted))

    def write(self, size: int, offset: int, shifted_bytes: int) -> None:
        self.write_async(size, offset, shifted_bytes)
        self.wait()

    def read(self, size: int, offset: int, shifted_bytes: int) -> None:
        tensor = tensor_of(bytes(size), shifted_bytes)
        there = bytes(self.model[offset : offset + size])
        try:
            done_bytes = self.file.read(tensor, offset)
        except EndOfFileError as error:
            outcomes["end of file"] += 1
            done_bytes = error.done_bytes
            if (error.asked_bytes, error.offset_bytes) != (size, offset) or done_bytes == size:
                raise AssertionError(f"the end is not there: {error}") from error
        if done_bytes != len(there) or bytes_of(tensor)[:done_bytes] != there:
            raise AssertionError(f"read {done_bytes} of {len(there)} bytes at {offset}, or other bytes")

    def write_list(self, places: list[list[int]]) -> None:
        items: list[tuple[torch.Tensor, int]] = []
        for size, offset, shifted_bytes in places:
            if all(offset >= at + each.nbytes or at >= offset + size for each, at in items):
                items.append((tensor_of(self._rng.randbytes(size), shifted_bytes), offset))
        if self.file.write_list(items) != sum(tensor.nbytes for tensor, _ in items):
            raise AssertionError("another number of bytes was written")
        for tensor, offset in items:
            self._put(bytes_of(tensor), offset)

    def read_list(self, places: list[list[int]]) -> None:
        items = []
        for size, offset, shifted_bytes in places:
            items.append((tensor_of(bytes(max(0, min(size, len(self.model) - offset))), shifted_bytes), offset))
        self.file.read_list(iter(items))
        for tensor, offset in items:
            if bytes_of(tensor) != self.model[offset : offset + tensor.nbytes]:
                raise AssertionError(f"read other bytes at {offset}")

    def refused(self, what: str, argument: Any) -> None:
        good = torch.zeros(2, dtype=torch.uint8)
        calls: list[Any]
        if what in ("truncate", "allocate"):
            if _is_number(argument):
                return  # so long a file may be possible, and is not wanted
            calls = [lambda: getattr(self.file, what)(argument)]
        elif what == "offset":
            if _is_number(argument):
                self.far(argument)
                return
            calls = [
                lambda: self.file.write(good, argument),
                lambda: self.file.read(good, argument),
                lambda: self.file.write_list([(good, 0), (good, argument)]),
            ]
        elif what == "tensor":
            bad = WILD_TENSORS[argument]()
            calls = [
                lambda: self.file.write(bad),
                lambda: self.file.read(bad),
                lambda: self.file.write_list([(good, 0), (bad, 8)]),
            ]
        else:
            bad = WILD_LISTS[argument](good)
            calls = [lambda: self.file.write_list(bad), lambda: self.file.read_list_async(bad).wait()]
        for call in calls:
            try:
                call()
            except ConfigError as error:
                str(error)
            else:
                raise AssertionError(f"{what} {argument!r} was taken")

    def far(self, offset: int) -> None:
        """Read where no file of ours reaches, and where none may."""
        tensor = torch.zeros(9, dtype=torch.uint8)
        try:
            self.file.read(tensor, offset)
        except EndOfFileError as error:
            there = max(0, len(self.model) - offset)
            if error.done_bytes != there:
                raise AssertionError(f"{error.done_bytes} bytes at {offset} of {len(self.model)}") from error
        except ConfigError:
            if offset < (1 << 63) - 9:
                raise
        except StorageError as error:
            if offset < 1 << 40 or error.errno is None:
                raise
        else:
            if offset + 9 > len(self.model):
                raise AssertionError(f"9 bytes at {offset} of {len(self.model)} were read")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 63


def try_wild(wild: dict[str, Any]) -> None:
    """Open with an option that makes no sense: what is there stays, and nothing is left open."""
    (name,) = wild
    outcomes[f"wild {name}"] += 1
    _path.write_bytes(b"precious")
    arguments = {"path": _path, "mode": "w", **wild}
    if name == "path":
        arguments["mode"] = "r"
    try:
        fp.TensorFile(arguments.pop("path"), **arguments)
    except ConfigError as error:
        str(error)
    except StorageError as error:
        if name != "path" or error.errno is None:
            raise
    else:
        raise AssertionError(f"{wild} was taken")
    if _path.read_bytes() != b"precious":
        raise AssertionError(f"{wild} has changed the file")


def try_input(data: bytes) -> None:
    program = json.loads(data)
    if program["wild"]:
        try_wild(program["wild"])
    run = Run(program)
    try:
        for name, argument in program["steps"]:
            run.do(name, argument)
            if run.file.size() != len(run.model) and name not in ("write_async", "read_async"):
                raise AssertionError(f"after {name}, {run.file.size()} bytes and not {len(run.model)}")
            if len(run.model) > LENGTH_MAX:
                raise AssertionError("the fuzzer itself wants too much")
        run.wait()
        if _path.read_bytes() != run.model:
            raise AssertionError("the file holds other bytes")
    finally:
        run.file.close()
    if _path.read_bytes() != run.model:
        raise AssertionError("the file holds other bytes after it was closed")
    open_count = sum(1 for fd in os.listdir("/proc/self/fd") if _names(fd) == str(_path))
    if open_count:
        raise AssertionError(f"{open_count} descriptors are left open")


def _names(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    # 30 MiB for torch's own modules on first use; bytes of tensors are not seen, those of the model are.
    main(make_input, try_input, memory_bytes_max=lambda length: (30 << 20) + 500 * length)
    print(dict(outcomes), file=sys.stderr)
