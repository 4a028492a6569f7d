"""TensorFile, one request after the other: what is written is read again, by us and by everybody else; what makes no
sense is refused before anything happens; and the end of a file is where it is.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.filesystems import FailingFilesystem, Operation, WatchedFilesystem
from support.leaks import no_leaks
from support.sandbox import needs_root, small_filesystem
from support.tensor_files import ENGINES, bytes_of, pattern, skip_without, tensor_of

import fastpersist as fp
from fastpersist.commit.filesystem import using
from fastpersist.errors import ConfigError, EndOfFileError, NoSpaceError, StorageError
from fastpersist.transfer import tensor_file

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Sparse.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
]

engines = pytest.mark.parametrize("engine", ENGINES)
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
UNQUANTIZED = [dtype for dtype in DTYPES if not str(dtype).startswith("torch.q")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


# ------------------------------------------------------------------------------------- what is written is read again


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype, path: Path) -> None:
    def empty() -> torch.Tensor:
        if dtype in UNQUANTIZED:
            return torch.empty(6, 3, dtype=dtype)
        return torch.quantize_per_tensor(torch.zeros(6, 3), 0.1, 0, dtype)

    try:
        tensor, read = empty(), empty()
        view = fp.byte_view(tensor)
    except (ConfigError, RuntimeError) as reason:  # torch makes none, or its memory is packed
        pytest.skip(str(reason))
    view.copy_(tensor_of(bytes(view.numel()) if dtype == torch.bool else pattern(view.numel())))
    with fp.TensorFile(path, "w") as file:
        assert file.write(tensor, 5) == tensor.nbytes
        assert file.read(read, 5) == tensor.nbytes
    assert bytes_of(read) == bytes_of(tensor)
    assert path.read_bytes() == bytes(5) + bytes_of(tensor)


@engines
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 511, 512, 4095, 4096, 4097, 70_001])
@pytest.mark.parametrize("size", [1, 511, 4096, 4097, 150_001])
def test_any_size_at_any_offset(engine: str, chunk_bytes: int, offset: int, size: int, path: Path) -> None:
    skip_without(engine, path.parent)
    before = pattern(100_000)
    path.write_bytes(before)
    data = pattern(size, 2)
    with fp.TensorFile(path, "r+", engine=engine, chunk_bytes=chunk_bytes) as file:
        for shifted_bytes in (0, 1, 512):
            assert file.write(tensor_of(data, shifted_bytes=shifted_bytes), offset) == size
            read = tensor_of(bytes(size), shifted_bytes=shifted_bytes)
            assert file.read(read, offset) == size
            assert bytes_of(read) == data
    expected = before.ljust(offset, b"\0")[:offset] + data + before[offset + size :]
    assert path.read_bytes() == expected


@engines
def test_locked_memory_comes_and_goes(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    tensor, read = fp.locked_tensor((300, 1000)), fp.locked_tensor((300, 1000))
    tensor.copy_(torch.randn(300, 1000))
    with fp.TensorFile(path, "w", engine=engine) as file:
        for offset in (0, 4096, 100):
            file.write(tensor, offset)
            assert file.read(read.zero_(), offset) == tensor.nbytes
            assert torch.equal(read, tensor)


def test_what_is_written_is_seen_by_others_at_once(path: Path) -> None:
    data = pattern(50_000)
    with fp.TensorFile(path, "w") as file, fp.TensorFile(path) as other:
        file.write(tensor_of(data), 100)
        read = tensor_of(bytes(50_000))
        other.read(read, 100)
        assert bytes_of(read) == data
        assert path.read_bytes() == bytes(100) + data
        path.write_bytes(b"else")  # and what others write is seen by us
        assert file.size() == other.size() == 4


def test_any_contiguous_tensor_will_do(path: Path) -> None:
    storage = torch.arange(40, dtype=torch.float64)
    with torch.inference_mode():
        inference = torch.ones(3)
    tensors: list[torch.Tensor] = [
        storage[7:13],
        storage.view(8, 5)[2:4],
        torch.tensor(3.5),
        torch.nn.Parameter(torch.randn(3, 2)),
        torch.randn(2, 2, requires_grad=True),
        inference,
        torch.randn(2, 1, 3).expand(2, 1, 3),
        torch.randn(3, 4).t().t(),
        torch.nn.Buffer(torch.randn(2)),
    ]
    with fp.TensorFile(path, "w") as file:
        for tensor in tensors:
            before = bytes_of(tensor)
            file.write(tensor)
            fp.byte_view(tensor).zero_()
            file.read(tensor)
            assert bytes_of(tensor) == before
    assert storage.tolist() == list(range(40))


def test_reads_count_as_changes_of_the_tensor(path: Path) -> None:
    path.write_bytes(bytes(64))
    weight = torch.ones(4, requires_grad=True)
    with fp.TensorFile(path) as file:
        product = (weight * weight).sum()
        before = weight._version
        file.read(weight)
        assert weight._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        with torch.inference_mode():
            inference = torch.ones(4)
            file.read(inference)  # has no version
        assert not inference.any()


def test_writes_change_nothing_of_the_tensor(path: Path) -> None:
    tensor = torch.ones(5)
    with fp.TensorFile(path, "w") as file:
        file.write(tensor)
    assert tensor._version == 0
    assert bool((tensor == 1).all())


def no_bytes() -> dict[str, Callable[[], Any]]:
    def freed() -> torch.Tensor:
        tensor = torch.ones(8)
        tensor.untyped_storage().resize_(0)
        return tensor

    def cut() -> torch.Tensor:
        tensor = torch.ones(8)
        tensor.untyped_storage().resize_(8)
        return tensor

    return {
        "transposed": lambda: torch.zeros(2, 3).t(),
        "strided": lambda: torch.zeros(10)[::2],
        "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "expanded": lambda: torch.zeros(1).expand(5),
        "sparse": lambda: torch.zeros(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "meta": lambda: torch.zeros(3, device="meta"),
        "conjugated": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
        "negated": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
        "freed": freed,
        "cut": cut,
        "zero": lambda: torch._efficientzerotensor(3),
        "list": lambda: [1, 2],
        "none": lambda: None,
        "bytes": lambda: b"1234",
    }


NO_BYTES = no_bytes()


@pytest.mark.parametrize("kind", NO_BYTES)
def test_what_has_no_bytes_in_order_is_refused_before_anything_is_written(kind: str, path: Path) -> None:
    data = pattern(1000)
    path.write_bytes(data)
    bad = NO_BYTES[kind]()
    good = torch.zeros(10)
    with fp.TensorFile(path, "r+") as file:
        calls: list[Callable[[], object]] = [
            lambda: file.write(bad),
            lambda: file.read(bad),
            lambda: file.write_async(bad),
            lambda: file.write_list([(good, 0), (bad, 100)]),
            lambda: file.read_list([(good, 0), (bad, 100)]),
        ]
        for call in calls:
            with pytest.raises(ConfigError):
                call()
        assert file.read(good) == 40  # and all goes on
    assert path.read_bytes() == data


@pytest.mark.parametrize("bad", [-1, 1 << 63, 1 << 100, 1.5, "0", None, (1 << 63) - 4], ids=repr)
def test_offsets_that_make_no_sense_are_refused(bad: Any, path: Path) -> None:
    path.write_bytes(b"x" * 100)
    tensor = torch.zeros(2)
    with fp.TensorFile(path, "r+") as file:
        calls: list[Callable[[], object]] = [
            lambda: file.write(tensor, bad),
            lambda: file.read(tensor, bad),
            lambda: file.write_list([(tensor, 0), (tensor, bad)]),
            lambda: file.read_list([(tensor, 0), (tensor, bad)]),
        ]
        for call in calls:
            with pytest.raises(ConfigError):
                call()
        if bad != (1 << 63) - 4:
            for change in (file.truncate, file.allocate):
                with pytest.raises(ConfigError):
                    change(bad)
    assert path.read_bytes() == b"x" * 100


def test_whole_numbers_of_other_kinds_are_offsets(path: Path) -> None:
    path.write_bytes(pattern(100))
    tensor = torch.zeros(4, dtype=torch.uint8)
    with fp.TensorFile(path) as file:
        for offset in (torch.tensor(7), torch.arange(8).numpy()[7]):
            file.read(tensor.zero_(), offset)  # type: ignore[arg-type]
            assert bytes_of(tensor) == pattern(100)[7:11]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@engines
def test_tensors_of_a_device_come_and_go(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    tensors = [torch.randn(100_003, device="cuda"), torch.arange(7, device="cuda"), torch.ones(3, device="cuda").half()]
    host = torch.randn(1000)
    read = [torch.zeros_like(tensor) for tensor in [*tensors, host]]
    places = [3, 500_000, 600_001, 700_000]
    with no_leaks(), fp.TensorFile(path, "w", engine=engine) as file:
        file.write_list(zip([*tensors, host], places, strict=True))
        before = [tensor._version for tensor in read]
        file.read_list(zip(read, places, strict=True))
        for tensor, expected, version in zip(read, [*tensors, host], before, strict=True):
            assert torch.equal(tensor, expected)
            assert tensor._version > version
        pending = [file.read_async(tensor.zero_(), place) for tensor, place in zip(read, places, strict=True)]
        assert sum(one.result() for one in pending) == sum(tensor.nbytes for tensor in read)
        assert all(torch.equal(tensor, expected) for tensor, expected in zip(read, [*tensors, host], strict=True))
        beyond = torch.full((1 << 22,), 7, dtype=torch.uint8, device="cuda")
        with pytest.raises(EndOfFileError):
            file.read(beyond)
        there = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        assert torch.equal(beyond[: len(there)].cpu(), there)  # what is there was read, and nothing else was touched
        assert bool((beyond[len(there) :] == 7).all())


# -------------------------------------------------------------------------------------------------------- lists


@engines
def test_ten_thousand_rows_are_one_call(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    rows = torch.frombuffer(bytearray(pattern(1000 * 4096)), dtype=torch.uint8).view(1000, 4096)
    order = list(range(10_000))
    random.Random(3).shuffle(order)
    with fp.TensorFile(path, "w", engine=engine) as file:
        assert file.write_list((rows[place % 1000], place * 4096) for place in order) == 10_000 * 4096
        random.Random(4).shuffle(order)
        read = torch.zeros(10_000, 4096, dtype=torch.uint8)
        assert file.read_list([(read[place], place * 4096) for place in order]) == 10_000 * 4096
    assert torch.equal(read.view(10, 1000, 4096), rows.expand(10, 1000, 4096))


def test_lists_may_be_empty_or_hold_nothing_or_be_of_any_kind(path: Path) -> None:
    tensor = torch.arange(4, dtype=torch.uint8)
    with fp.TensorFile(path, "w") as file:
        assert file.write_list([]) == file.read_list([]) == 0
        assert file.write_list([(tensor[:0], 10), (tensor, 3), (torch.zeros(0), 1 << 62)]) == 4
        assert file.size() == 7
        read = torch.zeros(4, dtype=torch.uint8)
        for items in (([read, 3],), iter([(read, 3)]), ((read, 3) for _ in range(1))):
            assert file.read_list(items) == 4  # type: ignore[arg-type]
            assert read.tolist() == [0, 1, 2, 3]
            read.zero_()


def test_empty_tensors_let_no_file_grow(path: Path) -> None:
    data = pattern(70_000)
    with fp.TensorFile(path, "w") as file:
        file.write(torch.zeros(0), 90_000)
        file.write_list([(torch.zeros(0), 82_965), (tensor_of(data), 4095), (torch.zeros(0), 1 << 40)])
        assert file.size() == 4095 + len(data)


@pytest.mark.parametrize(
    "bad",
    [None, 5, [1], [torch.zeros(2)], torch.zeros(2, 2), [(torch.zeros(1),)], [(torch.zeros(1), 0, 0)], ["ab"]],
    ids=str,
)
def test_what_is_no_list_of_pairs_is_refused(bad: Any, path: Path) -> None:
    path.write_bytes(b"x" * 100)
    with fp.TensorFile(path, "r+") as file:
        for call in (file.read_list, file.write_list, file.read_list_async, file.write_list_async):
            with pytest.raises(ConfigError):
                call(bad)
    assert path.read_bytes() == b"x" * 100


def test_the_source_of_a_list_may_fail_and_may_use_the_file(path: Path) -> None:
    path.write_bytes(pattern(5000))
    read = torch.zeros(5000, dtype=torch.uint8)
    with no_leaks(), fp.TensorFile(path, "r+") as file:

        def failing() -> Iterator[tuple[torch.Tensor, int]]:
            yield read[:10], 0
            raise KeyError("mine")

        for call in (file.read_list, file.write_list):
            with pytest.raises(KeyError, match="mine"):
                call(failing())

        def looking() -> Iterator[tuple[torch.Tensor, int]]:
            for at in range(0, file.size(), 1000):
                file.read(torch.zeros(1), at)
                yield read[at : at + 1000], at

        assert file.read_list(looking()) == 5000
        assert file.write_list(looking()) == 5000
    assert bytes_of(read) == path.read_bytes() == pattern(5000)


def test_a_source_may_even_close_the_file(path: Path) -> None:
    path.write_bytes(pattern(5000))
    file = fp.TensorFile(path)

    def closing() -> Iterator[tuple[torch.Tensor, int]]:
        yield torch.zeros(1), 0
        file.close()
        yield torch.zeros(1), 0

    with no_leaks(), pytest.raises(ConfigError, match="closed"):
        file.read_list(closing())
    assert file.closed


# ----------------------------------------------------------------------------------------------- the end of the file


@engines
@pytest.mark.parametrize("chunk_bytes", [4096, 8 << 20])
@pytest.mark.parametrize("size", [0, 1, 5150, 8192, 40_000])
def test_a_read_beyond_the_end_says_what_was_there(engine: str, chunk_bytes: int, size: int, path: Path) -> None:
    skip_without(engine, path.parent)
    data = pattern(size)
    path.write_bytes(data)
    with fp.TensorFile(path, engine=engine, chunk_bytes=chunk_bytes) as file:
        for offset, shifted_bytes in itertools.product((0, 1, 100, 512, 4096, 5149, 8192, 50_000), (0, 3)):
            there = data[offset:]
            for asked in {len(there) + 1, len(there) + 4096, 60_000}:
                read = tensor_of(b"\xa5" * asked, shifted_bytes=shifted_bytes)
                with pytest.raises(EndOfFileError) as failure:
                    file.read(read, offset)
                error = failure.value
                assert (error.done_bytes, error.asked_bytes) == (len(there), asked), offset
                assert (error.offset_bytes, error.filename, error.errno) == (offset, str(path), None)
                assert str(path) in str(error)
                # Direct I/O fills the block in which the file ends.
                touched = min(asked, len(there) + 4096)
                assert bytes_of(read)[: len(there)] == there
                assert bytes_of(read)[touched:] == b"\xa5" * (asked - touched)
            assert file.read(tensor_of(bytes(len(there))), offset) == len(there)
            assert file.read(torch.zeros(0), offset) == 0


@engines
def test_of_a_list_that_reaches_beyond_the_end_the_item_is_named(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    data = pattern(10_000)
    path.write_bytes(data)
    with fp.TensorFile(path, engine=engine) as file:
        good, bad = tensor_of(bytes(5000)), tensor_of(bytes(3000), shifted_bytes=7)
        pending = file.read_list_async([(good, 1), (bad, 8001)])
        error = pending.exception()
        assert isinstance(error, EndOfFileError)
        assert (error.offset_bytes, error.done_bytes, error.asked_bytes) == (8001, 1999, 3000)
        assert bytes_of(good) == data[1:5001]
        assert bytes_of(bad) == data[8001:] + bytes(1001)
        assert isinstance(error, EOFError | OSError)


def test_a_file_that_has_grown_is_read_to_its_new_end(path: Path) -> None:
    path.write_bytes(b"1")
    with fp.TensorFile(path) as file:
        with path.open("ab") as other:
            other.write(b"2" * 5000)
        read = torch.zeros(5001, dtype=torch.uint8)
        assert file.read(read) == file.size() == 5001
        os.truncate(path, 10)
        with pytest.raises(EndOfFileError) as failure:
            file.read(read)
        assert failure.value.done_bytes == 10


# --------------------------------------------------------------------------------------- length, holes and durability


def test_the_length_follows_truncate_and_allocate(path: Path) -> None:
    with fp.TensorFile(path, "w") as file:
        file.write(torch.ones(100, dtype=torch.uint8))
        file.truncate(10)
        assert path.read_bytes() == b"\1" * 10
        file.truncate(6000)
        assert path.read_bytes() == b"\1" * 10 + bytes(5990)
        file.allocate(3000)
        assert file.size() == 6000
        file.allocate(1 << 20)
        assert file.size() == 1 << 20
        assert path.stat().st_blocks * 512 >= 1 << 20
        file.allocate(0)
        file.truncate(0)
        assert path.read_bytes() == b""
        file.write(torch.ones(3, dtype=torch.uint8), 2)
        assert path.read_bytes() == b"\0\0\1\1\1"


@engines
def test_holes_stay_holes(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    far = 1 << 40  # ext4 ends at 16 TiB
    data = pattern(100_000)
    with fp.TensorFile(path, "w", engine=engine) as file:
        for at in (3, far + 5, far // 2):
            file.write(tensor_of(data), at)
        file.write_list([(tensor_of(data), far // 4), (tensor_of(data), far // 8 + 1)])
        file.sync()
        assert file.size() == far + 5 + len(data)
        assert path.stat().st_blocks * 512 < 4 << 20
        for at in (3, far + 5, far // 2, far // 4, far // 8 + 1):
            read = tensor_of(bytes(len(data)))
            file.read(read, at)
            assert bytes_of(read) == data
        read = tensor_of(b"x" * 5000)
        file.read(read, far // 3)
        assert bytes_of(read) == bytes(5000)


@engines
def test_what_the_file_system_cannot_hold_is_an_error_of_that_write_only(engine: str, path: Path) -> None:
    skip_without(engine, path.parent)
    with fp.TensorFile(path, "w", engine=engine) as file:
        error = file.write_async(torch.zeros(100), (1 << 62) + 4096).exception()
        if error is None:
            pytest.skip("files of this file system may be as long")
        assert isinstance(error, StorageError)
        assert error.errno in (errno.EFBIG, errno.EINVAL)
        assert str(path) in str(error)
        assert file.engine != "threads-buffered" or engine in ("auto", "threads-buffered")
        file.write(torch.zeros(100))
        assert file.size() == 400


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "ext4-without-fallocate"])
def test_other_file_systems_do_too(kind: str, tmp_path: Path) -> None:
    with small_filesystem(kind, tmp_path, 16) as directory:
        data = pattern(200_001)
        with fp.TensorFile(directory / "file", "w") as file:
            file.write(tensor_of(data), 777)
            file.sync()
            read = tensor_of(bytes(len(data)))
            file.read(read, 777)
            assert bytes_of(read) == data
            file.allocate(1 << 20)
            assert file.size() == 1 << 20
            with pytest.raises(NoSpaceError):
                file.write(torch.zeros(32 << 20, dtype=torch.uint8), 1 << 20)
            file.truncate(1000)
        assert (directory / "file").read_bytes() == bytes(777) + data[:223]


class Recorded(WatchedFilesystem):
    """Notes each operation, and its path."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        yield
        self.seen.append((operation.name, operation.path))


