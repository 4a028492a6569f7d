"""The processes in which `fastpersist tune` saves, like a program that is configured by environment variables only.

The command starts one process, the *foreman*, and sends it requests (`child_process`). The foreman holds the bytes to
save, and forks a *saver* for each ring configuration, since a ring lives as long as its process; they share the bytes.
The foreman does not save, so each saver starts without ring and engine. A saver's first save is short and not counted:
it makes the ring, as the first save of a program does.

    {"do": "fill", "size_bytes": n}                     hold so many bytes; savers are ended
    {"do": "save", "environment": {…}, "ring": [r, c]}  one process saves a fresh file          → seconds, engine
    {"do": "share", … , "count": n}                     n processes write parts of one file     → seconds
    {"do": "load", … }                                  one process loads a file from the disk  → seconds
    {"do": "keep", "rings": [[r, c], …]}                end the savers of all other rings

Files are made in the scratch directory and removed outside the measured time. When the command is gone, whatever the
reason, its end of the pipe closes: then the foreman ends the savers and removes the scratch directory itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeAlias

import torch

import fastpersist
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.places import remove_files
from fastpersist.cli.child_process import Answers, ChildProcess
from fastpersist.commit.filesystem import filesystem
from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import FastPersistError, NoSpaceError, UnsupportedError
from fastpersist.transfer.writer import Pieces, Writer

__all__ = ["Foreman", "Ring", "main"]

Ring: TypeAlias = tuple[int, int]
"""Bytes of the ring and of a chunk."""

_TILE_BYTES = 16 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Foreman(contextlib.AbstractContextManager["Foreman"]):
    """The command's end: a context manager around the process. One owner thread.

    Args:
        scratch: The directory in which files are made.
    """

    def __init__(self, scratch: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTPERSIST_")}
        self._process = ChildProcess(
            "from fastpersist.cli.tune.worker import main; main()",
            scratch,
            environment=environment | {"FASTPERSIST_CONFIG": ""},
            title="the process that saves",
        )

    def fill(self, size_bytes: int) -> None:
        """Hold so many bytes to be saved."""
        self._ask({"do": "fill", "size_bytes": size_bytes})

    def save(self, environment: dict[str, str], ring: Ring) -> tuple[float, str]:
        """Save once; return the seconds until that was durable, and the engine.

        Raises:
            UnsupportedError: It cannot be done so; the message says why.
            NoSpaceError: The disk is full.
        """
        answer = self._ask({"do": "save", "environment": environment, "ring": ring})
        return answer["seconds"], answer["engine"]

    def share(self, environment: dict[str, str], ring: Ring, count: int) -> float:
        """Let several processes write one file; return the seconds until all of it was durable. Raises as `save`."""
        return float(self._ask({"do": "share", "environment": environment, "ring": ring, "count": count})["seconds"])

    def load(self, environment: dict[str, str], ring: Ring) -> float:
        """Load a file that is not in the page cache; return the seconds. Raises as `save`."""
        return float(self._ask({"do": "load", "environment": environment, "ring": ring})["seconds"])

    def keep(self, rings: set[Ring]) -> None:
        """End the savers of all other rings, and have their memory back."""
        self._ask({"do": "keep", "rings": sorted(rings)})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._process.send(request)
        return _checked(self._process.receive())

    def end(self) -> None:
        """End all of its processes, and wait for them."""
        self._process.end()

    def __exit__(self, *_: object) -> None:
        self.end()


# ------------------------------------------------------------------------------------------------- the foreman


def main() -> None:
    """Serve one command until it closes its end."""
    scratch = sys.argv[1]
    answers = Answers()
    logging.getLogger("fastpersist").setLevel(logging.ERROR)  # which engine "auto" takes is told by the command
    torch.set_num_threads(1)  # a forked child cannot use OpenMP where its parent has
    warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of forking beside numpy's idle threads
    crew = _Crew(scratch)
    try:
        for request in answers.requests():
            answers.send(_answer(functools.partial(crew.do, request)))
    except BrokenPipeError:
        pass
    finally:
        crew.end()
        shutil.rmtree(scratch, ignore_errors=True)


def _answer(do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return do()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what came of this request
        text = str(error) if isinstance(error, FastPersistError) else f"{type(error).__name__}: {error}"
        return {"error": text, "is_full": isinstance(error, NoSpaceError)}


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer; raise its error, if it has one."""
    if answer.get("is_full"):
        raise NoSpaceError(errno.ENOSPC, answer["error"])
    if "error" in answer:
        raise UnsupportedError(answer["error"])
    return answer


class _Saver(NamedTuple):
    pipe: Connection
    process: BaseProcess

    def answer(self) -> dict[str, Any]:
        """Wait for what it says."""
        try:
            said: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            return {"error": "the process that saved has died"}
        return said

    def end(self) -> None:
        self.pipe.close()  # siblings may hold copies of this end, so it would not notice
        self.process.kill()
        self.process.join()


