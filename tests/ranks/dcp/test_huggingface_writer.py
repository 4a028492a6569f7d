"""HuggingFace checkpoints from sharded state: whatever the sharding, the files are those of the whole model."""

from __future__ import annotations

import json
import os
import pickle
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from support.huggingface_trainers import tiny_gpt2
from support.process_groups import run_ranks
from support.rank_faults import watched
from support.runs import hidden_names
from support.safetensors_states import (
    PLACEMENTS,
    expect,
    expect_files,
    expect_on,
    plain_tensors,
    save,
    save_on,
    state_of,
    whole_tensors,
)
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fastpersist as fp
from fastpersist.dcp import part_reader
from fastpersist.dcp.huggingface import coordinator, model_part, shared_windows
from fastpersist.dcp.huggingface import layout as huggingface_layout
from fastpersist.dcp.huggingface import storage_writer as huggingface_writer
from fastpersist.integrations.torch_dcp import (
    FastPersistHuggingFaceReader,
    FastPersistHuggingFaceWriter,
    FastPersistSavePlanner,
)
from fastpersist.transfer import reader, writer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]

torch.set_num_threads(1)

INDEX = "model.safetensors.index.json"


def whole_state(seed: int) -> dict[str, torch.Tensor]:
    return whole_tensors(seed) | plain_tensors(seed)


def loaded(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    target = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(target, storage_reader=FastPersistHuggingFaceReader(path))
    return target


# --- any sharding, on any number of ranks


@pytest.mark.parametrize(
    ("save_count", "save_layout", "load_count", "load_layout"),
    [
        (1, "rows", 3, "columns"),
        (2, "columns", 1, "rows"),
        (3, "rows", 2, "replicas"),
        (3, "columns", 4, "blocks"),
        (4, "blocks", 2, "columns"),
        (4, "hybrid", 3, "rows"),
        (2, "replicas", 2, "rows"),
    ],
)
def test_any_sharding_gives_the_files_of_the_whole_model_and_is_loaded_as_any_other(
    tmp_path: Path, save_count: int, save_layout: str, load_count: int, load_layout: str
) -> None:
    save_on(save_count, tmp_path / "model", 3, save_layout)
    assert sorted(os.listdir(tmp_path / "model")) == ["MANIFEST.json", "model.safetensors"]
    expect_files(tmp_path / "model", 3)
    expect_on(load_count, tmp_path / "model", 3, load_layout)


@pytest.fixture(scope="module")
def files_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("one") / "model"
    save_on(1, path, 2, max_shard_bytes=600_000)
    return {name: (path / name).read_bytes() for name in os.listdir(path) if name != "MANIFEST.json"}


WAYS: dict[str, tuple[int | None, bool]] = {
    "in place": (1, True),
    "short runs in windows": (None, True),
    "all runs in windows": (1 << 30, True),
    "short runs through the first rank": (None, False),
    "all runs through the first rank": (1 << 30, False),
}
"""Runs of which length go another way, and whether the ranks can share windows."""


@pytest.mark.parametrize(
    ("layout", "way", "machine_count"),
    [
        ("rows", "in place", 1),
        ("columns", "in place", 1),
        ("blocks", "in place", 1),
        ("columns", "short runs in windows", 1),
        ("columns", "all runs in windows", 1),
        ("blocks", "all runs in windows", 1),
        ("columns", "short runs through the first rank", 1),
        ("columns", "all runs through the first rank", 1),
        ("blocks", "all runs through the first rank", 1),
        ("rows", "in place", 2),
        ("columns", "in place", 2),
        ("blocks", "in place", 2),
        ("hybrid", "in place", 2),
    ],
)
def test_files_are_those_that_one_rank_writes_byte_by_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files_of_one_rank: dict[str, bytes],
    layout: str,
    way: str,
    machine_count: int,
) -> None:
    """With CRCs, which are put together from those of the pieces."""
    run_bytes_min, has_windows = WAYS[way]
    if run_bytes_min is not None:
        monkeypatch.setattr(huggingface_layout, "_RUN_BYTES_MIN", run_bytes_min)
        monkeypatch.setattr(shared_windows, "_RUN_BYTES_MIN", run_bytes_min)
    if not has_windows:
        monkeypatch.setattr(huggingface_writer, "make_windows", lambda *_: None)
    monkeypatch.setattr(shared_windows, "_WINDOW_BYTES", 20_000)
    monkeypatch.setattr(shared_windows, "_SLOT_COUNT_MAX", 4)
    monkeypatch.setattr(huggingface_layout, "_UNIT_COUNT_MIN", 1)
    monkeypatch.setattr(model_part, "_BATCH_BYTES", 30_000)
    monkeypatch.setattr(coordinator, "_WINDOW_BYTES", 20_000)
    count = 4 if PLACEMENTS[layout][0] == 2 else 3

    def work(rank: int, count: int) -> None:
        monkeypatch.setattr(huggingface_writer, "loopback_place", lambda: (f"machine {rank % machine_count}", ""))
        save(tmp_path / "model", state_of(layout, count, 2), max_shard_bytes=600_000)

    run_ranks(count, work)
    found = set(os.listdir(tmp_path / "model"))
    assert found == {*files_of_one_rank, "MANIFEST.json"}
    for name, data in files_of_one_rank.items():
        assert (tmp_path / "model" / name).read_bytes() == data, name
    report = fp.verify(tmp_path / "model")
    assert report.ok
    assert report.has_checksums


