"""Shared by the examples of this folder: command line, clock, cold cache, and comparison of bytes.

An example loops by `for path in command.loads(tensor):`, or `stores`, and moves the bytes in the body: the time of a
run is that of the body, from opening the file to closing it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import fastpersist as fp

LEFT_OUT = 77  # how a program ends that cannot run here; 1 is for wrong bytes, 2 for a wrong command line
GPUDIRECT = ""  # the engine with which an fp.TensorFile would move tensors by GPUDirect: there is none
PIECE_BYTES = 16 << 20  # of a file that is made or compared here


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options that run_all.py has too."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=positive, metavar="N", help="MiB of the tensor (default: 256)")
    parser.add_argument("--loop", type=positive, default=3, metavar="N", help="how many times (default: 3)")
    parser.add_argument(
        "--validate", action="store_true", help="compare all bytes each time; exit with 1 if they differ"
    )
    return parser


def positive(word: str) -> int:
    """Read a whole number, 1 or more."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


class Command:
    """One run of an example: its options and results.

    Attributes:
        size_bytes: The size of the tensor, and of the file.
    """

    def __init__(self, text: str | None, loading: bool, stack: contextlib.ExitStack) -> None:
        parser = parser_of(text)
        file_help = "read this one (default: one that is made and removed)" if loading else "make this one, and keep it"
        parser.add_argument("--file", type=Path, metavar="PATH", help=file_help)
        parser.add_argument("--json", action="store_true", help="print one line of JSON")
        self._arguments = parser.parse_args()
        path: Path | None = self._arguments.file
        size_bytes = (self._arguments.size_mb or 256) << 20
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="file-access-", dir="."))) / "tensor.bin"
        elif not path.parent.is_dir():
            parser.error(f"--file {path}: there is no directory {path.parent}")
        elif not loading and os.path.lexists(path):
            parser.error(f"--file {path}: it exists; a new file is stored, and nothing replaced")
        elif loading and not path.is_file():
            parser.error(f"--file {path}: there is no such file; without --file, one is made")
        elif loading:
            found_bytes = path.stat().st_size
            size_bytes = size_bytes if self._arguments.size_mb else found_bytes
            if not 0 < size_bytes <= found_bytes:
                parser.error(f"--file {path}: it has {found_bytes} bytes, less than --size-mb, or none")
        self._path = path.absolute()
        self.size_bytes = size_bytes
        self._run_s: list[float] = []
        self._cached_bytes = 0
        self._remark = ""

    def gpu(self) -> torch.device:
        """Return the GPU; without one, end the program."""
        if not torch.cuda.is_available():
            leave_out("this torch sees no GPU")
        return torch.device("cuda")

    def gpudirect(self) -> str:
        """Return the name of the engine that moves bytes between disk and GPU; without one, end the program."""
        if not GPUDIRECT:
            leave_out("fp.TensorFile does not use GPUDirect; fp.save and fp.load do, with engine='cufile'")
        return GPUDIRECT

    def locked_tensor(self, size_bytes: int) -> torch.Tensor:
        """Return an `fp.locked_tensor`; beyond the limit of locked memory an ordinary one, with a note."""
        try:
            return fp.locked_tensor(size_bytes, torch.uint8)
        except fp.StorageError as error:
            self._remark = f"in memory that is not locked: {error}"
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())

    def loads(self, tensor: torch.Tensor) -> Iterator[str]:
        """Yield the path, --loop times, with the file out of the page cache; the body of the loop fills the tensor."""
        if not self._path.exists():
            make_file(self._path, self.size_bytes)
        for _ in range(self._arguments.loop):
            tensor.zero_()  # so that nothing is left of the run before; and its pages are there
            self._cached_bytes = max(self._cached_bytes, drop_from_cache(self._path, self.size_bytes))
            yield from self._timed(tensor)
            if self._arguments.validate:
                compare(self._path, tensor)
        self._report(f"reads were {cache_state(self._cached_bytes)}")

    def stores(self, tensor: torch.Tensor) -> Iterator[str]:
        """Yield the path, --loop times, with no file there; the body stores the tensor, and makes it durable."""
        for _ in range(self._arguments.loop):
            tensor.random_()
            self._path.unlink(missing_ok=True)  # ours, of the run before
            sync_directory(self._path)
            yield from self._timed(tensor)
            if self._arguments.validate:
                drop_from_cache(self._path, self.size_bytes)  # what is on the disk counts
                if self._path.stat().st_size != self.size_bytes:
                    sys.exit(f"{self._path} has {self._path.stat().st_size} bytes, not {self.size_bytes}")
                compare(self._path, tensor)
        self._report("into a new file each time, made durable within the time")

    def _timed(self, tensor: torch.Tensor) -> Iterator[str]:
        if tensor.is_cuda:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        yield str(self._path)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        self._run_s.append(time.perf_counter() - start_s)

    def _report(self, how: str) -> None:
        if self._arguments.json:
            facts = {"size_bytes": self.size_bytes, "cached_bytes": self._cached_bytes, "remark": self._remark}
            print(json.dumps({"run_s": self._run_s, **facts}))
            return
        checked = ", all bytes compared" if self._arguments.validate else ""
        times = f"{len(self._run_s)} times {self.size_bytes / 2**20:g} MiB"
        print(
            f"{Path(sys.argv[0]).stem}: {rates([self.size_bytes / run_s for run_s in self._run_s])} ({times}{checked})"
        )
        print(how)
        if self._remark:
            print(self._remark)


