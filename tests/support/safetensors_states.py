"""Sharded states of tensors alone, for tests of HuggingFace checkpoints: made, saved, loaded and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.dcp_states import PLACEMENTS
from support.process_groups import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fastpersist.integrations.torch_dcp import (
    FastPersistHuggingFaceReader,
    FastPersistHuggingFaceWriter,
    FastPersistSavePlanner,
)


def whole_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "layers.0.uneven": rand(13, 7),
        "layers.0.few rows": rand(2, 5),
        "layers.1.half": rand(64, 33).bfloat16(),
        "layers.1.wide": rand(6, 20_000),
        "layers.1.cube": rand(3, 5, 4000),
        "layers.1.one row": rand(1, 300, 4),
        "layers.2.pages": rand(64, 2048),
        "long": rand(150_000, 4),
        "whole numbers": (rand(40, 9) * 100).to(torch.int8),
    }


def state_of(layout: str, count: int, seed: int | None) -> dict[str, Any]:
    """Return this rank's state; without a seed, one with nothing in it."""
    dimensions, placements = PLACEMENTS[layout]
    mesh = init_device_mesh("cpu", (count,) if dimensions == 1 else (2, count // 2))
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        for name, tensor in whole_tensors(seed or 1).items()
    }
    state |= {name: tensor.clone() for name, tensor in plain_tensors(seed or 1).items()}
    if seed is None:
        for value in state.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
    return state


def plain_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return what all ranks hold alike, one of them so large that it is cut."""
    return {"replica": torch.arange(600_000.0) + seed, "scalar": torch.tensor(seed), "empty": torch.empty(0, 3)}


def expect(state: dict[str, Any], layout: str, count: int, seed: int) -> None:
    """Check what this rank holds, in every bit."""
    for name, value in state_of(layout, count, seed).items():
        own, other = (v.to_local() if isinstance(v, DTensor) else v for v in (state[name], value))
        assert torch.equal(own, other), name


def save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=FastPersistHuggingFaceWriter(path, **options), planner=FastPersistSavePlanner())


def save_on(count: int, path: Path, seed: int, layout: str = "rows", **options: Any) -> None:
    def work(_rank: int, count: int) -> None:
        save(path, state_of(layout, count, seed), **options)

    run_ranks(count, work)


def expect_files(path: Path, seed: int) -> None:
    """Check what safetensors itself finds in the files."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    expected = whole_tensors(seed) | plain_tensors(seed)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def expect_on(
    count: int, path: Path, seed: int, layout: str = "rows", reader: Any = FastPersistHuggingFaceReader
) -> None:
    """Check what `count` ranks load."""

    def work(_rank: int, count: int) -> None:
        state = state_of(layout, count, None)
        dcp.load(state, storage_reader=reader(path))
        expect(state, layout, count, seed)

    run_ranks(count, work)
