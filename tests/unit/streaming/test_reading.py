"""Memory for weights, and what is read to it: values where the file has them, at the addresses that they need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.streamed_models import (
    Blocks,
    expect_same,
    hand_made_safetensors,
    least_budget,
    loaded_whole,
    on_meta,
    save_weights,
)
from torch import nn

import fastpersist as fp
from fastpersist.streaming.reading import Memory, new_memory

pytestmark = pytest.mark.usefixtures("small_units")
CPU = torch.device("cpu")


def watched(model: nn.Module) -> list[tuple[str, int, torch.Tensor]]:
    """Note name, address and values of each weight of a module whenever it is called."""
    seen: list[tuple[str, int, torch.Tensor]] = []
    for name, module in model.named_modules():
        if list(module._parameters) or list(module._buffers):

            def look(module: nn.Module, arguments: object, name: str = name) -> None:
                for local, each in (*module._parameters.items(), *module._buffers.items()):
                    if each is not None:
                        seen.append((f"{name}.{local}", each.data_ptr(), each.detach().clone()))

            module.register_forward_pre_hook(look)
    return seen


@pytest.mark.parametrize("budget", ["least", "10MiB"])
def test_addresses_are_those_of_a_mapped_file(budget: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48)) for _ in range(5))).eval()

    path = save_weights(build(), tmp_path / "model.safetensors")
    whole, model = loaded_whole(build(), path), on_meta(build())
    expected = dict((*whole.named_parameters(), *whole.named_buffers()))
    size = least_budget(lambda: on_meta(build()), path) if budget == "least" else budget
    with fp.stream(model, path, budget_bytes=size) as stream, torch.no_grad():
        seen = watched(model)
        for _ in range(3):
            model(torch.ones(2, 48))
        offsets = {weight.name: weight.pieces[0].offset_bytes for weight in stream._weights}
    assert len(seen) == 3 * len(expected)
    for name, address, values in seen:
        expect_same(values, expected[name].detach())
        assert address % 4096 == offsets[name] % 4096


@pytest.mark.parametrize("padding", range(1, 8))
@pytest.mark.parametrize("gap", [0, 3, 70_001])
def test_weights_at_odd_offsets_are_aligned(padding: int, gap: int, tmp_path: Path) -> None:
    whole = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4)))
    path = tmp_path / "odd.safetensors"
    hand_made_safetensors(
        {name: each.detach() for name, each in whole.named_parameters()}, path, padding=padding, gap=gap
    )
    for budget in (least_budget(lambda: on_meta(nn.Sequential(*(nn.Linear(48, 48) for _ in range(4)))), path), "10MiB"):
        model = on_meta(nn.Sequential(*(nn.Linear(48, 48) for _ in range(4))))
        with fp.stream(model, path, budget_bytes=budget) as stream, torch.no_grad():
            seen = watched(model)
            model(torch.ones(2, 48))
            model(torch.ones(2, 48))
            odd = {weight.name for weight in stream._weights if weight.pieces[0].offset_bytes % 4}
        assert len(seen) == 16
        for name, address, values in seen:
            assert address % (64 if name in odd else 4) == 0
            expect_same(values, whole.get_parameter(name).detach())


def test_empty_and_scalar_weights_at_the_end_of_a_file(tmp_path: Path) -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 64)
            self.b = nn.Linear(64, 64)
            self.c = nn.Linear(64, 64)
            self.none = nn.Parameter(torch.empty(0, 64))
            self.one = nn.Parameter(torch.tensor(2.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x))) * self.one + nn.functional.linear(x, self.none).sum()

    whole = Ends()
    path = tmp_path / "a.safetensors"
    for last in ("none", "one"):
        order = sorted(whole.state_dict(), key=lambda name, last=last: name == last)  # type: ignore[misc]
        hand_made_safetensors({name: whole.state_dict()[name] for name in order}, path)
        loaded = loaded_whole(Ends(), path)
        for budget in (least_budget(lambda: on_meta(Ends()), path), "10MiB"):
            model = on_meta(Ends())
            with fp.stream(model, path, budget_bytes=budget), torch.no_grad():
                for _ in range(3):
                    expect_same(model(torch.ones(2, 64)), loaded(torch.ones(2, 64)))


@pytest.mark.parametrize("engine", ["uring", "libaio", "threads", "threads-buffered"])
def test_every_engine_reads_the_same(engine: str, tmp_path: Path) -> None:
    path = save_weights(Blocks(), tmp_path / "model.safetensors")
    if why_not := next(probe.why_not for probe in fp.engines(tmp_path) if probe.name == engine):
        pytest.skip(f"{engine}: {why_not}")
    whole, ids = loaded_whole(Blocks(), path), torch.tensor([3, 5])
    model = on_meta(Blocks())
    with (
        fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Blocks()), path), engine=engine) as stream,
        torch.no_grad(),
    ):
        for _ in range(3):
            expect_same(model(ids), whole(ids))
        assert stream.stats().engine == engine


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_dtypes_of_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    table = torch.randn(50, 32).to(dtype)
    save_file({"weight": table}, tmp_path / "a.safetensors")
    model = nn.Embedding(50, 32, device="meta", dtype=dtype)
    ids = torch.tensor([[3, 49], [0, 3]])
    with fp.stream(model, tmp_path, budget_bytes=1000) as stream:
        expect_same(model(ids), table[ids])
        assert stream.stats().read_bytes == 3 * 32 * dtype.itemsize


def test_blocks_of_the_ring_are_cut_from_one_memory() -> None:
    memory = Memory(3 * 4096, CPU)
    first = memory.in_ring([4096, 4096])
    assert first is not None
    room, (one, other) = first
    assert memory.in_ring([8192]) is None
    assert other.data_ptr() - one.data_ptr() == 4096
    assert one.data_ptr() % 4096 == 0
    assert memory.is_in_ring(one[7:].view(-1))
    assert not memory.is_in_ring(new_memory(4096, CPU))
    memory.give_back(room)
    assert memory.in_ring([3 * 4096]) is not None
    assert Memory(0, CPU).in_ring([1]) is None
