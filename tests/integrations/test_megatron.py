"""Megatron-Core's distributed checkpoints: our strategy saves them, and Megatron's own loads them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.torchrun import run_to_its_end
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fastpersist as fp

if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed (make frameworks)", allow_module_level=True)

PROGRAM = Path(__file__).parents[1] / "support" / "megatron_ranks.py"
PATIENCE_S = 200


def run(rank_count: int, what: str, directory: Path) -> None:
    code, said = run_to_its_end(PROGRAM, rank_count, what, directory, patience_s=PATIENCE_S)
    assert code == 0, said
    assert said.count(f"{what}: done") == rank_count, said


@pytest.mark.timeout(3 * PATIENCE_S)
def test_what_four_ranks_save_two_load(tmp_path: Path) -> None:
    directory = tmp_path / "iter_0000007"
    run(4, "save", directory)
    names = {path.name for path in directory.iterdir()}
    assert {"common.pt", "metadata.json", ".metadata", "MANIFEST.json", "__0_0.distcp", "__3_0.distcp"} <= names
    assert fp.verify(directory).ok
    dcp_to_torch_save(directory, tmp_path / "whole.pt")
    rows = torch.load(tmp_path / "whole.pt", weights_only=False)["weight"]
    assert torch.equal(rows, torch.arange(24_000.0).view(24, 1000))
    run(2, "load", directory)


@pytest.mark.timeout(3 * PATIENCE_S)
def test_a_directory_that_is_there_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        run(2, "save", tmp_path / "iter_0000007")
    run(2, "load", tmp_path / "iter_0000007")


@pytest.mark.filterwarnings("ignore")  # Megatron itself warns
def test_an_unknown_engine_is_refused() -> None:
    from fastpersist.integrations.megatron import FastPersistSaveStrategy

    with pytest.raises(fp.ConfigError, match="abacus"):
        FastPersistSaveStrategy(engine="abacus")
