"""HuggingFace checkpoints from sharded state, when something is wrong: nothing is half there, and it is said why."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.dcp_states import failure_of, raised_by
from support.filesystems import FullAtSync, FullFor
from support.process_groups import rank_endings, run_ranks
from support.rank_faults import Point, empty_disk_over, kill_this_process, watched
from support.runs import hidden_names
from support.safetensors_states import expect_files, expect_on, save, save_on, state_of
from support.sameness import assert_same
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

import fastpersist as fp
from fastpersist import _native
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.dcp.huggingface import layout as huggingface_layout
from fastpersist.dcp.huggingface import model_part
from fastpersist.dcp.huggingface import storage_writer as huggingface_writer
from fastpersist.dcp.huggingface.layout import plan_model, without_duplicates
from fastpersist.integrations.torch_dcp import (
    FastPersistHuggingFaceReader,
    FastPersistHuggingFaceWriter,
    FastPersistSavePlanner,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

torch.set_num_threads(1)

SMALL = {"a": torch.arange(100.0), "b": torch.ones(3, 5)}


# --- saves


@pytest.mark.parametrize("sys_errno", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_write_leaves_the_older_model(tmp_path: Path, victim: int, sys_errno: int) -> None:
    path = tmp_path / "model"

    def work(rank: int, count: int) -> None:
        save(path, state_of("rows", count, 1))
        writer = FastPersistHuggingFaceWriter(path, engine="fault:threads")
        if rank == victim:
            _native.set_fault_plan(_native.FaultPlan(op="write", nth=2, sys_errno=sys_errno))
        state = state_of("rows", count, 2)
        errors = raised_by(lambda: dcp.save(state, storage_writer=writer, planner=FastPersistSavePlanner()))
        assert list(errors) == [victim]
        assert isinstance(errors[victim], fp.NoSpaceError if sys_errno == errno.ENOSPC else fp.StorageError)
        assert f"rank {victim}: " in str(errors[victim])
        assert str(path) in str(errors[victim])
        assert ".pending-" not in str(errors[victim])
        _native.clear_fault_plan()
        dist.barrier()
        if rank == 0:
            expect_files(path, 1)
        dist.barrier()
        dcp.save(state, storage_writer=writer, planner=FastPersistSavePlanner())

    run_ranks(2, work, environment={"FASTPERSIST_ALLOW_FAULTS": "1"})
    expect_files(path, 2)
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_whichever_request_fails_nothing_is_published_and_the_next_save_works(tmp_path: Path, layout: str) -> None:
    """The 1st, the 2nd, … write of rank 0, until none is left to fail."""
    path = tmp_path / "model"

    def work(rank: int, count: int) -> int:
        writer = FastPersistHuggingFaceWriter(path, engine="fault:threads")
        failed_count = 0
        while True:
            if rank == 0:
                _native.set_fault_plan(_native.FaultPlan(op="write", nth=failed_count + 1, sys_errno=errno.EIO))
            state = {name: value for name, value in state_of(layout, count, 1).items() if "layers" in name}
            failed = None
            try:
                dcp.save(state, storage_writer=writer, planner=FastPersistSavePlanner())
            except dcp.api.CheckpointException as error:
                failed = error.failures
            _native.clear_fault_plan()
            if failed is None:
                return failed_count
            errors = {rank: error for rank, (error, _) in failed.items()}
            assert isinstance(errors.pop(0), fp.StorageError)
            assert all(isinstance(error, fp.PeerError) and error.rank == 0 for error in errors.values()), errors
            assert not path.exists()
            failed_count += 1
            dist.barrier()

    assert run_ranks(2, work)[0] > 3
    assert fp.verify(path).ok
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize(("victim", "name"), [(0, "create"), (0, "sync"), (1, "sync"), (1, "create")])
def test_a_rank_that_is_killed_leaves_the_older_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, name: str
) -> None:
    path = tmp_path / "model"
    save_on(2, path, 1)
    monkeypatch.setattr(huggingface_writer, "make_windows", lambda *_: None)

    def work(rank: int, count: int) -> None:
        state = state_of("columns", count, 2)
        dist.barrier()
        with watched(Point(name, 1) if rank == victim else None, kill_this_process):
            save(path, state)

    endings = rank_endings(2, work, group_timeout_s=5)
    assert endings[victim].signal == 9
    assert endings[1 - victim].error_type is not None
    expect_files(path, 1)
    save_on(2, path, 3)
    assert hidden_names(tmp_path) == []
    expect_files(path, 3)


def test_rank_0_killed_at_any_point_of_publishing_leaves_one_of_the_two(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_on(2, path, 1)

    def work(rank: int, count: int, point: Point) -> None:
        state = state_of("rows", count, 1)
        with watched(point if rank == 0 else None, kill_this_process):
            save(path, state)

    for name in ("unlink", "exchange", "sync_directory"):
        endings = rank_endings(2, work, Point(name, 1), group_timeout_s=5)
        assert endings[0].signal == 9
        expect_files(path, 1)


def test_a_rank_with_another_file_system_is_told_so(tmp_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        state = state_of("rows", count, 1)
        (tmp_path / "root").mkdir(exist_ok=True)
        dist.barrier()
        if rank == 0:
            errors = raised_by(lambda: save(tmp_path / "root" / "model", state))
        else:
            with empty_disk_over(tmp_path / "root"):
                errors = raised_by(lambda: save(tmp_path / "root" / "model", state))
        assert list(errors) == [1]
        assert isinstance(errors[1], fp.UnsupportedError)
        assert "one file system" in str(errors[1])

    run_ranks(2, work)
    assert not (tmp_path / "root" / "model").exists()


def test_what_a_rank_has_left_and_somebody_deletes_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_layout, "_RUN_BYTES_MIN", 1 << 30)
    monkeypatch.setattr(huggingface_writer, "make_windows", lambda *_: None)
    original = model_part.write_model_part

    def deleting(part: Any, *arguments: Any, **options: Any) -> Any:
        results = original(part, *arguments, **options)
        if part.rank == 1:
            os.unlink(part.scratch_path)
        return results

    monkeypatch.setattr("fastpersist.dcp.huggingface.storage_writer.write_model_part", deleting)

    def work(_rank: int, count: int) -> None:
        errors = raised_by(lambda: save(tmp_path / "model", state_of("columns", count, 1)))
        assert list(errors) == [0]
        assert isinstance(errors[0], fp.StorageError)
        assert "for-first-rank-00001" in str(errors[0])

    run_ranks(2, work)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (7, "is no tensor"),
        ("text", "is no tensor"),
        (torch.zeros(2, dtype=torch.complex128), "no dtype for torch.complex128"),
    ],
)
def test_what_safetensors_cannot_hold_is_named(tmp_path: Path, value: Any, said: str) -> None:
    error = failure_of(lambda: save(tmp_path / "model", {"good": torch.ones(1), "odd one": value}))
    assert isinstance(error, fp.ConfigError)
    assert "'odd one'" in str(error)
    assert said in str(error)
    assert os.listdir(tmp_path) == []


class Tagged(torch.Tensor):
    """A subclass."""


def test_tensors_of_a_subclass_are_refused(tmp_path: Path) -> None:
    error = failure_of(lambda: save(tmp_path / "model", {"tagged": torch.ones(3).as_subclass(Tagged)}))
    assert isinstance(error, fp.UnsupportedError)
    assert "'tagged' is a Tagged" in str(error)
    assert not (tmp_path / "model").exists()


def item(name: str, size: tuple[int, ...], start: tuple[int, ...], lengths: tuple[int, ...], dtype: Any) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(lengths))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
    return WriteItem(MetadataIndex(name, torch.Size(start)), WriteItemType.SHARD, tensor_data=data)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (item("w", (4, 2), (2, 0), (1, 2), torch.float32), "has 8 elements, and the ranks together plan to write 6"),
        (item("w", (4, 2), (1, 0), (3, 2), torch.float32), "plan to write 10"),
        (item("w", (4, 2), (2, 0), (2, 2), torch.float16), "not the same on all ranks: torch.float32"),
        (item("w", (5, 2), (2, 0), (2, 2), torch.float32), r"shape \(5, 2\)"),
    ],
)
def test_plans_that_do_not_make_a_whole_name_the_tensor(second: WriteItem, said: str) -> None:
    first = item("w", (4, 2), (0, 0), (2, 2), torch.float32)
    plans = without_duplicates([SavePlan([first]), SavePlan([second])])
    with pytest.raises(fp.ConfigError, match=f"'w' .*{said}"):
        plan_model(plans, [], max_shard_bytes=1000, indices=None, metadata={}, unit_bytes=1)


def test_a_planner_that_gives_another_shape_is_refused(tmp_path: Path) -> None:
    class Growing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item).repeat(2)

    writer = FastPersistHuggingFaceWriter(tmp_path / "model")
    error = failure_of(lambda: dcp.save({"a": torch.ones(3)}, storage_writer=writer, planner=Growing()))
    assert isinstance(error, fp.UnsupportedError)
    assert "'a' is planned with shape (3,)" in str(error)


def test_a_model_of_which_a_planner_leaves_something_out_is_not_published(tmp_path: Path) -> None:
    class Forgetful(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return dataclasses.replace(super().finish_plan(new_plan), items=new_plan.items[:-1])

    writer = FastPersistHuggingFaceWriter(tmp_path / "model")
    error = failure_of(lambda: dcp.save(SMALL, storage_writer=writer, planner=Forgetful()))
    assert isinstance(error, fp.ConfigError)
    assert "rank 0 was to write a chunk of 'b' and has not" in str(error)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    writer = FastPersistHuggingFaceWriter(tmp_path / "model")
    with using(FullFor()):
        error = failure_of(lambda: dcp.save(SMALL, storage_writer=writer))
    assert isinstance(error, fp.NoSpaceError)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("full", [FullFor(), FullAtSync("")], ids=["planning", "writing"])
def test_a_failed_save_keeps_no_plans_in_memory(tmp_path: Path, full: Filesystem) -> None:
    writer = FastPersistHuggingFaceWriter(tmp_path / "model")
    with using(full):
        assert isinstance(failure_of(lambda: dcp.save(SMALL, storage_writer=writer)), fp.NoSpaceError)
    assert not any(isinstance(kept, huggingface_writer._Begun) for kept in vars(writer).values())
    dcp.save(SMALL, storage_writer=writer)
    assert_same(load_file(tmp_path / "model" / "model.safetensors"), SMALL)


def test_kept_plans_need_our_planner_and_the_same_writer(tmp_path: Path) -> None:
    def save_with(planner: Any, writer: Any) -> None:
        dcp.save(SMALL, storage_writer=writer, planner=planner(enable_plan_caching=True))

    for kept in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, kept).clear()
    for planner in (FastPersistSavePlanner, DefaultSavePlanner):
        save_with(planner, FastPersistHuggingFaceWriter(tmp_path / "model"))
        error = failure_of(lambda: save_with(planner, FastPersistHuggingFaceWriter(tmp_path / "model")))  # noqa: B023
        assert isinstance(error, fp.ConfigError)
        assert "use one FastPersistHuggingFaceWriter for all saves" in str(error)
    writer = FastPersistHuggingFaceWriter(tmp_path / "model")
    for kept in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, kept).clear()
    save_with(DefaultSavePlanner, writer)
    assert "pass a FastPersistSavePlanner" in str(failure_of(lambda: save_with(DefaultSavePlanner, writer)))


def test_without_a_path_it_is_said_how_to_give_one() -> None:
    assert "checkpoint_id" in str(failure_of(lambda: save(None, SMALL)))  # type: ignore[arg-type]
    reader = FastPersistHuggingFaceReader()
    assert "checkpoint_id" in str(failure_of(lambda: dcp.load(dict(SMALL), storage_reader=reader)))


@pytest.mark.parametrize("make", [FastPersistHuggingFaceWriter, FastPersistHuggingFaceReader])
def test_unknown_engines_are_refused_at_once(make: Any) -> None:
    with pytest.raises(fp.ConfigError, match="no engine 'warp'"):
        make("model", engine="warp")


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="this torch has no use_collectives="
)
def test_ranks_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        writer = FastPersistHuggingFaceWriter(tmp_path / "model")
        with pytest.raises(fp.UnsupportedError, match="use_collectives=True"):
            dcp.save(state_of("rows", count, 1), storage_writer=writer, use_collectives=False)

    run_ranks(2, work)
    assert os.listdir(tmp_path) == []


# --- loads


def load_error(path: Path, like: dict[str, torch.Tensor] | None = None) -> BaseException:
    target = {name: torch.zeros_like(tensor) for name, tensor in (like or SMALL).items()}
    return failure_of(lambda: dcp.load(target, storage_reader=FastPersistHuggingFaceReader(path)))


def metadata_error(path: Path, like: dict[str, torch.Tensor] | None = None) -> fp.FastPersistError:
    """Return what the reader says of a directory, which is what dcp.load says, in words of its own."""
    with pytest.raises(fp.FastPersistError) as caught:
        FastPersistHuggingFaceReader(path).read_metadata()
    assert str(caught.value) in str(load_error(path, like))
    return caught.value


@pytest.fixture
def split_model(tmp_path: Path) -> Path:
    """A model in two files, "a" in the first and "b" in the second."""
    save(tmp_path / "model", SMALL, fqn_to_index_mapping={"a": 1, "b": 2})
    return tmp_path / "model"


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("kind", ["missing", "empty", "a file"])
def test_what_is_no_model_is_not_found(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    if kind == "empty":
        path.mkdir()
    if kind == "a file":
        path.write_text("words")
    error = metadata_error(path)
    assert isinstance(error, fp.CheckpointNotFoundError)
    assert f"no HuggingFace checkpoint at {path}" in str(error)


def test_a_missing_file_is_named(split_model: Path) -> None:
    (split_model / SECOND).unlink()
    error = metadata_error(split_model)
    assert isinstance(error, fp.CheckpointNotFoundError)
    assert f"{SECOND} is missing" in str(error)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: bytes(8) + data[8:],
        lambda data: (1 << 60).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data.replace(b'"F32"', b'"F99"'),
    ],
    ids=["empty", "no header", "endless header", "no JSON", "cut off", "longer", "unknown dtype"],
)
def test_a_damaged_header_is_said_to_be_damaged(split_model: Path, damage: Callable[[bytes], bytes]) -> None:
    file = split_model / SECOND
    file.write_bytes(damage(file.read_bytes()))
    error = metadata_error(split_model)
    assert isinstance(error, fp.FormatError)
    assert SECOND in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": {"a": 5}}',
        "[" * 100_000,
    ],
    ids=["empty", "list", "no map", "map is a list", "outside", "number", "deep"],
)
def test_a_damaged_index_is_said_to_be_damaged(split_model: Path, text: str) -> None:
    (split_model / "model.safetensors.index.json").write_text(text)
    error = metadata_error(split_model)
    assert isinstance(error, fp.FormatError | fp.CheckpointNotFoundError)
    assert "index.json" in str(error)


def test_an_index_that_contradicts_the_files_is_refused(split_model: Path) -> None:
    index = split_model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": FIRST, "b": FIRST}}))
    error = metadata_error(split_model)
    assert isinstance(error, fp.FormatError)
    assert f"says that 'b' is in {FIRST}, and it is not" in str(error)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file(SMALL, tmp_path / f"{name}.safetensors")
    error = metadata_error(tmp_path)
    assert isinstance(error, fp.FormatError)
    assert "is in two files, one.safetensors and two.safetensors" in str(error)


def test_dtypes_that_torch_does_not_have_are_named(tmp_path: Path) -> None:
    header = json.dumps({"six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"xyz")
    error = metadata_error(tmp_path)
    assert isinstance(error, fp.UnsupportedError)
    assert "'six' has dtype F6_E2M3" in str(error)


@pytest.mark.parametrize(
    "said", ["words", "{}", '{"a": {"saved_offsets": [-1]}}', '{"a": {"saved_offsets": [0, 0]}}', '{"a": 5}']
)
def test_damaged_offsets_of_parts_are_refused(tmp_path: Path, said: str) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "part.safetensors", metadata={"DCP_SHARDING_INFO": said})
    error = metadata_error(tmp_path, {"a": torch.ones(3)})
    assert isinstance(error, fp.FormatError)
    assert "DCP_SHARDING_INFO" in str(error)


def test_changed_bytes_are_found_in_tensors_that_are_read_as_a_whole(split_model: Path) -> None:
    file = split_model / FIRST
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    error = load_error(split_model)
    assert isinstance(error, fp.ChecksumError)
    assert "'a'" in str(error)
    assert FIRST in str(error)
    target = {name: torch.zeros_like(tensor) for name, tensor in SMALL.items()}
    dcp.load(target, storage_reader=FastPersistHuggingFaceReader(split_model, verify=False))
    assert torch.equal(target["b"], SMALL["b"])


def test_keys_that_are_not_there_are_named_and_others_are_left_out(split_model: Path) -> None:
    assert "more" in str(load_error(split_model, {**SMALL, "more": torch.zeros(1)}))
    target = {"b": torch.zeros(3, 5)}
    dcp.load(target, storage_reader=FastPersistHuggingFaceReader(split_model))
    assert torch.equal(target["b"], SMALL["b"])


def test_a_tensor_of_another_shape_is_named(split_model: Path) -> None:
    error = load_error(split_model, {"a": torch.zeros(7)})
    assert "a" in str(error)
    assert "100" in str(error)


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_a_model_that_is_replaced_while_it_is_loaded_is_not_mixed_with_the_new_one(
    split_model: Path, what: str
) -> None:
    class Late(FastPersistHuggingFaceReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            (split_model / SECOND).unlink()
            if what == "replaced":
                save(split_model, SMALL, fqn_to_index_mapping={"a": 1, "b": 2})
            return super().read_data(plan, planner)

    target = {name: torch.zeros_like(tensor) for name, tensor in SMALL.items()}
    error = failure_of(lambda: dcp.load(target, storage_reader=Late(split_model)))
    assert isinstance(error, fp.CheckpointNotFoundError)


def test_every_rank_hears_of_damage_that_one_has_read(tmp_path: Path) -> None:
    save_on(2, tmp_path / "model", 1)
    file = tmp_path / "model" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)

    def work(_rank: int, count: int) -> None:
        state = state_of("rows", count, None)
        reader = FastPersistHuggingFaceReader(tmp_path / "model")
        errors = raised_by(lambda: dcp.load(state, storage_reader=reader))
        assert list(errors) == [0, 1]
        assert all("model.safetensors: the tensors end at" in str(error) for error in errors.values())

    run_ranks(2, work)
    save_on(1, tmp_path / "model", 1)
    expect_on(2, tmp_path / "model", 1, "columns")
