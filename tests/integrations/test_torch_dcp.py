"""DCP in one process: ours and torch's own writer and reader read each other."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.dcp_states import (
    IGNORED,
    PART,
    WRITERS,
    blank,
    failure_of,
    has_use_collectives,
    load,
    loaded,
    make_state,
    place_of,
    portrait,
    save,
)
from support.rank_faults import watched
from support.runs import hidden_names
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.multiprocessing.reductions import StorageWeakRef

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.dcp import part_reader
from fastpersist.dcp.part_reader import PartReader, Wanted
from fastpersist.dcp.save_planner import cut_replicas
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistSavePlanner, FastPersistWriter
from fastpersist.transfer import reader, writer

pytestmark = [pytest.mark.filterwarnings(one) for one in IGNORED]

torch.set_num_threads(1)


# --- who reads whom


@pytest.mark.parametrize("reader", [FastPersistReader, dcp.FileSystemReader], ids=["ours", "torch's"])
@pytest.mark.parametrize("writer", WRITERS)
def test_each_reader_reads_each_writer(tmp_path: Path, writer: str, reader: Any) -> None:
    state = make_state()
    dcp.save(state, storage_writer=WRITERS[writer](tmp_path / "checkpoint"))
    assert loaded(tmp_path / "checkpoint", reader, state) == portrait(state)


def test_blobs_are_what_torch_save_writes_and_zipfile_finds_no_error_in(tmp_path: Path) -> None:
    state = {name: value for name, value in make_state().items() if isinstance(value, torch.Tensor)}
    save(state, tmp_path / "checkpoint")
    data = (tmp_path / "checkpoint" / PART).read_bytes()
    metadata = FastPersistReader(tmp_path / "checkpoint").read_metadata()
    assert len(metadata.storage_data) == len(state)
    for index, info in metadata.storage_data.items():
        blob = data[info.offset : info.offset + info.length]
        assert zipfile.ZipFile(io.BytesIO(blob)).testzip() is None
        found = torch.load(io.BytesIO(blob), weights_only=True)
        assert portrait(found) == portrait(state[index.fqn])
        assert found.untyped_storage().nbytes() == found.nbytes  # and nothing else of what it was a view of
        if found.nbytes >= 1 << 16:
            start = zipfile.ZipFile(io.BytesIO(blob)).getinfo("archive/data/0")
            stored = data.index(bytes(found.reshape(-1).view(torch.uint8).numpy()), info.offset + start.header_offset)
            assert stored % 4096 == info.offset % 4096 == 0


class Tagged(torch.Tensor):
    """A subclass, which the pickle names."""


@pytest.mark.parametrize("reader", [FastPersistReader, dcp.FileSystemReader], ids=["ours", "torch's"])
def test_tensors_of_a_subclass_go_through_torch_save(tmp_path: Path, reader: Any) -> None:
    state = {"tagged": torch.randn(3, 50)[1:, :7].as_subclass(Tagged), "plain": torch.arange(5)}
    save(state, tmp_path / "checkpoint")
    place = place_of(tmp_path / "checkpoint", "tagged")
    blob = (tmp_path / "checkpoint" / PART).read_bytes()[place.offset : place.offset + place.length]
    with torch.serialization.safe_globals([Tagged]):
        found = torch.load(io.BytesIO(blob))
        assert type(found) is Tagged
        assert found.untyped_storage().nbytes() == found.nbytes
        assert loaded(tmp_path / "checkpoint", reader, state) == portrait(state)


def test_sparse_tensors_go_through_torch_load(tmp_path: Path) -> None:
    """Which DCP does not need: its planners fill a copy of a sparse target."""
    sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
    save({"sparse": sparse}, tmp_path / "checkpoint")
    place = place_of(tmp_path / "checkpoint", "sparse")
    target = torch.zeros(2, 2).to_sparse()
    stored = (torch.float32, (2, 2))
    wanted = Wanted("sparse", place.offset, place.length, stored, (0, 0), (2, 2), target, lambda _: None)
    with PartReader(str(tmp_path / "checkpoint"), PART, engine="auto", verify=True) as reader:
        reader.read([wanted])
    assert torch.equal(target.to_dense(), sparse.to_dense())


def test_tensors_of_a_device_are_copied_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the device, and what is read and written goes through the copies that a device needs."""
    for side in (writer, reader):
        monkeypatch.setattr(side, "is_host_memory", lambda _: False)
    state = make_state()
    save(state, tmp_path / "checkpoint")
    assert portrait(load(tmp_path / "checkpoint", state)) == portrait(state)
    assert loaded(tmp_path / "checkpoint", dcp.FileSystemReader, state) == portrait(state)


