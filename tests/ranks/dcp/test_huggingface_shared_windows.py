"""Tensors of many short runs, put together by all ranks in windows: whole, and nobody waits in vain."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import empty_disk_over
from support.runs import hidden_names
from support.safetensors_states import expect_files, save, save_on, state_of
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import fastpersist as fp
from fastpersist import _native
from fastpersist.dcp.huggingface import coordinator, shared_windows
from fastpersist.dcp.huggingface.crc_terms import crc_of_zeros
from fastpersist.dcp.huggingface.layout import Place
from fastpersist.dcp.huggingface.shared_windows import (
    SharedWindows,
    failure_told,
    make_windows,
    windowed,
    write_windows,
)
from fastpersist.distributed.peers import own_process
from fastpersist.integrations.torch_dcp import FastPersistHuggingFaceWriter, FastPersistSavePlanner
from fastpersist.transfer.tensor_file import TensorFile

torch.set_num_threads(1)

Box = tuple[tuple[int, ...], tuple[int, ...]]

OFFSET_BYTES = 4096 + 12


def chunk(name: str, shape: tuple[int, ...], box: Box) -> WriteItem:
    where = ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))
    data = TensorWriteData(where, TensorProperties(dtype=torch.int32), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(box[0])), WriteItemType.SHARD, tensor_data=data)


def grid(*cuts: tuple[int, ...]) -> list[Box]:
    """Return the boxes between cuts of each dimension."""
    sides = [list(itertools.pairwise(each)) for each in cuts]
    return [(tuple(low for low, _ in box), tuple(high - low for low, high in box)) for box in itertools.product(*sides)]


def make(
    path: Path, of_ranks: list[list[WriteItem]], *, processes: list[tuple[int, str, str]] | None = None
) -> SharedWindows:
    """Make windows for a tensor of this process's ranks, which are threads."""
    items = [own for own in of_ranks if own]
    size_bytes = items[0][0].tensor_data.size.numel() * 4  # type: ignore[union-attr]
    tensor = windowed("w", Place(0, OFFSET_BYTES, size_bytes, gathered=True), items)
    assert tensor is not None
    shared = make_windows(str(path), str(path), processes or [own_process()] * len(of_ranks), [tensor])
    assert shared is not None
    return shared


def as_rank(shared: SharedWindows, rank: int, items: list[WriteItem], whole: torch.Tensor) -> dict[str, int]:
    """Write what a rank has, its bytes in parts of any length."""

    def parts(item: WriteItem) -> Iterator[torch.Tensor]:
        box = item.tensor_data.chunk  # type: ignore[union-attr]
        slices = tuple(slice(low, low + length) for low, length in zip(box.offsets, box.sizes, strict=True))
        return iter(whole[slices].contiguous().view(-1).view(torch.uint8).split(52))

    def open_file(_number: int) -> TensorFile:
        return TensorFile(Path(shared.path).parent / "file", "r+")

    return write_windows(shared, rank, items, parts, open_file, durable=False)


@pytest.mark.parametrize(
    ("shape", "of_ranks"),
    [
        ((37, 10), [grid((0, 37), (0, 4)), grid((0, 37), (4, 10))]),
        ((37, 10), [grid((0, 37), (0, 4)), [], grid((0, 37), (4, 10))]),
        ((40, 6), [grid((0, 9, 40), (0, 3)), grid((0, 40), (3, 6))]),
        ((40, 6), [grid((0, 9), (0, 1)) + grid((9, 40), (3, 6)), grid((0, 9), (1, 6)) + grid((9, 40), (0, 3))]),
        ((1, 30, 4), [grid((0, 1), (0, 30), (2, 4)), grid((0, 1), (0, 30), (0, 2))]),
        ((9, 4, 5), [[box] for box in grid((0, 9), (0, 1, 4), (0, 3, 5))]),
    ],
)
@pytest.mark.parametrize("slot_count", [1, 32])
def test_windows_make_up_the_tensor_and_its_crc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], of_ranks: list[list[Box]], slot_count: int
) -> None:
    monkeypatch.setattr(shared_windows, "_WINDOW_BYTES", 120)
    monkeypatch.setattr(shared_windows, "_SLOT_COUNT_MAX", slot_count)
    whole = torch.arange(1, math.prod(shape) + 1, dtype=torch.int32).view(shape)
    items = [[chunk("w", shape, box) for box in own] for own in of_ranks]
    (tmp_path / "file").write_bytes(bytes(OFFSET_BYTES + whole.nbytes))
    shared = make(tmp_path, items)
    assert sum(tensor.window_count for tensor in shared.tensors) > 3
    terms: list[int] = []

    def run(rank: int) -> None:
        terms.append(as_rank(shared, rank, items[rank], whole).get("w", 0))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    data = whole.view(-1).view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "file").read_bytes()[OFFSET_BYTES:] == data
    crc = crc_of_zeros(len(data))
    for term in terms:
        crc ^= term
    assert crc == _native.crc32(data)