def test_units_of_several_machines_are_the_largest_page_of_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, units = huggingface_writer.write_model_part, []

    def noting(part: Any, *arguments: Any, **options: Any) -> Any:
        units.append(part.unit_bytes)
        return write(part, *arguments, **options)

    def work(rank: int, count: int) -> list[int]:
        monkeypatch.setattr(huggingface_writer, "write_model_part", noting)
        monkeypatch.setattr(huggingface_writer, "loopback_place", lambda: (f"machine {rank}", ""))
        monkeypatch.setattr(huggingface_writer, "mmap", SimpleNamespace(PAGESIZE=(4096, 1 << 16)[rank]))
        save(tmp_path / "model", state_of("rows", count, 2))
        return units

    assert run_ranks(2, work) == [[1 << 16]] * 2


def test_files_verify_by_themselves_and_their_tensors_lie_on_pages(tmp_path: Path) -> None:
    save_on(2, tmp_path / "model", 1, "columns")
    report = fp.verify(tmp_path / "model" / "model.safetensors")
    assert report.ok
    assert report.has_checksums
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    pages = whole_tensors(1)["layers.2.pages"]
    assert data.index(bytes(pages.view(torch.uint8).numpy())) % 4096 == 0


def test_tensors_of_a_device_are_copied_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the device, and what is read and written goes through the copies that a device needs."""

    def copied(data: torch.Tensor, runs: list[tuple[int, int, int]]) -> Any:
        first, end = runs[0][0], runs[-1][0] + runs[-1][1]
        return data[first:end].clone(), [(start - first, size, place) for start, size, place in runs]

    monkeypatch.setattr(model_part, "_part_on_host", copied)
    monkeypatch.setattr(model_part, "_BATCH_BYTES", 30_000)
    for side in (writer, reader):
        monkeypatch.setattr(side, "is_host_memory", lambda _: False)
    save_on(2, tmp_path / "model", 4, "columns")
    expect_files(tmp_path / "model", 4)
    expect_on(2, tmp_path / "model", 4, "rows")


def test_strided_and_conjugate_tensors_are_written_as_they_are_seen(tmp_path: Path) -> None:
    state = {
        "transposed": torch.randn(30, 40).t(),
        "every other": torch.randn(40, 50)[::2, ::3],
        "conjugate": torch.complex(torch.randn(9), torch.randn(9)).conj(),
        "parameter": torch.nn.Parameter(torch.randn(7)),
    }
    save(tmp_path / "model", state)
    for name, tensor in loaded(tmp_path / "model", state).items():
        assert torch.equal(tensor, state[name]), name


def test_targets_of_another_dtype_or_order_are_filled(tmp_path: Path) -> None:
    state = {"a": torch.randn(64, 48), "b": torch.randn(1000)}
    save(tmp_path / "model", state)
    target = {"a": torch.zeros(48, 64).t(), "b": torch.zeros(1000, dtype=torch.float64)}
    dcp.load(target, storage_reader=FastPersistHuggingFaceReader(tmp_path / "model"))
    assert torch.equal(target["a"], state["a"])
    assert torch.equal(target["b"], state["b"].double())


def test_any_planner_will_do(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        state = state_of("replicas", count, 5)
        dcp.save(state, storage_writer=FastPersistHuggingFaceWriter(tmp_path / "model"))

    run_ranks(3, work)
    expect_files(tmp_path / "model", 5)
    assert fp.verify(tmp_path / "model").ok


def test_kept_plans_are_written_again(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        SavePlanner._cached_save_plan.clear()
        writer = FastPersistHuggingFaceWriter()
        for seed in (1, 2, 3):
            state = state_of("columns", count, seed)
            if seed == 3:
                state["more"] = torch.ones(5)
            planner = FastPersistSavePlanner(enable_plan_caching=True)
            dcp.save(state, checkpoint_id=tmp_path / str(seed), storage_writer=writer, planner=planner)

    run_ranks(2, work)
    for seed in (1, 2):
        expect_files(tmp_path / str(seed), seed)
        assert fp.verify(tmp_path / str(seed)).ok
    assert torch.equal(loaded(tmp_path / "3", {"more": torch.zeros(5)})["more"], torch.ones(5))


def test_writers_and_readers_go_to_other_processes(tmp_path: Path) -> None:
    state = {"a": torch.randn(300)}
    writer, reader = pickle.loads(
        pickle.dumps((FastPersistHuggingFaceWriter(tmp_path / "m"), FastPersistHuggingFaceReader(tmp_path / "m")))
    )
    dcp.save(state, storage_writer=writer)
    target = {"a": torch.zeros(300)}
    dcp.load(target, storage_reader=reader)
    assert torch.equal(target["a"], state["a"])


@pytest.mark.parametrize("durable", [True, False])
def test_every_file_is_synced_unless_that_is_not_wanted(tmp_path: Path, durable: bool) -> None:
    with watched() as counts:
        save(tmp_path / "model", whole_state(1), max_shard_bytes=600_000, durable=durable)
    file_count = len(list((tmp_path / "model").iterdir()))
    assert counts["sync"] >= file_count if durable else not counts["sync"]


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    def work(_rank: int, count: int) -> None:
        state = state_of("rows", count, 2)
        writer = FastPersistHuggingFaceWriter(tmp_path / "model")
        future = dcp.async_save(state, storage_writer=writer, planner=FastPersistSavePlanner())
        state["layers.0.uneven"].to_local().zero_()
        state["replica"].zero_()
        future.result()

    run_ranks(2, work)
    expect_files(tmp_path / "model", 2)


# --- files


def index_of(path: Path) -> Any:
    return json.loads((path / INDEX).read_text())


def test_files_are_numbered_and_their_index_says_what_is_where(tmp_path: Path) -> None:
    save_on(2, tmp_path / "model", 1, max_shard_bytes=600_000, metadata={"origin": "test"})
    names = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    count = len(names)
    assert names == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    assert count > 2
    found = {}
    for name in names:
        with safe_open(tmp_path / "model" / name, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()["origin"] == "test"
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 600_000
        found |= dict.fromkeys(tensors, name)
    total_bytes = sum(tensor.nbytes for tensor in whole_state(1).values())
    assert index_of(tmp_path / "model") == {"metadata": {"total_size": total_bytes}, "weight_map": found}
    expect_on(3, tmp_path / "model", 1, "columns")


def test_files_are_filled_in_the_order_of_the_model(tmp_path: Path) -> None:
    def work(_rank: int, _count: int) -> None:
        save(tmp_path / "model", {f"layer {n}": torch.ones(500, 500) for n in range(12)}, max_shard_bytes=3_000_000)

    run_ranks(2, work)
    weight_map = index_of(tmp_path / "model")["weight_map"]
    for n in range(12):
        assert weight_map[f"layer {n}"] == f"model-{n // 3 + 1:05}-of-00004.safetensors"


def test_the_file_of_each_tensor_may_be_chosen(tmp_path: Path) -> None:
    state = {name: torch.full((10,), float(n)) for n, name in enumerate("abc")}
    save(tmp_path / "model", state, fqn_to_index_mapping={"a": 3, "b": 1, "c": 3, "not here": 9})
    assert index_of(tmp_path / "model")["weight_map"] == {
        "a": "model-00003-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00003-of-00003.safetensors",
    }
    assert torch.equal(loaded(tmp_path / "model", state)["c"], state["c"])


@pytest.mark.parametrize("number", [None, 0, -1, 1.5, True, "1"])
def test_a_tensor_without_a_number_is_named(tmp_path: Path, number: Any) -> None:
    mapping = {"a": 1} if number is None else {"a": 1, "b": number}
    with pytest.raises(dcp.api.CheckpointException, match="of 'b' it"):
        save(tmp_path / "model", {"a": torch.ones(1), "b": torch.ones(1)}, fqn_to_index_mapping=mapping)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size_bytes", [0, -5, 1.5, True, "5GB"])
def test_impossible_sizes_are_refused_at_once(size_bytes: Any) -> None:
    with pytest.raises(fp.ConfigError, match="max_shard_bytes"):
        FastPersistHuggingFaceWriter("model", max_shard_bytes=size_bytes)


def test_a_model_without_tensors_is_a_file_without_tensors(tmp_path: Path) -> None:
    save(tmp_path / "model", {})
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert list(file.keys()) == []


# --- others' readers and writers


def test_from_pretrained_reads_what_two_ranks_have_sharded(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    def work(_rank: int, count: int) -> None:
        model = tiny_gpt2(seed=1)
        for layer in model.transformer.h:
            fully_shard(layer, mesh=init_device_mesh("cpu", (count,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
        model.config.save_pretrained(tmp_path / "model")
        state = model.state_dict()
        del state["lm_head.weight"]  # tied
        save(tmp_path / "model", state, max_shard_bytes=20_000)
        target = tiny_gpt2(seed=2)
        own = {name: value for name, value in target.state_dict().items() if name != "lm_head.weight"}
        dcp.load(own, storage_reader=FastPersistHuggingFaceReader(tmp_path / "model"))

    run_ranks(2, work)
    expected = tiny_gpt2(seed=1).state_dict()
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "model").state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert "config.json" in os.listdir(tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1


@pytest.mark.parametrize("max_shard_size", ["20KB", "5GB"])
def test_what_save_pretrained_wrote_is_read(tmp_path: Path, max_shard_size: str) -> None:
    tiny_gpt2(seed=3).save_pretrained(tmp_path / "model", max_shard_size=max_shard_size)

    def work(_rank: int, count: int) -> dict[str, torch.Tensor]:
        model = tiny_gpt2(seed=4)
        fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
        state = model.state_dict()
        del state["lm_head.weight"]  # tied
        dcp.load(state, storage_reader=FastPersistHuggingFaceReader(tmp_path / "model"))
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}

    expected = tiny_gpt2(seed=3).state_dict()
    for found in run_ranks(2, work):
        assert len(found) == len(expected) - 1
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


def torchs() -> Any:
    return pytest.importorskip("torch.distributed.checkpoint.hf_storage", reason="this torch has no such storage")


def test_torchs_reader_reads_ours(tmp_path: Path) -> None:
    reader = torchs().HuggingFaceStorageReader
    save_on(2, tmp_path / "model", 2, "columns", max_shard_bytes=600_000)
    expect_on(3, tmp_path / "model", 2, "rows", lambda path: reader(str(path)))


@pytest.mark.parametrize("consolidated", [False, True], ids=["in parts", "consolidated"])
def test_what_torchs_writer_wrote_is_read(tmp_path: Path, consolidated: bool) -> None:
    writer = torchs().HuggingFaceStorageWriter

    names = set(whole_tensors(6)) - {"whole numbers"}  # which it does not consolidate

    def work(_rank: int, count: int) -> None:
        (tmp_path / "model").mkdir(exist_ok=True)
        state = {name: value for name, value in state_of("rows", count, 6).items() if name in names}
        dcp.save(
            state,
            storage_writer=writer(str(tmp_path / "model"), save_distributed=True, enable_consolidation=consolidated),
        )

    def load(_rank: int, count: int) -> None:
        state = {name: value for name, value in state_of("columns", count, None).items() if name in names}
        dcp.load(state, storage_reader=FastPersistHuggingFaceReader(tmp_path / "model"))
        expect(state_of("columns", count, 6) | state, "columns", count, 6)

    run_ranks(2, work)
    run_ranks(3, load)


def test_what_safetensors_wrote_is_read(tmp_path: Path) -> None:
    state = whole_state(4)
    save_file(state, tmp_path / "adapter_model.safetensors")
    for name, tensor in loaded(tmp_path, state).items():
        assert torch.equal(tensor, state[name]), name


def test_of_two_models_in_a_directory_the_one_that_transformers_takes_is_read(tmp_path: Path) -> None:
    save(tmp_path / "model", {"a": torch.ones(3)}, fqn_to_index_mapping={"a": 2})
    save_file({"a": torch.zeros(3)}, tmp_path / "model" / "model.safetensors")
    assert torch.equal(loaded(tmp_path / "model", {"a": torch.ones(3)})["a"], torch.zeros(3))


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model", {"large": torch.ones(1 << 18), "small": torch.arange(100)})
    read_bytes = []
    original = part_reader.PartReader.transfer

    def counted(self: Any, extents: Any) -> list[int]:
        read_bytes.append(sum(size for _, size in extents.places()))
        return original(self, extents)

    monkeypatch.setattr(part_reader.PartReader, "transfer", counted)
    found = loaded(tmp_path / "model", {"small": torch.arange(100)})
    assert torch.equal(found["small"], torch.arange(100))
    assert sum(read_bytes) == 800


# --- the directory


def test_a_model_replaces_an_older_one_and_keeps_what_is_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (tmp_path / "elsewhere").write_text("words")
    (path / "vocabulary.txt").symlink_to("../elsewhere")
    (path / "runs" / "1").mkdir(parents=True)
    (path / "runs" / "1" / "log").write_text("said")
    save(path, whole_state(1), max_shard_bytes=600_000)
    assert len(list(path.glob("*.safetensors"))) > 1
    (path / "notes.md").write_text("later")
    save(path, whole_state(2))
    assert sorted(os.listdir(path)) == [
        *("MANIFEST.json", "config.json", "model.safetensors", "notes.md", "runs", "vocabulary.txt"),
    ]
    assert (path / "config.json").read_text() == "{}"
    assert (path / "runs" / "1" / "log").read_text() == "said"
    assert (path / "vocabulary.txt").read_text() == "words"
    assert not (path / "vocabulary.txt").is_symlink()
    expect_files(path, 2)
    assert fp.verify(path).ok
    assert hidden_names(tmp_path) == []


def test_a_directory_that_is_no_model_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter").write_text("one")
    with pytest.raises(dcp.api.CheckpointException, match="it is no checkpoint"):
        save(path, {"a": torch.ones(3)})
    assert os.listdir(path) == ["chapter"]


def test_directories_beside_a_model_stay_as_they_are_and_nothing_in_them_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    (path / "private" / "inner").mkdir(parents=True)
    (path / "private" / "token").write_text("secret")
    (path / "empty").mkdir()
    (path / "config.json").write_text("{}")
    (path / "private").chmod(0o700)
    (path / "empty").chmod(0o2775)
    save(path, {"a": torch.ones(3)})
    assert [stat.S_IMODE((path / name).stat().st_mode) for name in ("private", "empty")] == [0o700, 0o2775]
    assert (path / "private" / "inner").is_dir()
    found = {file.name: file.crc32 for file in fp.inspect(path).files}
    assert found["private/token"] is None
    assert found["model.safetensors"] is not None
    assert fp.verify(path).ok


def test_a_directory_of_checkpoints_inside_is_not_moved(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    with fp.Checkpointer(path / "runs") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result()
        with pytest.raises(dcp.api.CheckpointException, match="runs is where checkpoints are saved to"):
            save(path, {"a": torch.ones(3)})
        checkpointer.save(2, {"w": torch.ones(3)}).result()
    assert not (path / "model.safetensors").exists()


def test_without_overwrite_the_older_model_stays(tmp_path: Path) -> None:
    save(tmp_path / "model", whole_state(1))
    with pytest.raises(dcp.api.CheckpointException, match="exists already"):
        save(tmp_path / "model", whole_state(2), overwrite=False)
    expect_files(tmp_path / "model", 1)


def test_a_link_to_a_directory_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(path, whole_state(1))
    (tmp_path / "data").mkdir()
    (path / "data").symlink_to(tmp_path / "data")
    with pytest.raises(dcp.api.CheckpointException, match="is a link to a directory"):
        save(path, whole_state(2))
    expect_files(path, 1)
    assert (path / "data").is_symlink()
    assert hidden_names(tmp_path) == []