def test_targets_of_another_dtype_or_order_are_filled(tmp_path: Path) -> None:
    state = {"a": torch.randn(64, 48), "b": torch.randn(1000)}
    save(state, tmp_path / "checkpoint")
    target = {"a": torch.zeros(48, 64).t(), "b": torch.zeros(1000, dtype=torch.float64)}
    dcp.load(target, storage_reader=FastPersistReader(tmp_path / "checkpoint"))
    assert torch.equal(target["a"], state["a"])
    assert torch.equal(target["b"], state["b"].double())


def test_models_and_optimizers_come_back_through_get_and_set_state_dict(tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(steps)
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (steps + 1))
        for _ in range(steps):
            model(torch.randn(3, 20)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    first, other = trained(3), trained(1)
    expected = portrait(state_of(*first))
    dcp.save(state_of(*first), storage_writer=FastPersistWriter(tmp_path / "checkpoint"))
    target = state_of(*other)
    dcp.load(target, storage_reader=FastPersistReader(tmp_path / "checkpoint"))
    set_state_dict(*other, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    assert portrait(state_of(*other)) == expected


def test_the_path_may_come_as_checkpoint_id_and_writers_may_be_used_again(tmp_path: Path) -> None:
    writer, reader = FastPersistWriter(), FastPersistReader()
    for seed in (1, 2):
        path = tmp_path / "deep" / str(seed)
        dcp.save(make_state(seed), checkpoint_id=path, storage_writer=writer)
        target = blank(make_state())
        dcp.load(target, checkpoint_id=path, storage_reader=reader)
        assert portrait(target) == portrait(make_state(seed))
    metadata = reader.read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == os.fspath(path)


def test_without_a_path_it_is_said_how_to_give_one(tmp_path: Path) -> None:
    assert "checkpoint_id" in str(failure_of(lambda: dcp.save({}, storage_writer=FastPersistWriter())))
    assert "checkpoint_id" in str(failure_of(lambda: dcp.load({"a": 1}, storage_reader=FastPersistReader())))


@pytest.mark.parametrize("make", [FastPersistWriter, FastPersistReader])
def test_unknown_engines_are_refused_at_once(make: Any) -> None:
    with pytest.raises(fp.ConfigError, match="no engine 'warp'"):
        make("checkpoint", engine="warp")


@has_use_collectives
def test_one_process_may_do_without_collectives(tmp_path: Path) -> None:
    state = make_state()
    writer = FastPersistWriter(tmp_path / "checkpoint")
    dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
    assert portrait(load(tmp_path / "checkpoint", state)) == portrait(state)


@has_use_collectives
def test_what_torch_wrote_without_collectives_is_read(tmp_path: Path) -> None:
    state = {"a": torch.randn(10), "b": "text"}
    writer = dcp.FileSystemWriter(tmp_path / "checkpoint")
    dcp.save(state, storage_writer=writer, no_dist=True, use_collectives=False)
    assert (tmp_path / "checkpoint" / "__0.metadata").exists()
    assert portrait(load(tmp_path / "checkpoint", state)) == portrait(state)


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state = {"a": torch.arange(1 << 16), "b": torch.ones(3)}
        expected = portrait(state)
        future = dcp.async_save(state, storage_writer=FastPersistWriter(tmp_path / "checkpoint"))
        state["a"].zero_()
        future.result()
    finally:
        dist.destroy_process_group()
    assert portrait(load(tmp_path / "checkpoint", state)) == expected


# --- the directory


def test_a_checkpoint_has_a_manifest_that_verifies(tmp_path: Path) -> None:
    save(make_state(), tmp_path / "checkpoint")
    report = fp.verify(tmp_path / "checkpoint")
    assert report.ok
    assert report.has_checksums
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [".metadata", "MANIFEST.json", PART]
    assert hidden_names(tmp_path) == []


def test_parts_are_not_read_again_for_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def adopted(*_: Any) -> None:
        raise AssertionError("it reads what was written")

    monkeypatch.setattr("fastpersist.saving.directory_files.DirectoryFiles._read", adopted)
    save(make_state(), tmp_path / "checkpoint")
    assert fp.verify(tmp_path / "checkpoint").ok


@pytest.mark.parametrize("durable", [True, False])
def test_every_file_is_synced_unless_that_is_not_wanted(tmp_path: Path, durable: bool) -> None:
    with watched() as counts:
        save(make_state(), tmp_path / "checkpoint", durable=durable)
    assert counts["sync"] >= 3 if durable else not counts["sync"]
    assert portrait(load(tmp_path / "checkpoint", make_state())) == portrait(make_state())


def test_space_is_reserved_before_anything_is_written(tmp_path: Path) -> None:
    reserved = []

    class Noted(Filesystem):
        def allocate(self, fd: int, size_bytes: int, path: str) -> None:
            reserved.append(size_bytes)
            super().allocate(fd, size_bytes, path)

    with using(Noted()):
        save({"a": torch.ones(1 << 20), "b": torch.ones(5)}, tmp_path / "checkpoint")
    part_bytes = (tmp_path / "checkpoint" / PART).stat().st_size
    assert part_bytes <= reserved[0] <= part_bytes + (1 << 16)


def test_what_a_planner_makes_is_let_go_before_it_makes_more(tmp_path: Path) -> None:
    made: list[StorageWeakRef] = []
    alive_counts = []

    class Converting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            alive_counts.append(sum(not one.expired() for one in made))
            doubled = super().resolve_data(write_item) * 2
            made.append(StorageWeakRef(doubled.untyped_storage()))
            return doubled

    state = {str(number): torch.full((1 << 21,), float(number)) for number in range(6)}
    dcp.save(state, storage_writer=FastPersistWriter(tmp_path / "checkpoint"), planner=Converting())
    assert max(alive_counts) <= 1
    assert load(tmp_path / "checkpoint", state)["5"][0] == 10


def test_writers_readers_and_planners_go_to_other_processes(tmp_path: Path) -> None:
    """As async_save with processes has it."""
    state = make_state()
    writer, reader, planner = pickle.loads(
        pickle.dumps((FastPersistWriter(tmp_path / "c"), FastPersistReader(tmp_path / "c"), FastPersistSavePlanner()))
    )
    dcp.save(state, storage_writer=writer, planner=planner)
    target = blank(state)
    dcp.load(target, storage_reader=reader)
    assert portrait(target) == portrait(state)


@pytest.mark.parametrize("before", ["ours", "torch's with 2 threads"])
def test_a_save_replaces_an_older_checkpoint_as_a_whole(tmp_path: Path, before: str) -> None:
    path = tmp_path / "checkpoint"
    dcp.save(make_state(), storage_writer=WRITERS[before](path))
    (path / "__7_0.distcp").write_bytes(b"of a rank that there is no more")
    save(make_state(2), path)
    assert sorted(os.listdir(path)) == [".metadata", "MANIFEST.json", PART]
    assert portrait(load(path, make_state())) == portrait(make_state(2))
    assert hidden_names(tmp_path) == []


def test_without_overwrite_the_older_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(make_state(), path)
    error = failure_of(lambda: save(make_state(2), path, overwrite=False))
    assert isinstance(error, fp.ConfigError)
    assert portrait(load(path, make_state())) == portrait(make_state())


def test_what_is_in_a_directory_that_is_no_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter").write_text("one")
    save({"a": torch.ones(3)}, path)
    assert sorted(os.listdir(path)) == [".metadata", "MANIFEST.json", PART, "chapter"]
    assert (path / "chapter").read_text() == "one"
    assert load(path, {"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]


# --- parts of tensors


BOXES = [
    ((), (), ()),
    ((10,), (2,), (5,)),
    ((10,), (2,), (0,)),
    ((6, 8), (1, 0), (3, 8)),
    ((6, 8), (1, 2), (3, 4)),
    ((6, 8), (2, 3), (1, 4)),
    ((5, 4, 8), (1, 1, 0), (2, 3, 8)),
    ((5, 4, 8), (0, 1, 2), (5, 2, 3)),
    ((4, 1, 6), (1, 0, 0), (2, 1, 5)),
    ((64, 2, 3000), (3, 0, 500), (20, 2, 2000)),
    ((2000, 40), (7, 1), (1900, 3)),
]


@pytest.mark.parametrize("writer", ["ours", "torch's"])
@pytest.mark.parametrize("temporary_bytes", [64 << 20, 100], ids=["roomy", "narrow"])
@pytest.mark.parametrize("transposed", [False, True], ids=["straight", "transposed"])
def test_any_box_of_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, temporary_bytes: int, transposed: bool
) -> None:
    monkeypatch.setattr(part_reader, "_TEMPORARY_BYTES", temporary_bytes)
    tensors = {str(number): torch.randn(shape) for number, (shape, _, _) in enumerate(BOXES)}
    dcp.save(tensors, storage_writer=WRITERS[writer](tmp_path / "checkpoint"))
    wanted, targets, done = [], [], []
    for number, (shape, offsets, lengths) in enumerate(BOXES):
        place = place_of(tmp_path / "checkpoint", str(number))
        target = (
            torch.zeros(lengths[::-1]).permute(list(range(len(shape)))[::-1]) if transposed else torch.zeros(lengths)
        )
        targets.append(target)
        stored = (torch.float32, shape)
        take = [lambda _, number=number: done.append(number)][0]
        wanted.append(Wanted(str(number), place.offset, place.length, stored, offsets, lengths, target, take))
    with PartReader(str(tmp_path / "checkpoint"), PART, engine="auto", verify=True) as reader:
        reader.read(wanted)
    assert sorted(done) == list(range(len(BOXES)))
    for number, (_, offsets, lengths) in enumerate(BOXES):
        box = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
        assert torch.equal(targets[number], tensors[str(number)][box])


@pytest.mark.parametrize(("offsets", "lengths"), [((100, 0), (8, 1024)), ((0, 512), (1 << 12, 512))])
def test_only_what_is_wanted_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offsets: tuple[int, int], lengths: tuple[int, int]
) -> None:
    rows, columns = 1 << 12, 1 << 10
    save({"a": torch.arange(rows * columns).reshape(rows, columns)}, tmp_path / "checkpoint")
    place = place_of(tmp_path / "checkpoint", "a")
    read_bytes = []
    transfer = PartReader.transfer

    def counted(self: PartReader, extents: Any) -> list[int]:
        read_bytes.append(sum(size for _, size in extents.places()))
        return transfer(self, extents)

    monkeypatch.setattr(PartReader, "transfer", counted)
    target = torch.zeros(lengths, dtype=torch.int64)
    stored = (torch.int64, (rows, columns))
    wanted = Wanted("a", place.offset, place.length, stored, offsets, lengths, target, lambda _: None)
    with PartReader(str(tmp_path / "checkpoint"), PART, engine="auto", verify=True) as reader:
        reader.read([wanted])
    assert target[0, 0] == offsets[0] * columns + offsets[1]
    assert sum(read_bytes) < 1.1 * target.nbytes


# --- cutting


def plans_of(*held: dict[str, torch.Tensor]) -> list[SavePlan]:
    return [create_default_local_save_plan(state, rank == 0) for rank, state in enumerate(held)]


def chunks_in(plans: list[SavePlan], name: str) -> list[tuple[int, int, int]]:
    """Return rank, first row and rows of each chunk, in order of the rows."""
    found = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.index.fqn == name:
                chunk = item.tensor_data.chunk  # type: ignore[union-attr]
                assert item.index.offset == chunk.offsets
                found.append((rank, chunk.offsets[0], chunk.sizes[0]))
    return sorted(found, key=lambda one: one[1])


def test_replicas_are_cut_into_chunks_that_do_not_overlap() -> None:
    state = {"a": torch.zeros(3_000_001), "b": torch.zeros(7, 100_000), "small": torch.zeros(1000)}
    plans = cut_replicas(plans_of(state, state, state))
    assert len({rank for rank, _, _ in chunks_in(plans, "a")}) == 3
    for name in ("a", "b"):
        chunks = chunks_in(plans, name)
        ends = [first + count for _, first, count in chunks]
        assert [first for _, first, _ in chunks] == [0, *ends[:-1]]
        assert ends[-1] == len(state[name])
    assert [count for _, _, count in chunks_in(plans, "small")] == [1000, 1000, 1000]


def test_no_chunk_is_smaller_than_a_mebibyte_and_those_with_less_to_do_get_them() -> None:
    shared = {"a": torch.zeros(600_000)}  # 2.4 MB
    plans = cut_replicas(plans_of({**shared, "own": torch.zeros(900_000)}, shared, shared))
    assert [rank for rank, _, _ in chunks_in(plans, "a")] == [1, 2]


def test_rows_are_not_cut() -> None:
    state = {"a": torch.zeros(2, 1_000_000), "b": torch.zeros(1, 1_000_000), "c": torch.tensor(1.0)}
    plans = cut_replicas(plans_of(*[state] * 4))
    assert [count for _, _, count in chunks_in(plans, "a")] == [1, 1]
    assert [count for _, _, count in chunks_in(plans, "b")] == [1] * 4  # as it was