def test_sync_makes_bytes_and_a_new_name_durable_wherever_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    with using(Recorded()), fp.TensorFile("sub/file", "w") as file:
        recorded = tensor_file.filesystem()
        assert isinstance(recorded, Recorded)
        monkeypatch.chdir("/")
        file.write(torch.zeros(10))
        file.sync()
        file.sync()
        assert recorded.seen == [("sync", "sub/file"), ("sync_directory", str(tmp_path / "sub")), ("sync", "sub/file")]
    with using(recorded), fp.TensorFile(tmp_path / "sub/file", "r+") as file:
        recorded.seen.clear()
        file.sync()
        assert recorded.seen == [("sync", str(tmp_path / "sub/file"))]


def test_a_sync_without_a_free_descriptor_names_the_file_and_may_be_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with fp.TensorFile(path, "w") as file:
        with monkeypatch.context() as limit:
            limit.setattr(os, "dup", refuse)
            with pytest.raises(StorageError, match=f"syncing {path}: Too many open files"):
                file.sync()
        file.sync()


def test_a_sync_that_failed_is_not_forgotten(path: Path) -> None:
    with fp.TensorFile(path, "w") as file:
        file.write(torch.zeros(10))
        with using(FailingFilesystem(1, errno.EIO)), pytest.raises(StorageError, match="made to fail"):
            file.sync()
        # The kernel tells it once, and has dropped what it could not write.
        with pytest.raises(StorageError, match="made to fail"):
            file.sync()