def test_a_slot_is_used_again_when_the_window_before_has_been_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_windows, "_SLOT_COUNT_MAX", 3)
    shared = make(tmp_path, COLUMNS)
    with shared_windows._Mapping(shared, 0) as first, shared_windows._Mapping(shared, 1) as second:
        for number in range(3, 9):
            assert [first.is_free(number - 1), first.is_free(number)] == [True, False]
            assert not second.is_whole(number - 3)
            first.has_put(number - 3)
            assert not second.is_whole(number - 3)
            second.has_put(number - 3)
            assert second.is_whole(number - 3)
            (second if number % 2 == 0 else first).has_written(number - 3)  # they take turns
            assert second.is_free(number)


COLUMNS = [[chunk("w", (50, 8), box)] for box in grid((0, 50), (0, 4, 8))]
WHOLE = torch.zeros(50, 8, dtype=torch.int32)


def test_a_rank_that_fails_is_told_to_those_that_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(OFFSET_BYTES + WHOLE.nbytes))
    shared = make(tmp_path, COLUMNS)
    with pytest.raises(ArithmeticError), failure_told(shared, 1):
        raise ArithmeticError
    with pytest.raises(fp.PeerError, match="rank 1 failed") as caught:
        as_rank(shared, 0, COLUMNS[0], WHOLE)
    assert caught.value.rank == 1


def test_a_rank_that_has_died_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_windows, "_LOOK_S", 0.01)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        begin = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        process = (child.pid, own_process()[1], begin)
    shared = make(tmp_path, COLUMNS, processes=[own_process(), process])
    with pytest.raises(fp.PeerError, match="rank 1 is gone"):
        as_rank(shared, 0, COLUMNS[0], WHOLE)


@pytest.mark.parametrize(
    ("limit", "said"), [("_COMES_S", "rank 1 has not come"), ("_SILENCE_S", "handed over anything")]
)
def test_a_rank_that_does_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, said: str
) -> None:
    monkeypatch.setattr(shared_windows, "_LOOK_S", 0.01)
    monkeypatch.setattr(shared_windows, limit, 0.05)
    with pytest.raises(fp.AgreementTimeoutError, match=said):
        as_rank(make(tmp_path, COLUMNS), 0, COLUMNS[0], WHOLE)


def test_a_rank_that_sees_another_file_system_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_windows, "_LOOK_S", 0.01)
    monkeypatch.setattr(shared_windows, "_COMES_S", 0.1)

    def work(rank: int, count: int) -> None:
        state = state_of("columns", count, 1)
        (tmp_path / "root").mkdir(exist_ok=True)
        dist.barrier()
        with empty_disk_over(tmp_path / "root") if rank else nullcontext():
            with pytest.raises(dcp.api.CheckpointException) as caught:
                save(tmp_path / "root" / "model", state)
        errors = {rank: type(error) for rank, (error, _) in caught.value.failures.items()}
        assert errors == {0: fp.AgreementTimeoutError, 1: fp.UnsupportedError}

    run_ranks(2, work)
    assert not (tmp_path / "root" / "model").exists()


