"""Disks with blocks above 4 KiB: direct I/O in whole ones of them, and nothing in them that is not written is lost."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from csrc.test_native_programs import build
from support.forking import SMALL_RING, in_child
from support.loop_disks import NoLoopDisksError, disk_with_sectors, why_no_loop_disks

import fastpersist as fp
from fastpersist import _native
from fastpersist.transfer.writer import Pieces, Writer

SECTOR_BYTES = 16 << 10
DIRECT = ("uring", "libaio", "threads")

pytestmark = pytest.mark.skipif(why_no_loop_disks() is not None, reason=str(why_no_loop_disks()))


@contextmanager
def disk_or_skip(scratch: Path) -> Iterator[Path]:
    try:
        with disk_with_sectors(scratch, SECTOR_BYTES) as directory:
            yield directory
    except NoLoopDisksError as error:
        pytest.skip(f"no disk with sectors of {SECTOR_BYTES} bytes: {error}")


def usable_direct_engines(directory: Path) -> list[str]:
    probes = {probe.name: probe for probe in fp.engines(directory)}
    assert probes["threads"].usable, probes["threads"].why_not
    return [name for name in DIRECT if probes[name].usable]


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = [1, 500, 1024, 5000, 100_003, 4096 * 7, 300_000, 0]
    return {f"t{index}": torch.randn(size, generator=generator) for index, size in enumerate(sizes * 3)}


@in_child(SMALL_RING)
def test_files_are_written_and_read_by_direct_engines(tmp_path: Path) -> None:
    tensors = make_tensors()
    with disk_or_skip(tmp_path) as directory:
        for name in ("state.pt", "state.safetensors"):
            fp.save(tensors, tmp_path / name, engine="threads-buffered")
            for engine in usable_direct_engines(directory):
                path = directory / name
                assert fp.save(tensors, path, engine=engine).engine == engine
                assert path.read_bytes() == (tmp_path / name).read_bytes()
                loaded = fp.load(path, engine=engine, verify=True)
                assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("engine", [*DIRECT, "threads-buffered"])
@in_child(SMALL_RING)
def test_seeks_between_the_blocks_of_the_disk_lose_nothing(tmp_path: Path, engine: str) -> None:
    """Runs that begin and end anywhere, next to each other in one block, in any order, over bytes that were there."""
    rng = random.Random(engine)
    with disk_or_skip(tmp_path) as directory:
        if engine != "threads-buffered" and engine not in usable_direct_engines(directory):
            pytest.skip(f"{engine} does not work here")
        path = directory / "file"
        for turn in range(20):
            expected = bytearray(rng.randbytes(rng.randrange(40) * 4096))
            path.write_bytes(expected)
            with path.open("r+b") as file, Writer(file.fileno(), str(path), engine=engine) as writer:
                assert _native.block_bytes(file.fileno()) == SECTOR_BYTES
                starts = rng.sample(range(60), 8)
                for start, limit in zip(starts, limits_of(starts), strict=True):
                    data = rng.randbytes(rng.randrange(1, 4096 * min(limit, 30)))
                    pieces = Pieces()
                    pieces.add_bytes(data)
                    writer.seek(4096 * start)
                    writer.append(pieces)
                    if rng.random() < 0.3:
                        writer.rest()
                    at, padded = 4096 * start, data + bytes(-len(data) % 4096)
                    expected += bytes(max(0, at + len(padded) - len(expected)))
                    expected[at : at + len(padded)] = padded
                writer.finish()
            found = path.read_bytes()
            assert found[: len(expected)] == expected, turn
            assert not any(found[len(expected) :])
            assert len(found) < len(expected) + SECTOR_BYTES


def limits_of(starts: list[int]) -> list[int]:
    """Return how many pages there are from each start to the next one."""
    return [min((other - start for other in starts if other > start), default=30) for start in starts]


@pytest.mark.timeout(900)  # the first program to be built compiles all of csrc/, too
@pytest.mark.parametrize("program", ["file_test", "file_writer_test", "file_reader_test", "random_access_test"])
@in_child({})
def test_native_programs_pass_on_large_blocks(tmp_path: Path, program: str) -> None:
    binary = build(program, "plain")
    with disk_or_skip(tmp_path) as directory:
        result = subprocess.run([binary, directory], capture_output=True, text=True, errors="replace", check=False)
        assert result.returncode == 0, result.stdout + result.stderr