@contextlib.contextmanager
def load_command(text: str | None) -> Iterator[Command]:
    """Read the command line of an example that loads; remove its temporary file afterwards."""
    with contextlib.ExitStack() as stack:
        yield Command(text, True, stack)


@contextlib.contextmanager
def store_command(text: str | None) -> Iterator[Command]:
    """Read the command line of an example that stores; remove its temporary file afterwards."""
    with contextlib.ExitStack() as stack:
        yield Command(text, False, stack)


def leave_out(reason: str) -> None:
    """End the program, because it cannot run here."""
    print(f"left out: {reason}", file=sys.stderr)
    sys.exit(LEFT_OUT)


def rates(bytes_per_s: list[float]) -> str:
    """Format the median and the range of some rates."""
    low, middle, high = min(bytes_per_s) / 1e9, statistics.median(bytes_per_s) / 1e9, max(bytes_per_s) / 1e9
    return f"median {middle:.2f} GB/s, {low:.2f}–{high:.2f}"


# --- files


def make_file(path: Path, size_bytes: int) -> None:
    """Make a file of random bytes, no two parts of which are alike."""
    piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    with path.open("xb") as file:
        for start in range(0, size_bytes, PIECE_BYTES):
            file.write(piece.random_().numpy()[: size_bytes - start])
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in the directory of a file durable."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def drop_from_cache(path: Path, size_bytes: int) -> int:
    """Drop a file from the page cache; return how many of its first bytes remain there."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = torch.from_file(str(path), shared=False, size=min(size_bytes, path.stat().st_size), dtype=torch.uint8)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    present = torch.zeros(-(-mapped.nbytes // page_bytes), dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (mapped, present)]
    if libc.mincore(addresses[0], ctypes.c_size_t(mapped.nbytes), addresses[1]):
        raise OSError(ctypes.get_errno(), f"mincore of {path}: {os.strerror(ctypes.get_errno())}")
    return int((present & 1).sum()) * page_bytes


def cache_state(cached_bytes: int) -> str:
    """Describe the result of `drop_from_cache`."""
    if cached_bytes:
        return f"NOT COLD: up to {cached_bytes / 2**20:.1f} MiB of the file stayed in the page cache"
    return "cold: the file was dropped from the page cache before each (fadvise), and mincore found none of it there"


def compare(path: Path, tensor: torch.Tensor) -> None:
    """Compare a tensor with the first bytes of a file, as plain Python reads them; end the program if they differ."""
    own = tensor.cpu()
    with path.open("rb") as file:
        for start in range(0, own.nbytes, PIECE_BYTES):
            piece = own[start : start + PIECE_BYTES]
            read = file.read(piece.nbytes)
            found = torch.frombuffer(bytearray(read), dtype=torch.uint8) if read else piece[:0]
            if found.nbytes != piece.nbytes:
                sys.exit(f"{path} ends at byte {start + found.nbytes}, and the tensor has {own.nbytes}")
            if not torch.equal(found, piece):
                place = int((found != piece).nonzero()[0])
                values = f"{int(found[place])} in the file, {int(piece[place])} in the tensor"
                sys.exit(f"wrong bytes: byte {start + place} of {path} is {values}")