def test_where_mapped_memory_is_not_sure_to_be_had_there_are_no_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(0, 0, WHOLE.nbytes, gathered=True)
    tensor = windowed("w", place, COLUMNS)
    assert tensor is not None
    own = own_process()
    elsewhere = (own[0], "another namespace", own[2])
    for processes in ([own], [own, None], [own, elsewhere], [own, (own[0], "", "")]):
        assert make_windows(str(tmp_path), str(tmp_path), processes, [tensor]) is None
    assert make_windows(str(tmp_path), str(tmp_path), [own, own], []) is None
    monkeypatch.setattr(shared_windows, "filesystem_type_name", lambda _: "btrfs")
    assert make_windows(str(tmp_path), str(tmp_path), [own, own], [tensor]) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("shape", "of_ranks"),
    [
        ((50, 8), [grid((0, 50), (0, 4, 8))]),  # one rank has both columns, of the same rows
        ((2, 3 << 20), [grid((0, 2), (0, 5)), grid((0, 2), (5, 3 << 20))]),  # a row is larger than a window
        ((1, 1), [grid((0, 1), (0, 1))]),
    ],
)
def test_what_cannot_go_by_in_rows_goes_another_way(shape: tuple[int, ...], of_ranks: list[list[Box]]) -> None:
    items = [[chunk("w", shape, box) for box in own] for own in of_ranks]
    assert windowed("w", Place(0, 0, 4 * math.prod(shape), gathered=True), items) is None


# --- in a save


def test_columns_of_ranks_on_one_machine_leave_nothing_to_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_scratch(*_: Any) -> None:
        raise AssertionError("something was left for the first rank")

    monkeypatch.setattr(coordinator._Left, "read", no_scratch)
    save_on(2, tmp_path / "model", 4, "columns")
    expect_files(tmp_path / "model", 4)
    assert sorted(os.listdir(tmp_path / "model")) == ["MANIFEST.json", "model.safetensors"]


class FailingPlanner(FastPersistSavePlanner):
    """Calls something when a tensor of many short runs is asked for."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "long":
            self._call()
        return super().resolve_data(write_item)


def fail() -> None:
    raise ArithmeticError("no data")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_between_windows_fails_the_others_and_leaves_the_older_model(
    tmp_path: Path, victim: int
) -> None:
    path = tmp_path / "model"

    def work(rank: int, count: int) -> None:
        save(path, state_of("columns", count, 1))
        writer = FastPersistHuggingFaceWriter(path)
        state = state_of("columns", count, 2)
        planner = FailingPlanner(fail) if rank == victim else FastPersistSavePlanner()
        with pytest.raises(dcp.api.CheckpointException) as caught:
            dcp.save(state, storage_writer=writer, planner=planner)
        errors = {rank: error for rank, (error, _) in caught.value.failures.items()}
        assert isinstance(errors.pop(victim), ArithmeticError)
        assert {rank: type(error) for rank, error in errors.items()} == {1 - victim: fp.PeerError}
        dist.barrier()
        if rank == 0:
            expect_files(path, 1)
        dist.barrier()
        dcp.save(state, storage_writer=writer, planner=FastPersistSavePlanner())

    run_ranks(2, work)
    expect_files(path, 2)
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_between_windows_leaves_the_older_model(tmp_path: Path, victim: int) -> None:
    path = tmp_path / "model"
    save_on(2, path, 1)

    def work(rank: int, count: int) -> None:
        state = state_of("columns", count, 2)
        planner = FailingPlanner(kill) if rank == victim else FastPersistSavePlanner()
        dcp.save(state, storage_writer=FastPersistHuggingFaceWriter(path), planner=planner)

    began_s = time.monotonic()
    endings = rank_endings(2, work, group_timeout_s=5)
    assert endings[victim].signal == 9
    assert endings[1 - victim].error_type is not None
    assert time.monotonic() - began_s < 60
    expect_files(path, 1)
    save_on(2, path, 3)
    assert hidden_names(tmp_path) == []
    expect_files(path, 3)
