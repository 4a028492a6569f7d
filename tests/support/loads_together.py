"""What tests of ranks that load one file together share: what is loaded, and a watch on how."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist

from fastpersist import _native
from fastpersist.distributed import shared_reader
from fastpersist.distributed.shared_reader import SharedReader
from fastpersist.transfer.reader import Extents, ReadResult

MIB = 1 << 20


def content(seed: int = 0) -> dict[str, Any]:
    """Make large and small tensors, two of them in one storage, other dtypes, and what is no tensor."""
    torch.manual_seed(seed)
    wide = torch.randn(900_001)
    return {
        "wide": wide,
        "same": wide[:1000].view(10, 100),
        "half": torch.randn(1100, 1000).to(torch.bfloat16),
        "small": [torch.arange(number + 1) for number in range(20)],
        "empty": torch.empty(0),
        "large": torch.randint(0, 255, (3 * MIB + 17,), dtype=torch.uint8),
        "name": "run 7",
    }


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@dataclasses.dataclass
class Watched:
    """What the reader does in this rank."""

    ways: list[str]
    asked_bytes: list[int]


def watch(way: str = "auto", *, node: str | None = None, cached_bytes: int | None = None) -> Watched:
    """In a rank: choose the way, the node, and how much is cached; pieces are small; note what is done."""
    watched = Watched([], [])
    agreed_way, read_extents = SharedReader._agreed_way, shared_reader.read_extents

    def noted_way(*arguments: Any) -> Any:
        found = agreed_way(*arguments)
        watched.ways.append(found.name)
        return found

    def noted_read(fd: int, path: str, extents: Extents, **options: Any) -> ReadResult:
        watched.asked_bytes.append(sum(size for _, size in extents.places()))
        return read_extents(fd, path, extents, **options)

    patched: Any = shared_reader
    patched.SharedReader._agreed_way = noted_way
    patched.SharedReader = functools.partial(SharedReader, way=way)
    patched.read_extents = noted_read
    patched._WINDOW_BYTES = 4 * MIB
    if node is not None:
        patched.loopback_place = lambda: (node, "")
    if cached_bytes is not None:
        patched._native = type("Native", (), {**vars(_native), "cached_bytes": staticmethod(lambda fd: cached_bytes)})
    return watched


class Model(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(600, 700)
        self.norm = torch.nn.BatchNorm1d(700)
        self.head = torch.nn.Linear(700, 500)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.body(inputs)))
        return out


def trained(seed: int, steps: int) -> tuple[Model, torch.optim.Adam]:
    model = Model(seed)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 600)).square().mean().backward()
        optimizer.step()
    return model, optimizer
