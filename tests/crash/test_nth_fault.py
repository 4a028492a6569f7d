"""The n-th operation fails, for n = 1, 2, 3 … until there is no n-th.

Whatever it was: the old file is still there bit for bit, nothing of the failed save stays behind (file,
descriptor, thread, ring buffer), and the next save works.

Data requests fail inside the fault engine, around a real one; names fail in a double of the seam to the
file system.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.filesystems import (
    DIRECTORY_OPERATIONS,
    FILE_OPERATIONS,
    OPEN_FILE_OPERATIONS,
    FailingFilesystem,
    FailingOpenFiles,
    WatchedFilesystem,
)
from support.forking import SMALL_RING, in_child
from support.leaks import no_leaks
from support.states import differences, load_step, make_state, pending_files

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import Filesystem, using

EVERY_FOLLOWING = 2**64 - 1
FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"sys_errno": errno.EIO},
    "ENOSPC": {"sys_errno": errno.ENOSPC},
    "EIO-lasting": {"sys_errno": errno.EIO, "count": EVERY_FOLLOWING},
    "EINTR": {"sys_errno": errno.EINTR},
    "EAGAIN": {"sys_errno": errno.EAGAIN},
    "short": {"kind": "short", "short_bytes": 4096},
    "zero": {"kind": "zero"},
}
FORGIVEN = ("EINTR", "EAGAIN", "short")
REQUESTS_MIN = 6  # fewer would be no loop worth the name
CHUNK_BYTES = int(SMALL_RING["FASTPERSIST_CHUNK_BYTES"])
STRAIGHT_BYTES = 256 << 10  # FileReader::kStraightBytes
LARGE_BYTES = 700_000  # of a state whose two large tensors have more than that

fault_kinds = pytest.mark.parametrize("fault", FAULTS)
suffixes = pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
# What differs between engines is how a fault reaches us; the formats need only one of them.
places = pytest.mark.parametrize(
    ("engine", "suffix"),
    [("threads", ".pt"), ("threads", ".safetensors"), ("uring", ".pt"), ("libaio", ".pt")],
)


def skip_without(engine: str, directory: Path) -> None:
    probe = next(probe for probe in fp.engines(directory) if probe.name == engine)
    if not probe.usable:
        pytest.skip(f"{engine}: {probe.why_not}")


class Shot:
    """One fault, armed; `hit` and `error` say afterwards whether it was met and what came of it."""

    hit = False
    error: fp.StorageError | None = None


@contextmanager
def armed(fault: str, op: str, nth: int, directory: Path) -> Iterator[Shot]:
    """Make the n-th request fail in the block, take the StorageError that it raises, and look for leaks."""
    shot = Shot()
    with no_leaks(directory):
        _native.set_fault_plan(_native.FaultPlan(op=op, nth=nth, **FAULTS[fault]))
        try:
            yield shot
        except fp.StorageError as error:
            shot.error = error.with_traceback(None)  # its frames hold what the leak check looks for
        finally:
            shot.hit = _native.clear_fault_plan() > 0
    assert _native.ring_free_count() == _native.ring_buffer_count()


def expect_storage_error(error: fp.StorageError | None, fault: str, path: Path) -> None:
    """Check class, errno, path and offset of the error that a fault must have raised."""
    assert error is not None, f"{fault} went unnoticed"
    assert isinstance(error, fp.NoSpaceError) == (fault == "ENOSPC")
    assert error.errno == FAULTS[fault].get("sys_errno")
    assert error.filename == str(path)
    assert str(path) in str(error)
    place = re.search(r"at offset (\d+)", str(error))
    assert place is not None
    if error.errno is not None:
        assert error.offset_bytes == int(place[1])


# --- engine requests ---


@fault_kinds
@places
@in_child(SMALL_RING)
def test_failed_write_leaves_old_file(tmp_path: Path, engine: str, fault: str, suffix: str) -> None:
    skip_without(engine, tmp_path)
    path = tmp_path / f"state{suffix}"
    fp.save(make_state(1), path)
    for nth in itertools.count(1):
        with armed(fault, "write", nth, tmp_path) as shot:
            fp.save(make_state(2), path, engine=f"fault:{engine}")
        if not shot.hit or fault in FORGIVEN:
            assert shot.error is None
            assert load_step(path) == 2
        else:
            expect_storage_error(shot.error, fault, path)
            assert load_step(path) == 1
        if not shot.hit:
            break
        assert not pending_files(tmp_path)
        fp.save(make_state(1), path, durable=False)
        assert load_step(path) == 1
    assert nth > REQUESTS_MIN


def expect_no_wrong_bytes(path: Path, engine: str, fault: str, read: Callable[[str], None]) -> set[int | None]:
    """Read a file with the named engine, once for each request that can fail; `read` checks what it got.

    Returns the offsets in the file that the errors name.
    """
    offsets_bytes = set()
    for nth in itertools.count(1):
        with armed(fault, "read", nth, path.parent) as shot:
            read(f"fault:{engine}")
        if not shot.hit:
            break
        if fault in FORGIVEN:
            assert shot.error is None
        else:
            expect_storage_error(shot.error, fault, path)
            assert shot.error is not None
            offsets_bytes.add(shot.error.offset_bytes)
        read("auto")
    assert shot.error is None
    assert nth > REQUESTS_MIN
    return offsets_bytes


@fault_kinds
@places
@in_child(SMALL_RING)
def test_failed_load_raises(tmp_path: Path, engine: str, suffix: str, fault: str) -> None:
    skip_without(engine, tmp_path)
    path = tmp_path / f"state{suffix}"
    fp.save(make_state(1), path)

    def read(engine: str) -> None:
        assert not differences(fp.load(path, engine=engine), make_state(1))

    expect_no_wrong_bytes(path, engine, fault, read)


def straight_offsets_bytes(path: Path) -> set[int]:
    """Return where the second and later requests begin that read large tensors straight to their memory.

    Such a tensor is cut from its own start on, whereas the ring's requests begin at multiples of a chunk.
    """
    offsets_bytes = set()
    for tensor in fp.inspect(path).tensors:
        start_bytes = tensor.offset_bytes
        if tensor.size_bytes < STRAIGHT_BYTES or start_bytes is None or start_bytes % mmap.PAGESIZE:
            continue
        assert start_bytes % CHUNK_BYTES  # or nothing would tell the two apart
        offsets_bytes |= {
            start_bytes + done for done in range(CHUNK_BYTES, tensor.size_bytes - CHUNK_BYTES, CHUNK_BYTES)
        }
    return offsets_bytes


@pytest.mark.parametrize("check_crcs", [False, True], ids=["", "verify"])
@fault_kinds
@pytest.mark.parametrize("engine", ["threads", "uring", "libaio"])
@in_child(SMALL_RING)
def test_failed_read_straight_to_a_tensor_raises(tmp_path: Path, engine: str, fault: str, check_crcs: bool) -> None:
    skip_without(engine, tmp_path)
    path = tmp_path / "state.pt"
    fp.save(make_state(1, LARGE_BYTES), path)

    def read(engine: str) -> None:
        found = fp.load(path, verify=check_crcs, engine=engine)
        assert not differences(found, make_state(1, LARGE_BYTES))

    offsets_bytes = expect_no_wrong_bytes(path, engine, fault, read)
    if fault not in FORGIVEN and fault != "EIO-lasting":  # of many errors, any one may be the first to come back
        straight_bytes = straight_offsets_bytes(path)
        assert len(straight_bytes) > REQUESTS_MIN
        assert straight_bytes <= offsets_bytes


@fault_kinds
@suffixes
@in_child(SMALL_RING)
def test_failed_verify_raises(tmp_path: Path, suffix: str, fault: str) -> None:
    path = tmp_path / f"state{suffix}"
    fp.save(make_state(1), path)

    def read(engine: str) -> None:
        assert fp.verify(path, engine=engine).ok
        assert not differences(fp.load(path, verify=True), make_state(1))

    expect_no_wrong_bytes(path, "threads", fault, read)


def overwritten_names(error: fp.StorageError) -> list[str] | None:
    """Return the tensors that the message says may be overwritten; None when it does not say that."""
    _, phrase, listed = str(error).partition("target partly overwritten, ")
    return listed.partition(": ")[2].split(", ") if phrase else None


@pytest.mark.parametrize("check_first", [False, True], ids=["", "verify"])
@fault_kinds
@suffixes
@in_child(SMALL_RING)
def test_failed_load_into_says_so(tmp_path: Path, suffix: str, fault: str, check_first: bool) -> None:
    path = tmp_path / f"state{suffix}"
    fp.save(make_state(1), path)
    reported = []
    for nth in itertools.count(1):
        target = make_state(2)
        with armed(fault, "read", nth, tmp_path) as shot:
            fp.load_into(path, target, verify=check_first, engine="fault:threads")
        if not shot.hit or fault in FORGIVEN:
            assert shot.error is None
            assert not differences(target, make_state(1))
        else:
            expect_storage_error(shot.error, fault, path)
            names = overwritten_names(shot.error) if shot.error else None
            reported.append(names is not None)
            assert set(differences(target, make_state(2))) <= set(names or ())
            fp.load_into(path, target)
            assert not differences(target, make_state(1))
        if not shot.hit:
            break
    assert nth > REQUESTS_MIN * (1 + check_first)
    if fault not in FORGIVEN:
        # While CRCs are checked nothing is overwritten, and the message does not say so; later it does.
        assert True in reported
        assert (False in reported) == check_first
        assert reported == sorted(reported)


@suffixes
@in_child(SMALL_RING)
def test_load_into_changes_nothing_when_a_crc_is_wrong(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"state{suffix}"
    fp.save(make_state(1), path)
    place = next(tensor for tensor in fp.inspect(path).tensors if tensor.name == "moments").offset_bytes
    assert place is not None
    with path.open("r+b") as file:
        file.seek(place + 70_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    target = make_state(2)
    with no_leaks(tmp_path), pytest.raises(fp.ChecksumError, match="moments"):
        fp.load_into(path, target, verify=True)
    assert _native.ring_free_count() == _native.ring_buffer_count()
    assert not differences(target, make_state(2))
    fp.load_into(path, target)
    assert differences(target, make_state(1)) == ["moments"]  # it is the file that is damaged, not the check


@pytest.mark.parametrize("op", ["write", "read"])
@in_child(SMALL_RING)
def test_transfer_that_stops_short_says_where(tmp_path: Path, op: str) -> None:
    path = tmp_path / "state.pt"
    fp.save(make_state(1), path)
    with armed("zero", op, 3, tmp_path) as shot:
        if op == "write":
            fp.save(make_state(2), path, engine="fault:threads")
        else:
            fp.load(path, engine="fault:threads")
    assert shot.error is not None
    assert shot.error.offset_bytes is not None
    assert f"at offset {shot.error.offset_bytes}" in str(shot.error)


# --- names ---


def test_every_operation_of_the_seam_is_watched() -> None:
    seam = {name for name in vars(Filesystem) if not name.startswith("_")}
    assert {*FILE_OPERATIONS, *DIRECTORY_OPERATIONS, *OPEN_FILE_OPERATIONS} == seam
    assert {*FILE_OPERATIONS, *DIRECTORY_OPERATIONS} <= set(vars(WatchedFilesystem))
    assert set(OPEN_FILE_OPERATIONS) <= set(vars(FailingOpenFiles))


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("sys_errno", [errno.EIO, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("replaces", [True, False], ids=["replaces", "first"])
@suffixes
@in_child(SMALL_RING)
def test_failed_operation_leaves_old_file(
    tmp_path: Path, suffix: str, replaces: bool, sys_errno: int, lasting: bool
) -> None:
    path = tmp_path / f"state{suffix}"
    for nth in itertools.count(1):
        if replaces:
            fp.save(make_state(1), path)
        leftover = tmp_path / f".{path.name}.pending-0011223344556677"
        leftover.touch()  # something to sweep
        double = FailingFilesystem(nth, sys_errno, lasting=lasting)
        error: Exception | None = None
        with no_leaks(), using(double):
            try:
                fp.save(make_state(2), path)
            except fp.StorageError as raised:
                error = raised.with_traceback(None)
        assert _native.ring_free_count() == _native.ring_buffer_count()
        if not double.failed:
            break

        failed = "create" if double.failed == "unlink" and lasting else double.failed
        wanted_error: type[Exception] | None = fp.StorageError
        if sys_errno == errno.ENOSPC:
            wanted_error = fp.NoSpaceError
        wanted_step = 1 if replaces else None
        if failed == "unlink":
            wanted_error, wanted_step = None, 2  # sweeping leftovers is not worth a failed save
        elif failed == "sync_directory":
            wanted_step = 2  # the new file has its name already, which may or may not survive a power cut
        assert type(error) is (wanted_error or type(None))
        if isinstance(error, fp.StorageError):
            assert error.errno == sys_errno
            assert str(error.filename).startswith(str(tmp_path))
            assert str(error.filename) in str(error)
        if wanted_step is None:
            with pytest.raises(fp.CheckpointNotFoundError):
                fp.load(path)
        else:
            assert load_step(path) == wanted_step
        assert set(pending_files(tmp_path)) <= {leftover} or lasting

        fp.save(make_state(3), path)
        assert load_step(path) == 3
        assert not pending_files(tmp_path)
        if not replaces:
            path.unlink()
    assert set(double.names) == set(FILE_OPERATIONS)
    assert error is None
    assert load_step(path) == 2
    assert not pending_files(tmp_path)
