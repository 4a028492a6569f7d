"""examples/fsdp_dcp_reshard.py runs under torchrun, with fewer ranks each time, and what it leaves is DCP's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.torchrun import run_to_its_end
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import fastpersist as fp
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch.distributed.checkpoint")

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_dcp_reshard.py"
PATIENCE_S = 120
RANK_COUNTS = (3, 1)


def train(root: Path, rank_count: int) -> tuple[int, str]:
    """Train two steps more, with a checkpoint after each; return how it ended, and all it said."""
    words = [root, "--steps", 2, "--every", 1, "--width", 32]
    return run_to_its_end(EXAMPLE, rank_count, *words, patience_s=PATIENCE_S, PYTHONWARNINGS="error")


def load_by(reader: Any) -> dict[str, Any]:
    """Load everything there is, in this process alone, into tensors of zeros."""
    state: dict[str, Any] = {
        name: torch.zeros(item.size, dtype=item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        for name, item in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Run the example with 3 ranks, then with 1, in one directory."""
    root = tmp_path_factory.mktemp("fsdp") / "runs"
    said = []
    for rank_count in RANK_COUNTS:
        code, lines = train(root, rank_count)
        assert code == 0, lines
        said.append(lines)
    return root, said


def test_each_number_of_ranks_goes_on_where_the_one_before_ended(trained: tuple[Path, list[str]]) -> None:
    _, said = trained
    saved_loss = None
    for number, (rank_count, lines) in enumerate(zip(RANK_COUNTS, said, strict=True)):
        resumed = re.findall(r"resumed at step (\d+) \(ranks: (\d+)\)  loss (\S+), and (\S+) when", lines)
        if number == 0:
            assert resumed == []
        else:
            [(step, count, loss, before)] = resumed
            assert (int(step), int(count), before) == (2 * number, rank_count, saved_loss)
            assert float(loss) == pytest.approx(float(before), rel=1e-5)
        steps = re.findall(r"^step (\d+)  loss (\S+)  saved$", lines, re.MULTILINE)
        assert [int(step) for step, _ in steps] == [2 * number + 1, 2 * number + 2]
        saved_loss = steps[-1][1]


def test_each_checkpoint_is_whole_and_has_a_part_of_each_rank(trained: tuple[Path, list[str]]) -> None:
    root, _ = trained
    assert sorted(path.name for path in root.iterdir()) == [f"step-{step:08d}" for step in range(1, 5)]
    for number, rank_count in enumerate(RANK_COUNTS):
        path = root / f"step-{2 * number + 2:08d}"
        parts = sorted(part.name for part in path.glob("*.distcp"))
        assert parts == [f"__{rank}_0.distcp" for rank in range(rank_count)]
        assert fp.verify(path).ok


@pytest.mark.parametrize("step", [2, 4])
def test_the_stock_reader_reads_the_same_as_ours(trained: tuple[Path, list[str]], step: int) -> None:
    path = trained[0] / f"step-{step:08d}"
    stock, ours = load_by(FileSystemReader(path)), load_by(FastPersistReader(path))
    assert stock["step"] == ours["step"] == step
    assert list(stock) == list(ours)
    for name, value in stock.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, ours[name]), name
    parameters = [name.removeprefix("model.") for name in stock if name.startswith("model.") and name != "model.mask"]
    assert len(parameters) > 20
    for name in parameters:
        assert stock[f"model.{name}"].any()
        assert all(stock[f"optimizer.state.{name}.{moment}"].any() for moment in ("exp_avg", "exp_avg_sq"))


def test_a_loss_that_is_not_the_saved_one_ends_the_run(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    path = tmp_path / "step-00000004"
    state = load_by(FastPersistReader(trained[0] / path.name))
    state["loss"] += 0.01
    dcp.save(state, storage_writer=FastPersistWriter(path), no_dist=True)
    code, said = train(tmp_path, 1)
    assert code != 0
    assert re.search(r"the loss is \S+, and was \S+ when it was saved", said), said
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
