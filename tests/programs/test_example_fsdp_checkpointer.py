"""examples/fsdp_checkpointer.py runs under torchrun, with fewer ranks each time; its steps are DCP's, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from support.dcp_states import portrait
from support.torchrun import run_to_its_end

import fastpersist as fp
from fastpersist.integrations.torch_dcp import FastPersistReader

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp_checkpointer.py"
PATIENCE_S = 120
RANK_COUNTS = (2, 1)


def train(root: Path, rank_count: int) -> str:
    """Train two steps more; return what was said."""
    words = [root, "--steps", 2, "--width", 32]
    code, said = run_to_its_end(EXAMPLE, rank_count, *words, patience_s=PATIENCE_S, PYTHONWARNINGS="error")
    assert code == 0, said
    return said


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch.distributed.checkpoint")
def test_fewer_ranks_go_on_where_more_have_ended_and_dcp_reads_every_step(tmp_path: Path) -> None:
    said = [train(tmp_path, rank_count) for rank_count in RANK_COUNTS]
    saved = [re.findall(r"^step (\d+)  loss (\S+)$", lines, re.MULTILINE) for lines in said]
    assert [[int(step) for step, _ in steps] for steps in saved] == [[1, 2], [3, 4]]
    assert "resumed" not in said[0]
    resumed = re.findall(r"resumed at step (\d+) \(ranks: (\d+)\)  loss (\S+), and (\S+) when", said[1])
    [(step, count, loss, before)] = resumed
    assert (step, count, before) == ("2", "1", saved[0][-1][1])
    assert float(loss) == pytest.approx(float(before), rel=1e-5)
    assert fp.Checkpointer(tmp_path).steps() == [2, 3, 4]  # keep=3
    for number in (2, 4):
        path = tmp_path / f"step-{number:08d}"
        assert fp.verify(path).ok
        like = fp.Checkpointer(tmp_path).load(number) if number == 4 else _loaded(tmp_path, number)
        like.pop("rank_state", None)
        states = []
        for reader in (dcp.FileSystemReader(path), FastPersistReader(path)):
            state = {"model": {name: value * 0 for name, value in like["model"].items()}, "step": 0}
            dcp.load(state, storage_reader=reader, no_dist=True)
            states.append(portrait(state))
        assert states[0] == states[1] == portrait({"model": like["model"], "step": number})


def _loaded(root: Path, step: int) -> Any:
    with pytest.warns(RuntimeWarning, match="rank_state"):
        return fp.Checkpointer(root).load(step)
