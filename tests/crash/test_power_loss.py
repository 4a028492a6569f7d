"""Power is lost at any moment of a save: the file is the old or the new one, after it the new one.

Two ways. Recorded saves are replayed with every loss that is possible (support/power_loss.py). And a real
disk is cloned while a process saves on it, which is what a power cut leaves of it.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.filesystems import Operation
from support.forking import SMALL_RING, Child, Report, in_child
from support.loop_disks import LoopDisk, NoLoopDisksError, loop_disk, mounted, why_no_loop_disks
from support.power_loss import (
    Fate,
    Judge,
    Names,
    RecordingFilesystem,
    ViolationError,
    disk_after_cut,
    every_fate,
    record,
    unsafe_operations,
)
from support.states import load_step, make_state

import fastpersist as fp

FEW_BYTES = 150_000  # three writes of at most 64 KiB, or four
MANY_BYTES = 600_000
CLONE_COUNT = 8

suffixes = pytest.mark.parametrize("suffix", [".pt", ".safetensors"])


class ForgetsToSync(RecordingFilesystem):
    def sync(self, fd: int, path: str) -> None:
        pass


class ForgetsTheDirectory(RecordingFilesystem):
    def sync_directory(self, path: str) -> None:
        pass


class SyncsTooLate(RecordingFilesystem):
    """Syncs the file once it has its final name, the order that many programs have."""

    def sync(self, fd: int, path: str) -> None:
        self._fd = fd

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        super().sync(self._fd, source)


def recorded(
    directory: Path,
    suffix: str,
    steps: list[int],
    size_bytes: int,
    *,
    replaces: bool,
    protocol: type[RecordingFilesystem] = RecordingFilesystem,
) -> tuple[Judge, Names, list[Operation]]:
    """Save `steps` over step 1 or over nothing; return the judge, what was there before, and the log."""
    path = directory / "disk" / f"state{suffix}"
    path.parent.mkdir()
    if replaces:
        fp.save(make_state(1, size_bytes), path)
    (path.parent / f".{path.name}.pending-0011223344556677").write_bytes(b"of a save that died")
    before = read_names(path.parent)
    log = record(protocol(), path, steps, size_bytes)
    return Judge(directory / "replayed", path, size_bytes, 1 if replaces else None), before, log


def read_names(directory: Path) -> Names:
    return {str(path): path.read_bytes() for path in directory.iterdir()}


def replay_everything(judge: Judge, before: Names, log: Sequence[Operation]) -> None:
    rng = random.Random(0)
    for cut in range(len(log) + 1):
        for fates in every_fate(log[:cut]):
            judge.judge(disk_after_cut(before, log[:cut], fates, rng), log[:cut])


@pytest.mark.parametrize("replaces", [True, False], ids=["replaces", "first"])
@suffixes
@in_child(SMALL_RING)
def test_no_loss_of_power_tears_the_file(tmp_path: Path, suffix: str, replaces: bool) -> None:
    judge, before, log = recorded(tmp_path, suffix, [2], FEW_BYTES, replaces=replaces)
    replay_everything(judge, before, log)
    assert [operation.name for operation in log].count("write") >= 3
    assert judge.judged_count >= 4  # the old and the new file, each with and without a pending one beside it


@suffixes
@in_child(SMALL_RING)
def test_recording_is_complete(tmp_path: Path, suffix: str) -> None:
    judge, before, log = recorded(tmp_path, suffix, [2, 3], MANY_BYTES, replaces=True)
    assert disk_after_cut(before, log, {}, random.Random()) == read_names(judge.path.parent)
    assert unsafe_operations(log) == []


@pytest.mark.parametrize("protocol", [ForgetsToSync, ForgetsTheDirectory, SyncsTooLate])
@pytest.mark.parametrize("replaces", [True, False], ids=["replaces", "first"])
@suffixes
@in_child(SMALL_RING)
def test_replay_notices_a_broken_protocol(
    tmp_path: Path, suffix: str, replaces: bool, protocol: type[RecordingFilesystem]
) -> None:
    judge, before, log = recorded(tmp_path, suffix, [2], FEW_BYTES, replaces=replaces, protocol=protocol)
    with pytest.raises(ViolationError):
        replay_everything(judge, before, log)


@suffixes
@in_child(SMALL_RING)
def test_no_loss_of_power_tears_one_of_many_saves(tmp_path: Path, suffix: str) -> None:
    judge, before, log = recorded(tmp_path, suffix, [2, 3, 4], MANY_BYTES, replaces=True)

    @settings(max_examples=300, database=None)
    @given(
        st.integers(0, len(log)),
        st.lists(st.sampled_from(Fate), min_size=len(log), max_size=len(log)),
        st.randoms(),
    )
    def replay(cut: int, fates: list[Fate], rng: random.Random) -> None:
        done = log[:cut]
        unsafe = {
            index: Fate.DROPPED if fates[index] is Fate.TORN and done[index].name != "write" else fates[index]
            for index in unsafe_operations(done)
        }
        judge.judge(disk_after_cut(before, done, unsafe, rng), done)

    replay()


def expect_step(path: Path, possible: range) -> None:
    assert path.exists(), f"{path.name} is gone, step {possible[0]} was durable"
    assert load_step(path) in possible


@pytest.mark.skipif(why_no_loop_disks() is not None, reason=str(why_no_loop_disks()))
@pytest.mark.parametrize(("suffix", "engine"), [(".pt", "auto"), (".safetensors", "threads-buffered")])
@in_child(SMALL_RING)
def test_cloned_disk_holds_what_was_durable(tmp_path: Path, suffix: str, engine: str) -> None:
    with disk_or_skip(tmp_path) as disk:
        name = f"state{suffix}"

        def save_steps(report: Report) -> None:
            for step in range(1_000_000):
                fp.save(make_state(step), disk.directory / name, engine=engine)
                report(step)

        with Child(save_steps) as saver:
            for _ in range(CLONE_COUNT):
                seen = saver.reported
                while saver.reported <= seen + 1 and not saver.ended():
                    time.sleep(0.001)
                time.sleep(random.uniform(0.0, 0.02))
                durable = saver.reported
                image = disk.clone()
                begun = saver.reported + 1
                with mounted(image) as directory:
                    expect_step(directory / name, range(durable, begun + 1))
                image.unlink()
            ending = saver.kill()
        assert ending.signal == signal.SIGKILL, ending.message

        # The same check, of a save that promised nothing.
        durable = load_step(disk.directory / name) + 1
        fp.save(make_state(durable), disk.directory / name, durable=False)
        image = disk.clone()
        with mounted(image) as directory, pytest.raises(AssertionError):
            expect_step(directory / name, range(durable, durable + 1))
        image.unlink()


@contextmanager
def disk_or_skip(directory: Path) -> Iterator[LoopDisk]:
    try:
        with loop_disk(directory) as disk:
            yield disk
    except NoLoopDisksError as error:
        pytest.skip(f"no loop disks here: {error}")
