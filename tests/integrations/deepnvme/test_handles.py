"""DeepNVMe's names: every method does what a program written for DeepNVMe expects, and what fails is raised."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import deepnvme_handles
from support.deepnvme_handles import SIZE, Handle, contents, some_bytes
from support.leaks import no_leaks

import fastpersist as fp
from fastpersist.integrations.deepnvme import AsyncIOBuilder, GDSBuilder, aio_handle, gds_handle, handles, operations

torch.set_num_threads(1)

handle = deepnvme_handles.handle
source = deepnvme_handles.source


# --- options


def test_options_have_defaults_order_and_getters_of_deepnvme() -> None:
    plain = aio_handle()
    assert plain.get_block_size() == 1 << 20
    assert plain.get_queue_depth() == 128
    assert plain.get_single_submit() is False
    assert plain.get_overlap_events() is False
    assert plain.get_intra_op_parallelism() == 1
    assert plain.get_alignment() == 4096
    for given in (
        gds_handle(8 << 20, 32, True, True, 4),
        aio_handle(block_size=8 << 20, queue_depth=32, single_submit=True, overlap_events=True, intra_op_parallelism=4),
    ):
        assert given.get_block_size() == 8 << 20
        assert given.get_queue_depth() == 32
        assert given.get_single_submit() is True
        assert given.get_overlap_events() is True
        assert given.get_intra_op_parallelism() == 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1 << 20, 128)),
        ({"block_size": 1000, "queue_depth": 1}, (4096, 1)),
        ({"block_size": 3 << 20, "queue_depth": 10_000}, (2 << 20, 4096)),
        ({"block_size": 1 << 40, "intra_op_parallelism": 8}, (1 << 30, 128)),
    ],
)
def test_options_are_those_of_the_files(
    options: dict[str, int], expected: tuple[int, int], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Seen(fp.TensorFile):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            seen.append((self.chunk_bytes, self.queue_depth))
            threads = options.get("intra_op_parallelism")
            assert threads is None or self.threads == threads

    monkeypatch.setattr(operations, "TensorFile", Seen)
    buffer = torch.empty(SIZE, dtype=torch.uint8)
    assert aio_handle(**options).sync_pread(buffer, source) == 1  # type: ignore[arg-type]
    assert seen == [expected]
    assert torch.equal(buffer, some_bytes())


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None, "1M", True])
def test_options_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(fp.ConfigError, match=f"{name} is {value!r}"):
        aio_handle(**{name: value})


# --- every method

WRITES: dict[str, Callable[[Handle, torch.Tensor, Any], object]] = {
    "write": lambda handle, tensor, path: handle.write(tensor, path, False),
    "write, validated": lambda handle, tensor, path: handle.write(tensor, path, validate=True),
    "pwrite": lambda handle, tensor, path: handle.pwrite(tensor, path, False, False) - 1,
    "pwrite, validated": lambda handle, tensor, path: handle.pwrite(tensor, path, True, False) - 1,
    "pwrite, async": lambda handle, tensor, path: handle.pwrite(tensor, path, False, True) or handle.wait() - 1,
    "pwrite, both": lambda handle, tensor, path: handle.pwrite(tensor, path, True, True) or handle.wait() - 1,
    "pwrite, keyword": lambda handle, tensor, path: handle.pwrite(tensor, path, False, **{"async": False}) - 1,
    "sync_pwrite": lambda handle, tensor, path: handle.sync_pwrite(tensor, path) - 1,
    "async_pwrite": lambda handle, tensor, path: handle.async_pwrite(tensor, path) or handle.wait() - 1,
    "keywords": lambda handle, tensor, path: handle.sync_pwrite(buffer=tensor, filename=path, file_offset=0) - 1,
    "async keywords": lambda handle, tensor, path: (
        handle.async_pwrite(buffer=tensor, filename=path, file_offset=0) or handle.wait() - 1
    ),
}

READS: dict[str, Callable[[Handle, torch.Tensor, Any], object]] = {
    "read": lambda handle, tensor, path: handle.read(tensor, path, False),
    "read, validated": lambda handle, tensor, path: handle.read(tensor, path, validate=True),
    "pread": lambda handle, tensor, path: handle.pread(tensor, path, False, False) - 1,
    "pread, validated": lambda handle, tensor, path: handle.pread(tensor, path, True, False) - 1,
    "pread, async": lambda handle, tensor, path: handle.pread(tensor, path, False, True) or handle.wait() - 1,
    "pread, both": lambda handle, tensor, path: handle.pread(tensor, path, True, True) or handle.wait() - 1,
    "pread, keyword": lambda handle, tensor, path: (
        handle.pread(buffer=tensor, filename=path, validate=False, **{"async": True}) or handle.wait() - 1
    ),
    "sync_pread": lambda handle, tensor, path: handle.sync_pread(tensor, path) - 1,
    "async_pread": lambda handle, tensor, path: handle.async_pread(tensor, path) or handle.wait() - 1,
    "keywords": lambda handle, tensor, path: handle.sync_pread(buffer=tensor, filename=path, file_offset=0) - 1,
    "async keywords": lambda handle, tensor, path: (
        handle.async_pread(buffer=tensor, filename=path, file_offset=0) or handle.wait() - 1
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_way_to_write_writes_the_bytes_and_returns_what_deepnvme_does(
    name: str, handle: Handle, tmp_path: Path
) -> None:
    tensor = some_bytes()
    assert WRITES[name](handle, tensor, tmp_path / "new.bin") == 0
    assert torch.equal(contents(tmp_path / "new.bin"), tensor)
    assert handle.wait() == 0


@pytest.mark.parametrize("name", READS)
def test_every_way_to_read_fills_the_tensor_and_returns_what_deepnvme_does(
    name: str, handle: Handle, source: Path
) -> None:
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    assert READS[name](handle, tensor, source) == 0
    assert torch.equal(tensor, some_bytes())
    assert handle.wait() == 0


@pytest.mark.parametrize("spell", [str, os.fsencode, Path], ids=["str", "bytes", "Path"])
def test_names_may_be_of_any_kind(spell: Callable[[Path], Any], handle: Handle, tmp_path: Path) -> None:
    path = tmp_path / "ünï cödé"
    assert handle.sync_pwrite(some_bytes(), spell(path)) == 1
    buffer = torch.empty(SIZE, dtype=torch.uint8)
    assert handle.sync_pread(buffer, spell(path)) == 1
    assert torch.equal(buffer, some_bytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_tensors_of_any_dtype_and_shape_are_taken(dtype: torch.dtype, handle: Handle, tmp_path: Path) -> None:
    tensor = some_bytes(3 * 5 * 16).remainder(2).view(3, 5, 16).to(dtype)
    handle.async_pwrite(tensor, tmp_path / "a.bin", 7)
    assert handle.wait() == 1
    back = torch.empty_like(tensor)
    handle.sync_pread(back, tmp_path / "a.bin", 7)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_parameters_are_taken(handle: Handle, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(33))
    handle.sync_pwrite(parameter, tmp_path / "a.bin")
    back = torch.nn.Parameter(torch.zeros(33))
    handle.sync_pread(back, tmp_path / "a.bin")
    assert torch.equal(back, parameter)


def test_no_elements_are_an_operation_too(handle: Handle, source: Path) -> None:
    assert handle.sync_pread(torch.empty(0), source) == 1
    assert handle.async_pwrite(torch.empty(0), source) == 0
    assert handle.wait() == 1
    assert torch.equal(contents(source), some_bytes())


def test_locked_memory_is_taken(handle: Handle, tmp_path: Path) -> None:
    tensor = handle.new_cpu_locked_tensor(64 << 10, torch.empty(0, dtype=torch.uint8))
    tensor.copy_(some_bytes(64 << 10))
    handle.sync_pwrite(tensor, tmp_path / "a.bin")
    back = handle.new_cpu_locked_tensor(64 << 10, tensor)
    handle.sync_pread(back, tmp_path / "a.bin")
    assert torch.equal(back, tensor)


# --- offsets and lengths


@pytest.mark.parametrize("offset_bytes", [0, 1, 512, 4096, 50_001])
def test_a_part_of_a_file_is_read(offset_bytes: int, handle: Handle, source: Path) -> None:
    buffer = torch.empty(50_002, dtype=torch.uint8)
    assert handle.read(buffer, source, True, offset_bytes) == 0
    assert torch.equal(buffer, some_bytes()[offset_bytes : offset_bytes + 50_002])
    assert handle.async_pread(buffer.zero_(), source, file_offset=offset_bytes) == 0
    assert handle.wait() == 1
    assert torch.equal(buffer, some_bytes()[offset_bytes : offset_bytes + 50_002])


@pytest.mark.parametrize("offset_bytes", [0, 3, 4096, 99_999])
def test_only_the_bytes_that_are_written_change(offset_bytes: int, handle: Handle, source: Path) -> None:
    piece = some_bytes(10_000, seed=2)
    expected = torch.cat([some_bytes(), torch.zeros(10_000, dtype=torch.uint8)])
    expected[offset_bytes : offset_bytes + 10_000] = piece
    assert handle.write(piece, source, True, offset_bytes) == 0
    assert torch.equal(contents(source), expected[: max(SIZE, offset_bytes + 10_000)])


def test_a_file_may_begin_with_a_hole(handle: Handle, tmp_path: Path) -> None:
    handle.sync_pwrite(some_bytes(10), tmp_path / "a.bin", 20)
    assert contents(tmp_path / "a.bin").tolist() == [0] * 20 + some_bytes(10).tolist()


# --- asynchronous operations


def test_wait_counts_and_begins_anew(handle: Handle, tmp_path: Path) -> None:
    assert handle.wait() == 0
    for count in (3, 1, 5):
        for number in range(count):
            assert handle.async_pwrite(some_bytes(seed=number), tmp_path / f"{number}.bin") == 0
        assert handle.wait() == count
        assert handle.wait() == 0
        for number in range(count):
            assert torch.equal(contents(tmp_path / f"{number}.bin"), some_bytes(seed=number))


def test_synchronous_operations_leave_the_others_to_wait(handle: Handle, source: Path, tmp_path: Path) -> None:
    first, second = torch.empty(2, SIZE, dtype=torch.uint8)
    handle.async_pread(first, source)
    assert handle.sync_pread(second, source) == 1
    assert handle.pwrite(second, tmp_path / "b.bin", False, False) == 1
    assert handle.wait() == 1
    assert torch.equal(first, second)


def test_a_buffer_may_be_dropped_at_once(handle: Handle, tmp_path: Path) -> None:
    for number in range(20):
        handle.async_pwrite(some_bytes(seed=number), tmp_path / "a.bin", number * SIZE)
    gc.collect()
    assert handle.wait() == 20
    assert torch.equal(contents(tmp_path / "a.bin"), torch.cat([some_bytes(seed=number) for number in range(20)]))


def test_thousands_of_operations_on_one_file(handle: Handle, tmp_path: Path) -> None:
    rows = some_bytes(3000 * 4096).view(3000, 4096)
    order = random.Random(1).sample(range(3000), 3000)
    for row in order:
        handle.async_pwrite(rows[row], tmp_path / "rows.bin", row * 4096)
    assert handle.wait() == 3000
    assert torch.equal(contents(tmp_path / "rows.bin"), rows.view(-1))
    back = torch.empty_like(rows)
    for row in order:
        handle.async_pread(back[row], tmp_path / "rows.bin", row * 4096)
    assert handle.wait() == 3000
    assert torch.equal(back, rows)


def test_operations_on_many_files_hold_few_of_them_open(handle: Handle, tmp_path: Path) -> None:
    before_count = len(os.listdir("/proc/self/fd"))
    for number in range(100):
        handle.async_pwrite(some_bytes(5000, seed=number), tmp_path / f"{number}.bin")
        assert len(os.listdir("/proc/self/fd")) - before_count < 100
    assert handle.wait() == 100
    buffers = torch.empty(100, 5000, dtype=torch.uint8)
    for number in range(100):
        handle.pread(buffers[number], tmp_path / f"{number}.bin", True, True)
    assert handle.wait() == 100
    assert all(torch.equal(buffers[number], some_bytes(5000, seed=number)) for number in range(100))


def test_what_nobody_waits_for_is_finished_when_the_handle_goes(tmp_path: Path) -> None:
    with no_leaks(tmp_path):
        handle = aio_handle()
        for number in range(5):
            handle.async_pwrite(some_bytes(seed=number), tmp_path / f"{number}.bin")
        del handle
        gc.collect()
        for number in range(5):
            assert torch.equal(contents(tmp_path / f"{number}.bin"), some_bytes(seed=number))


def test_threads_share_a_handle(handle: Handle, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    counts: list[int] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                path = tmp_path / f"{number % 4}.bin"  # two threads to a file
                tensor = some_bytes(9000, seed=number * 100 + turn)
                offset_bytes = (number * 10 + turn) * 9000
                if turn % 2:
                    assert handle.sync_pwrite(tensor, path, offset_bytes) == 1
                else:
                    assert handle.async_pwrite(tensor, path, offset_bytes) == 0
                    counts.append(handle.wait())
                # Done, whichever thread has waited for it.
                assert torch.equal(contents(path)[offset_bytes : offset_bytes + 9000], tensor)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(counts) == 40


def test_who_waits_beside_another_does_not_return_before_it(
    handle: Handle, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on, returned = threading.Event(), threading.Event(), threading.Event()
    settle = operations.Operation.settle

    def slow_settle(operation: Any, files: Any) -> None:
        entered.set()
        go_on.wait(10)
        settle(operation, files)

    monkeypatch.setattr(operations.Operation, "settle", slow_settle)
    handle.async_pread(torch.empty(100), source)

    def wait_too() -> None:
        handle.wait()
        returned.set()

    threads = [threading.Thread(target=handle.wait), threading.Thread(target=wait_too)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    assert not returned.wait(0.05)
    go_on.set()
    for thread in threads:
        thread.join()
    assert returned.is_set()


# --- descriptors


def test_an_open_descriptor_can_be_written_to(handle: Handle, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, b"head")
    assert handle.async_pwrite(some_bytes(100), fd, 4) == 0
    assert handle.async_pwrite(buffer=some_bytes(100, seed=2), fd=fd, file_offset=104) == 0
    assert os.lseek(fd, 0, os.SEEK_CUR) == 4
    os.close(fd)
    assert handle.wait() == 2
    expected = list(b"head") + some_bytes(100).tolist() + some_bytes(100, seed=2).tolist()
    assert contents(path).tolist() == expected


def test_the_file_of_a_descriptor_is_meant_whatever_has_its_name(handle: Handle, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with open(path, "w+b") as file:
        path.unlink()
        path.write_bytes(b"another")
        handle.async_pwrite(some_bytes(100), file.fileno())
        assert handle.wait() == 1
        assert list(file.read()) == some_bytes(100).tolist()
    assert path.read_bytes() == b"another"


def test_descriptors_that_cannot_be_written_to_are_refused(handle: Handle, source: Path) -> None:
    with open(source, "rb") as file, pytest.raises(fp.ConfigError, match="open for reading only"):
        handle.async_pwrite(some_bytes(), file.fileno())
    for descriptor in (1000, -1):
        with pytest.raises(fp.StorageError, match=f"descriptor {descriptor}: Bad file descriptor") as raised:
            handle.async_pwrite(some_bytes(), descriptor)
        assert raised.value.errno == errno.EBADF
    assert handle.wait() == 0


# --- locked memory


def test_locked_tensors_are_made_known_and_freed(handle: Handle) -> None:
    example = torch.empty(0, dtype=torch.bfloat16)
    tensor = handle.new_cpu_locked_tensor(5000, example)
    assert tensor.dtype == torch.bfloat16
    assert tensor.shape == (5000,)
    assert tensor.data_ptr() % 4096 == 0
    assert handle.is_pinned(tensor)
    assert handle.is_pinned(tensor[100:200])
    assert not handle.is_pinned(torch.empty(5000))
    assert not handle.free_cpu_locked_tensor(tensor[1:])
    assert aio_handle().free_cpu_locked_tensor(tensor)  # another handle will do
    assert not handle.is_pinned(tensor)
    assert not handle.free_cpu_locked_tensor(tensor)
    assert tensor.sum() == 0  # it is still there
    assert not handle.free_cpu_locked_tensor(torch.empty(5))
    assert not handle.free_cpu_locked_tensor(torch.empty(0))


def test_the_example_has_two_names(handle: Handle) -> None:
    example = torch.empty(0, dtype=torch.int16)
    for tensor in (
        handle.new_cpu_locked_tensor(num_elem=3, example_tenosr=example),
        handle.new_cpu_locked_tensor(num_elem=3, example_tensor=example),
    ):
        assert tensor.dtype == torch.int16
    for wrong in ({}, {"example_tenosr": example, "example_tensor": example}, {"example_tensor": torch.int16}):
        with pytest.raises(fp.ConfigError, match="second argument must be one tensor"):
            handle.new_cpu_locked_tensor(3, **wrong)  # type: ignore[arg-type]


def test_a_locked_tensor_goes_with_its_last_reference(handle: Handle) -> None:
    def locked_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck:"))

    gc.collect()  # what earlier tests have locked must not go in between
    before_kib = locked_kib()
    tensor = handle.new_cpu_locked_tensor(64 << 10, torch.empty(0, dtype=torch.uint8))
    assert locked_kib() == before_kib + 64
    del tensor
    gc.collect()
    assert locked_kib() == before_kib
    assert not handle.is_pinned(torch.empty(64 << 10, dtype=torch.uint8))


# --- devices


class OnDevice(torch.Tensor):
    """Says that it is a CUDA tensor, and is not."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_device_tensors_cannot_be_pinned_without_cuda() -> None:
    handle = gds_handle()
    with pytest.raises(fp.UnsupportedError, match="new_pinned_device_tensor: there is no CUDA"):
        handle.new_pinned_device_tensor(5, torch.empty(0))
    with pytest.raises(fp.UnsupportedError, match="pin_device_tensor: there is no CUDA"):
        handle.pin_device_tensor(torch.empty(5))
    assert not handle.free_pinned_device_tensor(torch.empty(5))
    assert not handle.unpin_device_tensor(torch.empty(5))


