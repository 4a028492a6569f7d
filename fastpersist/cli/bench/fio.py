"""The yardstick: fio on the same directory, with the requests of a good writer or reader."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastpersist import _native
from fastpersist.cli.bench.io.points import Direction, IoSample
from fastpersist.cli.bench.rows import Row, Sample
from fastpersist.commit.filesystem import storage_errors
from fastpersist.errors import StorageError, UnsupportedError

__all__ = [
    "CEILING_NAMES",
    "FioJob",
    "fio_read_row",
    "fio_row",
    "fio_version",
    "fio_write_bytes",
    "fio_write_row",
    "has_huge_pages",
    "run_fio",
]

CEILING_NAMES = {"save": "fio write", "load": "fio read"}
_NOT_INSTALLED = "fio is not installed, so there is no ceiling to compare with: apt install fio (or dnf, or pacman -S)"

_BLOCK_BYTES = 8 << 20
_DEPTH = 8


@dataclass(frozen=True, slots=True)
class FioJob:
    """A job of fio.

    Attributes:
        direction: Reads are of files that are there; writes make fresh, preallocated files and sync them.
        size_bytes: The size of each file, in whole blocks.
        engine: The I/O engine, by fio's name.
        direct: Use direct I/O, which bypasses the page cache.
        block_bytes: The size of one request.
        depth: Requests in flight of one job.
        random: Every block once, in shuffled order.
        sharing_count: Jobs that share a file, a range each; for an engine with one request at a time.
        in_place: Write over files that are there.
        huge_pages: Keep the data in huge pages, which the machine must have reserved.
        io_count: Requests of each job; None for the whole range.
        tuned: What costs fio least: registered buffers and files, completions taken in batches.
        in_turns: Submit as many requests as may be in flight, and wait for all of them before the next.
    """

    direction: Direction
    size_bytes: int
    engine: str = "io_uring"
    direct: bool = True
    block_bytes: int = _BLOCK_BYTES
    depth: int = _DEPTH
    random: bool = False
    sharing_count: int = 1
    in_place: bool = False
    huge_pages: bool = False
    io_count: int | None = None
    tuned: bool = False
    in_turns: bool = False

    @property
    def range_bytes(self) -> int:
        """The range of one job; with several, a rest of less than a block each is left out."""
        return self.size_bytes // self.block_bytes // self.sharing_count * self.block_bytes

    @property
    def moved_bytes(self) -> int:
        """What one job moves."""
        return self.range_bytes if self.io_count is None else self.io_count * self.block_bytes

    def command(self, paths: list[str]) -> list[str]:
        """Return the words of the command line."""
        words = [
            "fio", "--output-format=json", "--name=global", f"--rw={'rand' if self.random else ''}{self.direction}",
            f"--ioengine={self.engine}", f"--direct={int(self.direct)}", f"--bs={self.block_bytes}",
            f"--iodepth={self.depth}", f"--size={self.range_bytes}", f"--numjobs={self.sharing_count}",
        ]  # fmt: skip
        if self.huge_pages:
            words.append("--iomem=mmaphuge")
        if self.io_count is not None:
            words += [f"--io_size={self.moved_bytes}", "--norandommap"]  # blocks may come more than once
        if self.tuned:
            words += ["--fixedbufs", "--registerfiles"]
        if self.tuned or self.in_turns:
            batch = self.depth if self.in_turns else min(16, self.depth)
            words += [f"--iodepth_batch_submit={batch}", f"--iodepth_batch_complete_min={batch}"]
        if self.sharing_count > 1:
            words += ["--thread", f"--offset_increment={self.range_bytes}"]
        if self.direction == "read":
            words += ["--readonly", "--allow_file_create=0"]
        elif self.in_place:
            words += ["--fallocate=none", "--overwrite=1", "--end_fsync=1"]
        else:
            # Of jobs that share a file, none may be the one that gives it its size: run_fio() does.
            words += [f"--fallocate={'native' if self.sharing_count == 1 else 'none'}", "--end_fsync=1"]
        for index, path in enumerate(paths):
            words += [f"--name=file{index}", f"--filename={_escaped(path)}"]
        return words


def fio_version() -> str:
    """Return what `fio --version` says, an empty string when there is no fio."""
    program = shutil.which("fio")
    if program is None:
        return ""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()


def fio_row(name: str, run: Callable[[str], Sample], *, suffix: str = ".pt") -> Row:
    """Return a row that runs fio, or says that fio is not installed."""
    if shutil.which("fio") is None:
        return Row(name, "ceiling", None, why_not=_NOT_INSTALLED)
    return Row(name, "ceiling", run, suffix=suffix)


def fio_write_bytes(size_bytes: int, job_count: int) -> int:
    """Return the size of the file that fio_write_row's fio writes: whole blocks, as many by each job."""
    step_bytes = job_count * _BLOCK_BYTES
    return -(-size_bytes // step_bytes) * step_bytes


def fio_write_row(size_bytes: int, *, job_count: int = 1) -> Row:
    """Return the write ceiling: a fresh file of at least `size_bytes`, in whole blocks of 8 MiB, synced.

    Args:
        size_bytes: The size that the file has at least.
        job_count: Jobs that write the file, each a range of its own.
    """
    name = CEILING_NAMES["save"] if job_count == 1 else f"{CEILING_NAMES['save']}, {job_count} jobs"
    file_bytes = fio_write_bytes(size_bytes, job_count)

    def run(path: str) -> Sample:
        return _run_by_best_engine(FioJob("write", file_bytes, sharing_count=job_count), path)

    return fio_row(name, run, suffix=".fio")


def has_huge_pages() -> bool:
    """Tell whether the machine has enough huge pages reserved for fio's buffers, of default size."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    free_count = int(fields.get("HugePages_Free", "0"))
    size_kib = int(fields.get("Hugepagesize", "0 kB").split()[0])
    # One page more: fio adds a few bytes for its alignment.
    return free_count * size_kib << 10 >= _DEPTH * _BLOCK_BYTES + (size_kib << 10)


def fio_read_row(suffix: str, *, huge_pages: bool = False) -> Row:
    """Return the read ceiling: the very file that the other rows load, from its start, in whole blocks of 8 MiB.

    With huge pages fio reads faster, as fastpersist does, whose buffers have them: see `has_huge_pages`.

    The file's blocks have been written; of blocks that are only allocated a file system reads nothing.
    """

    def run(path: str) -> Sample:
        # What is left over is less than a block; the rate is per byte, so nothing is gained by leaving it out.
        size_bytes = os.path.getsize(path) // _BLOCK_BYTES * _BLOCK_BYTES
        return _run_by_best_engine(FioJob("read", size_bytes, huge_pages=huge_pages), path)

    return fio_row(CEILING_NAMES["load"], run, suffix=suffix)


def _run_by_best_engine(job: FioJob, path: str) -> Sample:
    """Run a job by io_uring, or by libaio where the kernel or a container's profile refuses io_uring."""
    reasons = []
    for engine in ("io_uring", "libaio"):
        try:
            return run_fio(replace(job, engine=engine), [path])
        except UnsupportedError as error:
            reasons.append(str(error))
            if job.direction == "write":
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # of the one that failed; each makes a fresh one
    raise UnsupportedError("; ".join(reasons))


def run_fio(job: FioJob, paths: list[str]) -> IoSample:
    """Run a job on each of the files, all at the same time.

    Returns:
        The seconds of the slowest job, and what all jobs together moved and spent.

    Raises:
        UnsupportedError: fio cannot do it here; the message says why.
        StorageError: It did not move what it should.
    """
    if job.direction == "write" and not job.in_place and job.sharing_count > 1:
        for path in paths:
            _preallocate(path, job.range_bytes * job.sharing_count)
    done = subprocess.run(job.command(paths), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[0]
        how = "by direct I/O" if job.direct else "through the page cache"
        raise UnsupportedError(f"fio cannot {job.direction} here {how} with {job.engine}: {said}")
    return _sample(done.stdout, job, len(paths) * job.sharing_count)


def _preallocate(path: str, size_bytes: int) -> None:
    with storage_errors("creating", path), open(path, "xb") as file:
        _native.allocate(file.fileno(), size_bytes, os.fsencode(path))


def _escaped(path: str) -> str:
    """Escape the colons that would separate file names."""
    return path.replace(":", "\\:")


def _sample(output: str, job: FioJob, job_count: int) -> IoSample:
    """Take the figures from fio's report.

    `jobs[].write.runtime` (ms, as in `job_runtime`) runs from the first request to the end of the fsync that
    --end_fsync=1 asks for: a buffered job of 1 GiB reports ten times the runtime with it that it reports without.
    Creating and preallocating the file come before, in less than a millisecond; filling fio's own buffers, and starting
    and ending its processes (some 0.5 s), are not in it either. So the figure is from create to synced, a trifle in
    fio's favour. fio starts its jobs together.

    `usr_cpu` and `sys_cpu` are percent of `job_runtime`. What kernel threads do for a job is not in them.
    """
    # fio may put remarks in front of the report.
    report: dict[str, Any] = json.loads(output[output.index("{") :])
    jobs = report["jobs"]
    moved_bytes = sum(one[job.direction]["io_bytes"] for one in jobs)
    if moved_bytes != job_count * job.moved_bytes:
        raise StorageError(None, f"fio moved {moved_bytes} bytes instead of {job_count * job.moved_bytes}")
    return IoSample(
        seconds=max(max(int(one[job.direction]["runtime"]), 1) for one in jobs) / 1000,
        size_bytes=moved_bytes,
        engine=job.engine,
        io_count=sum(int(one[job.direction]["total_ios"]) for one in jobs),
        cpu_s=sum((one["usr_cpu"] + one["sys_cpu"]) / 100 * one["job_runtime"] / 1000 for one in jobs),
    )
