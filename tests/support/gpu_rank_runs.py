"""What the ranks of test_gpu_ranks.py do. A module that they can import, as they are processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.gpu_device import DEVICE, PATIENCE_S, devices_in, host_portrait
from support.sameness import portrait
from support.spawned_ranks import device_of
from support.training import state_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fastpersist as fp
from fastpersist.integrations.torch_dcp import (
    FastPersistHuggingFaceReader,
    FastPersistHuggingFaceWriter,
    FastPersistReader,
    FastPersistSavePlanner,
    FastPersistWriter,
)

__all__ = ["every_step", "one_rank_reads_what_two_have_saved", "replicas_in_one_file", "sharded_states"]

WIDTH = 600  # a layer of more than 1 MiB: it is shared out among the ranks


def new(device: torch.device, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    model = torch.nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(inputs.to(next(model.parameters()).device)).square().mean().backward()
    optimizer.step()


def expect_on(device: torch.device, obj: Any) -> None:
    assert set(devices_in(obj)) == {str(device)}


# --- one file of replicas


def replicas_in_one_file(rank: int, folder: Path) -> None:
    group, device = dist.group.WORLD, device_of(rank)
    model, optimizer = new(device)
    train(model, optimizer, 0)
    state = {**state_of(model, optimizer), "number": 7}
    expected = host_portrait(state)
    fp.save(state, folder / "model.pt", process_group=group, check_replicas=True)
    pending = fp.save_async(state, folder / "async.pt", process_group=group, optimizer=optimizer)
    train(model, optimizer, 1)
    pending.result(PATIENCE_S)
    with fp.directory_save_together(folder / "directory", group) as files:
        files.save(model.state_dict(), "model.safetensors", optimizer=optimizer)
        files.save({"rank": torch.full((300_000,), rank, device=device)}, f"rank{rank}.pt", own=True)
        weights = host_portrait(dict(model.state_dict()))
        publishing = files.publish()
        train(model, optimizer, 2)
        publishing.result(PATIENCE_S)
    for name in ("model.pt", "async.pt"):
        assert portrait(torch.load(folder / name, map_location="cpu")) == expected
        for wanted in (device, device_of(rank + 1), torch.device("cpu")):
            loaded: Any = fp.load(folder / name, process_group=group, map_location=wanted)
            expect_on(wanted, loaded)
            assert host_portrait(loaded) == expected
    target, _ = new(device, 1)
    fp.load_into(folder / "directory" / "model.safetensors", target, process_group=group)
    assert host_portrait(dict(target.state_dict())) == weights
    expect_on(device, target.state_dict())
    own: Any = torch.load(folder / "directory" / f"rank{1 - rank}.pt", map_location="cpu")
    assert bool((own["rank"] == 1 - rank).all())
    if rank == 1:
        model.get_parameter("0.weight").data[300, 300] += 1
    with pytest.raises(fp.FastPersistError, match=r"0\.weight"):
        fp.save(model.state_dict(), folder / "differs.pt", process_group=group, check_replicas=True)
    assert not (folder / "differs.pt").exists()


# --- steps


def every_step(rank: int, folder: Path) -> None:
    group, device = dist.group.WORLD, device_of(rank)
    model, optimizer = new(device)
    expected = []
    with fp.Checkpointer(folder / "run", optimizer=optimizer, process_group=group) as checkpointer:
        for number in range(5):
            train(model, optimizer, number)
            state = {**state_of(model, optimizer), "average": torch.full((70_000,), number, device=device)}
            expected.append(host_portrait(state))
            checkpointer.save(number, state, rank_state={"mine": torch.full((300_000,), rank, device=device)})
            state["average"].zero_()
    for number in range(5, 7):
        train(model, optimizer, number)
    for number, drawn in enumerate(expected):
        saved = torch.load(folder / "run" / f"step-{number:08d}" / "state.pt", map_location="cpu")
        assert portrait(saved) == drawn
    for place in (device, device_of(rank + 1)):  # as it was, and as a job that is given other devices
        again, optimizer_again = new(place, 1)
        resumed = fp.Checkpointer(folder / "run", optimizer=optimizer_again, process_group=group)
        found: Any = resumed.load(
            into={"model": again, "optimizer0": optimizer_again}, keys=["average"], map_location=place
        )
        assert bool((found["rank_state"]["mine"] == rank).all())
        for number in range(5, 7):
            train(again, optimizer_again, number)
        expect_on(place, [state_of(again, optimizer_again), found])
        assert host_portrait(state_of(again, optimizer_again)) == host_portrait(state_of(model, optimizer))


# --- shards


def shards(mesh: DeviceMesh, factor: float) -> dict[str, Any]:
    """Return rows and columns of one tensor, and all of it."""
    full = torch.randn(1001, 700, generator=torch.Generator().manual_seed(3)) * factor
    state: dict[str, Any] = {"whole": full.to(mesh.device_type)}
    for name, dimension in (("rows", 0), ("columns", 1)):
        part = full.chunk(mesh.size(), dimension)[mesh.get_local_rank()].contiguous().to(mesh.device_type)
        state[name] = DTensor.from_local(
            part, mesh, [Shard(dimension)], run_check=False, shape=full.shape, stride=full.stride()
        )
    return state


def local(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one.to_local() if isinstance(one, DTensor) else one for name, one in state.items()}


def sharded_states(rank: int, folder: Path) -> None:
    mesh = init_device_mesh(DEVICE.type, (2,))
    state, planner = shards(mesh, 1), FastPersistSavePlanner()
    expected = host_portrait(local(state))

    dcp.save(state, storage_writer=FastPersistWriter(folder / "dcp"), planner=planner)
    dcp.save(state, storage_writer=FastPersistHuggingFaceWriter(folder / "huggingface"), planner=planner)
    with fp.Checkpointer(folder / "run", sharded=True, process_group=dist.group.WORLD) as checkpointer:
        checkpointer.save(1, state)
        writer = FastPersistWriter()
        future: Any = dcp.async_save(
            state,
            checkpoint_id=str(folder / "async"),
            storage_writer=writer,
            planner=FastPersistSavePlanner(),
            process_group=dist.new_group(backend="gloo"),
        )
        for one in local(state).values():
            one.zero_()  # volatile without an optimizer: both have copied it
        future.result(PATIENCE_S)
        writer.close()
    assert host_portrait(local(state)) != expected
    for reader in (
        FastPersistReader(folder / "dcp"),
        FastPersistReader(folder / "async"),
        dcp.FileSystemReader(folder / "dcp"),
        FastPersistHuggingFaceReader(folder / "huggingface"),
    ):
        target = shards(mesh, 0)
        dcp.load(target, storage_reader=reader)
        expect_on(device_of(rank), local(target))
        assert host_portrait(local(target)) == expected
    target = shards(mesh, 0)
    fp.Checkpointer(folder / "run", sharded=True, process_group=dist.group.WORLD).load(into=target)
    assert host_portrait(local(target)) == expected
    turned = shards(mesh, 0)
    dcp.load({"rows": turned["columns"], "columns": turned["rows"]}, storage_reader=FastPersistReader(folder / "dcp"))
    assert torch.equal(turned["rows"].to_local().cpu(), target["rows"].to_local().cpu())
    assert torch.equal(turned["columns"].to_local().cpu(), target["columns"].to_local().cpu())


def one_rank_reads_what_two_have_saved(rank: int, folder: Path) -> None:
    mesh = init_device_mesh(DEVICE.type, (1,))
    target = shards(mesh, 0)
    fp.Checkpointer(folder / "run", sharded=True, process_group=dist.group.WORLD).load(into=target)
    expect_on(device_of(rank), local(target))
    assert host_portrait(local(target)) == host_portrait(local(shards(mesh, 1)))
