"""Sparse, quantized and nested tensors come back as they were saved, or are refused by name; none is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.torch_release import TORCH
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import fastpersist as fp
from fastpersist.cli import main
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistSavePlanner, FastPersistWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors|quantize|TypedStorage).*:UserWarning"),
]

KINDS: dict[str, Callable[[float], torch.Tensor]] = {
    "coo": lambda value: (torch.eye(3) * value).to_sparse(),
    "csr": lambda value: (torch.eye(3) * value).to_sparse_csr(),
    "quantized": lambda value: torch.quantize_per_tensor(torch.full((4,), value), 0.5, 0, torch.quint8),
    "nested": lambda value: torch.nested.nested_tensor([torch.full((2,), value), torch.full((3,), value)]),
    "jagged": lambda value: torch.nested.nested_tensor(
        [torch.full((2,), value), torch.full((3,), value)], layout=torch.jagged
    ),
}


def numbers(tensor: torch.Tensor) -> list[Any]:
    if tensor.is_nested:
        return [part.tolist() for part in tensor.unbind()]
    if tensor.is_quantized:
        return list(tensor.dequantize().tolist())
    return list(tensor.to_dense().tolist())


def save(path: Path, state: dict[str, Any]) -> None:
    with fp.Checkpointer(path, sharded=True) as checkpoints:
        checkpoints.save(1, state).result(30)


@pytest.fixture
def nested_tensors_are_safe() -> Iterator[None]:
    """Let weights_only=True load nested tensors, which it did by itself before torch 2.15."""
    from torch.nested._internal.nested_tensor import NestedTensor, _rebuild_njt

    with torch.serialization.safe_globals([torch._utils._rebuild_nested_tensor, NestedTensor, _rebuild_njt]):
        yield


@pytest.mark.usefixtures("nested_tensors_are_safe")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_other_kinds_come_back_with_and_without_a_target(tmp_path: Path, kind: str) -> None:
    saved = KINDS[kind](3.0)
    state = {"held": saved, "plain": torch.ones(5)}
    expected = numbers(saved)
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        pending = checkpoints.save(1, state)
        if kind == "coo":
            saved.values().zero_()  # it was copied
        pending.result(30)
        loaded = checkpoints.load(1)
        assert loaded["held"].layout is saved.layout
        assert numbers(loaded["held"]) == expected
        target = KINDS[kind](1.0)
        assert checkpoints.load(1, into={"held": target})["held"] is target
        assert numbers(target) == expected


def test_sparse_buffers_of_modules_are_restored(tmp_path: Path) -> None:
    def module(value: float) -> torch.nn.Module:
        made = torch.nn.Linear(3, 3)
        made.register_buffer("mask", KINDS["coo"](value))
        return made

    saved, target = module(2.0), module(1.0)
    save(tmp_path, {"model": saved.state_dict()})
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.load(1, into={"model": target})
    assert torch.equal(target.weight, saved.weight)
    assert numbers(target.mask) == numbers(saved.mask)


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        ("coo", lambda: torch.zeros(3, 3), "held is a torch.strided tensor in the target, a torch.sparse_coo tensor"),
        ("coo", lambda: torch.zeros(3, 2).to_sparse(), r"held has shape \(3, 2\) in the target, \(3, 3\)"),
        ("csr", lambda: torch.zeros(3, 3).to_sparse_csr(), "held has 0 elements in the target, 3 in the checkpoint"),
        ("quantized", lambda: torch.zeros(4), "held is a torch.strided tensor in the target, a quantized tensor"),
    ],
)
def test_targets_that_do_not_fit_are_named(
    tmp_path: Path, kind: str, make: Callable[[], torch.Tensor], words: str
) -> None:
    save(tmp_path, {"held": KINDS[kind](1.0)})
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints, pytest.raises(fp.ConfigError, match=words):
        checkpoints.load(1, into={"held": make()})


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    class Stubborn(torch.Tensor):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    stubborn = torch.ones(3).as_subclass(Stubborn)
    with pytest.raises(fp.UnsupportedError, match=r"'a\.stubborn', a Stubborn, cannot be copied: no copies"):
        save(tmp_path, {"a": {"stubborn": stubborn}})


@pytest.mark.parametrize("kind", KINDS)
def test_stock_reader_loads_them_from_a_step(tmp_path: Path, kind: str) -> None:
    save(tmp_path, {"held": KINDS[kind](3.0)})
    state = {"held": KINDS[kind](1.0)}
    dcp.load(state, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    assert numbers(state["held"]) == numbers(KINDS[kind](3.0))


@pytest.mark.parametrize("planner", [DefaultSavePlanner, FastPersistSavePlanner])
def test_quantized_targets_of_dcp_are_filled_in_place(tmp_path: Path, planner: type[DefaultSavePlanner]) -> None:
    state = {"held": KINDS["quantized"](3.0)}
    dcp.save(state, storage_writer=FastPersistWriter(tmp_path / "c"), planner=planner(), no_dist=True)
    target = KINDS["quantized"](1.0)
    dcp.load({"held": target}, storage_reader=FastPersistReader(tmp_path / "c"), no_dist=True)
    assert numbers(target) == [3.0] * 4


@pytest.mark.parametrize("needs_grad", [False, True])
def test_sparse_targets_of_dcp_are_filled_or_refused_by_name(tmp_path: Path, needs_grad: bool) -> None:
    dcp.save({"held": KINDS["coo"](3.0)}, storage_writer=FastPersistWriter(tmp_path / "c"), no_dist=True)
    state = {"held": torch.zeros(3, 3).to_sparse().requires_grad_(needs_grad)}
    target = state["held"]
    dcp.load(state, storage_reader=FastPersistReader(tmp_path / "c"), no_dist=True)
    assert state["held"] is target
    assert numbers(target) == numbers(KINDS["coo"](3.0))


@pytest.mark.skipif(TORCH >= (2, 15), reason="this torch's planner asks compressed tensors for strides, and fails")
def test_compressed_targets_of_dcp_are_refused_by_name(tmp_path: Path) -> None:
    dcp.save({"held": KINDS["csr"](3.0)}, storage_writer=FastPersistWriter(tmp_path / "c"), no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="does not take 'held'"):
        dcp.load(
            {"held": torch.zeros(3, 3).to_sparse_csr()}, storage_reader=FastPersistReader(tmp_path / "c"), no_dist=True
        )


def test_sparse_tensors_that_dcps_own_planner_saved_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp.save({"held": KINDS["coo"](3.0)}, storage_writer=FastPersistWriter(tmp_path / "c"), no_dist=True)
    assert main(["merge", str(tmp_path / "c"), str(tmp_path / "out.pt")]) != 0
    assert "'held' is a tensor of layout torch.sparse_coo" in capsys.readouterr().err