class _Crew:
    """The savers, by ring and number; and the bytes that they save."""

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._data = torch.empty(0, dtype=torch.uint8)
        self._savers: dict[tuple[Ring, int], _Saver] = {}
        self._count = 0
        self._loaded = ""  # the file that is loaded, as long as there is one

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request."""
        if request["do"] != "load" and self._loaded:
            remove_files([self._loaded])
            self._loaded = ""
        if request["do"] == "fill":
            self.end()
            self._data = _random_bytes(request["size_bytes"])
            return {}
        if request["do"] == "keep":
            self._end_all_but({tuple(ring) for ring in request["rings"]})
            return {}
        ring: Ring = tuple(request["ring"])
        environment = request["environment"]
        if request["do"] == "save":
            saver, _ = self._saver(ring, 0)
            saver.pipe.send(("save", environment, self._fresh_path()))
            return _checked(saver.answer())
        if request["do"] == "load":
            self._loaded = self._loaded or self._fresh_path()
            saver, _ = self._saver(ring, 0)
            saver.pipe.send(("load", environment, self._loaded))
            return _checked(saver.answer())
        return self._share(ring, environment, request["count"])

    def _share(self, ring: Ring, environment: dict[str, str], count: int) -> dict[str, Any]:
        crew = [self._saver(ring, number) for number in range(count)]
        seconds = self._share_once(environment, [saver for saver, _ in crew])
        if any(is_new for _, is_new in crew):
            seconds = self._share_once(environment, [saver for saver, _ in crew])
        return {"seconds": seconds}

    def _share_once(self, environment: dict[str, str], savers: list[_Saver]) -> float:
        """Have equal parts written, in whole blocks, as the ranks of a group do it."""
        path = self._fresh_path()
        block_count = self._data.numel() // BLOCK_BYTES
        cuts = [index * block_count // len(savers) * BLOCK_BYTES for index in range(len(savers) + 1)]
        started_s = time.perf_counter()
        fd = filesystem().create(path)
        try:
            filesystem().allocate(fd, cuts[-1], path)
            for saver, low, high in zip(savers, cuts, cuts[1:], strict=False):
                saver.pipe.send(("part", environment, path, low, high))
            answers = [saver.answer() for saver in savers]
            filesystem().sync(fd, path)
            seconds = time.perf_counter() - started_s
        finally:
            os.close(fd)
            remove_files([path])
        for answer in answers:
            _checked(answer)
        return seconds

    def _fresh_path(self) -> str:
        self._count += 1
        return os.path.join(self._scratch, f"tune-{self._count}.pt")

    def _saver(self, ring: Ring, number: int) -> tuple[_Saver, bool]:
        """Return a saver, and whether it is a new one."""
        known = self._savers.get((ring, number))
        if known is not None and known.process.is_alive():
            return known, False
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._data, ring[0], os.getpid()), daemon=True)
        process.start()
        theirs.close()
        saver = self._savers[ring, number] = _Saver(ours, process)
        return saver, True

    def _end_all_but(self, rings: set[Any]) -> None:
        for key in [key for key in self._savers if key[0] not in rings]:
            self._savers.pop(key).end()

    def end(self) -> None:
        """End all savers, at once."""
        self._end_all_but(set())


def _random_bytes(size_bytes: int) -> torch.Tensor:
    """Return bytes that no compressing file system makes smaller."""
    tile = torch.frombuffer(bytearray(os.urandom(min(size_bytes, _TILE_BYTES))), dtype=torch.uint8)
    data = torch.empty(size_bytes, dtype=torch.uint8)
    for start in range(0, size_bytes, tile.numel()):
        part = data[start : start + tile.numel()]
        part.copy_(tile[: part.numel()])
    return data


# ------------------------------------------------------------------------------------------------- a saver


def _serve(pipe: Connection, data: torch.Tensor, ring_bytes: int, foreman: int) -> None:
    """Save when told to, until the foreman closes its end or is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # siblings hold copies of the pipe, so it may never end
    if os.getppid() != foreman:
        return
    gc.freeze()
    is_warm = False
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, environment, path, *place = pipe.recv()
            for name in [name for name in os.environ if name.startswith("FASTPERSIST_")]:
                del os.environ[name]
            os.environ.update(environment)
            if what == "part":
                pipe.send(_answer(functools.partial(_write_part, data, path, *place)))
                continue
            if what == "load":
                pipe.send(_answer(functools.partial(_load, data, path)))
                continue
            if not is_warm:
                _answer(functools.partial(_save, data[:ring_bytes].clone(), path))
                is_warm = True
            pipe.send(_answer(functools.partial(_save, data, path)))


def _save(data: torch.Tensor, path: str) -> dict[str, Any]:
    gc.collect()
    try:
        started_s = time.perf_counter()
        report = fastpersist.save({"data": data}, path)
        seconds = time.perf_counter() - started_s
    finally:
        remove_files([path])
    return {"seconds": seconds, "engine": report.engine}


def _load(data: torch.Tensor, path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        fastpersist.save({"data": data}, path)
    gc.collect()
    PageCache(warm=False, whole_machine=False).prepare(path)
    started_s = time.perf_counter()
    fastpersist.load(path)
    return {"seconds": time.perf_counter() - started_s}


def _write_part(data: torch.Tensor, path: str, low: int, high: int) -> dict[str, Any]:
    """Write a part of the file that the foreman has made, as `fastpersist.distributed.shared_file` does."""
    if low == high:
        return {}
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        pieces = Pieces()
        pieces.add_storage(data.untyped_storage(), 0, offset_bytes=low, size_bytes=high - low)
        with Writer(fd, path, shared=True) as writer:
            writer.seek(low)
            writer.append(pieces)
            writer.finish()
        filesystem().sync(fd, path)
    finally:
        os.close(fd)
    return {}