def test_device_tensors_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    handle = gds_handle()
    made = handle.new_pinned_device_tensor(5, torch.empty(0, dtype=torch.int16).as_subclass(OnDevice))
    assert made.shape == (5,)
    assert made.dtype == torch.int16
    assert handle.is_pinned(made)
    assert handle.free_pinned_device_tensor(made)
    assert not handle.free_pinned_device_tensor(made)
    given = torch.empty(5).as_subclass(OnDevice)
    assert handle.pin_device_tensor(given)
    assert handle.is_pinned(given[1:])
    assert handle.unpin_device_tensor(given)
    assert not handle.is_pinned(given)
    with pytest.raises(fp.ConfigError, match="a CUDA tensor is needed, not one on cpu"):
        handle.pin_device_tensor(torch.empty(5))


def test_the_log_says_once_that_gpudirect_is_not_in_use(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handles, "_device_noted", False)
    handle = gds_handle()
    handle.sync_pread(torch.empty(3), source)
    assert caplog.text == ""
    for method, _ in itertools.product((handle.sync_pread, handle.async_pwrite), range(2)):
        with pytest.raises(fp.ConfigError):
            method(torch.empty(3, device="meta"), source)  # of a device that every machine has
    assert [record.getMessage() for record in caplog.records] == [
        "GPUDirect is not in use here: tensors on meta go through host memory"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_go_both_ways(tmp_path: Path) -> None:
    for handle in (aio_handle(), gds_handle()):
        tensor = some_bytes().cuda()
        assert handle.pwrite(tensor, tmp_path / "a.bin", True, False) == 1
        back = torch.zeros_like(tensor)
        assert handle.pread(back, tmp_path / "a.bin", True, True) == 0
        assert handle.wait() == 1
        assert torch.equal(back, tensor)


# --- programs

SCRIPT = """\
import argparse, os, sys, timeit
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder

arguments = argparse.ArgumentParser()
arguments.add_argument("--folder", required=True)
arguments.add_argument("--loop", type=int, default=3)
arguments.add_argument("--validate", action="store_true")
arguments = arguments.parse_args()
path = os.path.join(arguments.folder, "tensor.pt")

def store(tensor, handle, bounce):
    bounce.copy_(tensor)
    handle.async_pwrite(bounce, path)
    assert handle.wait() == 1

def load(handle, bounce):
    assert handle.sync_pread(bounce, path) == 1
    return bounce.clone()

if __name__ == "__main__":
    done = []
    for builder, name in ((AsyncIOBuilder, "aio_handle"), (GDSBuilder, "gds_handle")):
        assert builder().is_compatible(verbose=False) and builder.NAME in ("async_io", "gds")
        handle = getattr(builder().load(verbose=False), name)(1024**2, 128, True, True, 1)
        tensor = torch.randint(high=128, size=(1_000_000,), dtype=torch.uint8)
        bounce = handle.new_cpu_locked_tensor(tensor.numel(), torch.empty(0, dtype=torch.uint8))
        seconds = timeit.Timer(lambda: store(tensor, handle, bounce)).timeit(arguments.loop)
        assert os.path.getsize(path) == tensor.nbytes
        seconds = timeit.Timer(lambda: load(handle, bounce)).timeit(arguments.loop)
        if arguments.validate:
            with open(path, "rb") as file:
                same = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).equal(load(handle, bounce))
            print(f"Validation success = {same}")
        assert handle.free_cpu_locked_tensor(bounce)
        handle.pwrite(tensor, path, True, False)
        os.unlink(path)
"""


def test_a_program_for_deepnvme_runs_with_one_import_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "file_access.py"
    script.write_text(SCRIPT.replace("deepspeed.ops.op_builder", "fastpersist.integrations.deepnvme"))
    monkeypatch.setattr(sys, "argv", [str(script), "--folder", str(tmp_path), "--validate"])
    with no_leaks(tmp_path):
        runpy.run_path(str(script), run_name="__main__")
        gc.collect()
    assert capsys.readouterr().out == "Validation success = True\n" * 2


def test_builders_give_the_handles() -> None:
    assert AsyncIOBuilder().load().aio_handle is aio_handle
    assert GDSBuilder().load().gds_handle is gds_handle
    assert (AsyncIOBuilder.NAME, GDSBuilder.NAME) == ("async_io", "gds")
    assert GDSBuilder().is_compatible()
