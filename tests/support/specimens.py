"""One object of every kind that a checkpoint can hold, by name; made anew and equal each time.

`SPECIMENS[name].made()` is a context manager, because some objects need a world around them (a process group).
`weights_only` says whether torch.load takes a file of it by default; `types` are what has to be allowed then.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from support.torch_release import TORCH


@dataclass(frozen=True)
class Specimen:
    make: Callable[[], Any]
    weights_only: bool = True
    world: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @contextlib.contextmanager
    def made(self) -> Iterator[Any]:
        """Give the object, and keep the world it needs until the block ends."""
        with self.world():
            torch.manual_seed(7)
            yield self.make()


SPECIMENS: dict[str, Specimen] = {}


def specimen(make: Callable[[], Any]) -> Callable[[], Any]:
    SPECIMENS[make.__name__] = Specimen(make)
    return make


def unsafe_specimen(make: Callable[[], Any]) -> Callable[[], Any]:
    SPECIMENS[make.__name__] = Specimen(make, weights_only=False)
    return make


# --------------------------------------------------------------------------------------------- classes


class PlainSubclass(torch.Tensor):
    """A subclass with storage of its own and an attribute."""


class Wrapper(torch.Tensor):
    """A subclass without storage: two tensors and a number stand for it."""

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor, scale: float) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype, device=high.device)

    def __init__(self, high: torch.Tensor, low: torch.Tensor, scale: float) -> None:
        self.high = high
        self.low = low
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["high", "low"], self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].high, args[0].low, args[0].scale)
        raise NotImplementedError(func)


class ReducedWrapper(Wrapper):
    """A wrapper that reduces itself: its constructor gets the tensors while the pickle is being read."""

    def __reduce_ex__(self, protocol: object) -> Any:
        return ReducedWrapper, (self.high, self.low, self.scale)


class Watcher:
    """Looks at the values of its tensor the moment it is unpickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "sum": float(self.tensor.double().sum())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]
        seen = float(self.tensor.double().sum())
        if seen != state["sum"]:
            raise ValueError(f"__setstate__ saw a tensor of sum {seen}, not {state['sum']}")


@dataclass
class Settings:
    name: str
    rate: float
    when: datetime.timedelta


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.GELU())
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def train(network: Network, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        network(torch.arange(8) + step % 3).square().mean().backward()
        optimizer.step()


def trained() -> Network:
    torch.manual_seed(3)
    network = Network()
    train(network, torch.optim.SGD(network.parameters(), lr=0.5))
    return network


@contextlib.contextmanager
def single_process_group() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------- specimens


@specimen
def parameters() -> Any:
    frozen = torch.nn.Parameter(torch.randn(2), requires_grad=False)
    return {"weight": torch.nn.Parameter(torch.randn(3, 5)), "frozen": frozen}


@specimen
def state_dict() -> Any:
    return Network().state_dict()


@unsafe_specimen
def module() -> Any:
    return Network()


@specimen
def adam_state() -> Any:
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    train(network, optimizer)
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}


@specimen
def momentum_state() -> Any:
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    train(network, optimizer)
    return optimizer.state_dict()


@unsafe_specimen
def optimizer_object() -> Any:
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), amsgrad=True)
    train(network, optimizer)
    return [network, optimizer]


@specimen
def views() -> Any:
    base = torch.arange(100.0)
    return [base[10:20], base.view(10, 10)[:, 3], base, base[::7], base[99:]]


@specimen
def one_view_of_a_large_storage() -> Any:
    return torch.arange(5000)[17:19]


@specimen
def non_contiguous() -> Any:
    image = torch.randn(2, 3, 4, 5)
    return [image.to(memory_format=torch.channels_last), image.transpose(1, 3), torch.randn(1).expand(4, 4)]


@specimen
def scalars_and_empties() -> Any:
    cut = torch.empty(0)
    return {"scalar": torch.tensor(3.5), "empty": [torch.empty(0), torch.empty(3, 0, 2)], "cut": [cut, cut[:0]]}


@specimen
def resized_storages() -> Any:
    shrunk = torch.randn(50)
    shrunk.resize_(3)
    emptied = torch.randn(9)
    emptied.untyped_storage().resize_(0)
    return [shrunk, torch.empty(0).set_(emptied.untyped_storage())]


@specimen
def conjugated() -> Any:
    numbers = torch.randn(4, 3, dtype=torch.complex64)
    return [numbers.conj(), numbers, numbers.clone().conj().T]


@specimen
def negated() -> Any:
    return torch.randn(5, dtype=torch.complex128).conj().imag


@specimen
def quantized() -> Any:
    values = torch.randn(4, 6)
    scales = torch.rand(4) + 0.1
    zeros = torch.zeros(4, dtype=torch.int64)
    return [
        torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
        torch.quantize_per_tensor(values, 0.2, 0, torch.qint32),
        torch.quantize_per_channel(values, scales, zeros, 0, torch.quint8),
        torch.quantize_per_channel(values.abs(), scales, zeros.float(), 0, torch.quint4x2),
    ]


@specimen
def sparse_coo() -> Any:
    coalesced = torch.eye(4).to_sparse()
    return [coalesced, torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True)]


@specimen
def sparse_compressed() -> Any:
    dense = torch.diag(torch.arange(4.0))
    return [
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 2)),
        dense.to_sparse_bsc((2, 2)),
    ]


def nested_strided() -> Any:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])


SPECIMENS["nested_strided"] = Specimen(nested_strided, weights_only=TORCH < (2, 15))


@unsafe_specimen
def nested_jagged() -> Any:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)


@specimen
def meta() -> Any:
    return {"meta": torch.empty(3, 4, device="meta"), "real": torch.ones(2)}


@unsafe_specimen
def plain_subclass() -> Any:
    tensor = torch.randn(3).as_subclass(PlainSubclass)
    tensor.note = "kept"
    return tensor


@unsafe_specimen
def wrapper_subclass() -> Any:
    high = torch.randn(3)
    return [Wrapper(high, torch.randn(3), 0.5), high]


@unsafe_specimen
def self_reducing_wrapper() -> Any:
    return ReducedWrapper(torch.randn(3), torch.randn(3), 0.25)


@specimen
def attributes() -> Any:
    tensor, parameter = torch.randn(3), torch.nn.Parameter(torch.randn(2))
    tensor.note, tensor.other = "kept", torch.ones(2)
    parameter.tag = {"shard": 3}
    return [tensor, parameter]


@unsafe_specimen
def watched_values() -> Any:
    return [Watcher(torch.randn(1000)), Watcher(torch.arange(10))]


@specimen
def plain_values() -> Any:
    return {
        "numbers": [None, True, -1, 1 << 70, 0.1, float("nan"), complex(1, -2)],
        "text": ["", "é\n", "x" * 70_000, b"bytes", bytearray(b"array")],
        "containers": [(), (1,), [[]], {}, {1, 2}, collections.OrderedDict(a=1), collections.Counter("aab")],
        "torch": [torch.float8_e5m2, torch.device("cuda:3"), torch.Size([2, 3])],
    }


@unsafe_specimen
def python_objects() -> Any:
    return [Settings("run", 0.1, datetime.timedelta(seconds=3)), pathlib.PurePosixPath("/a"), frozenset({1})]


@specimen
def shared_containers() -> Any:
    part = [torch.ones(2)]
    loop: dict[str, Any] = {"again": part}
    loop["self"] = loop
    return [part, part, loop]


@specimen
def raw_storages() -> Any:
    return [torch.arange(4).untyped_storage(), torch.randn(3)]


@unsafe_specimen
def typed_storage() -> Any:
    return torch.TypedStorage([1.0, 2.0], dtype=torch.float64)


@specimen
def deep_nesting() -> Any:
    tree: Any = torch.ones(1)
    for level in range(100):
        tree = {"next": tree} if level % 2 else [tree, level]
    return tree


@specimen
def many_storages() -> Any:
    return {f"layer.{index}": torch.full((index % 5,), float(index)) for index in range(3000)}


@specimen
def larger_than_the_ring_chunks() -> Any:
    return [torch.arange(3_000_000), torch.randint(0, 255, (9_000_001,), dtype=torch.uint8)]


@specimen
def result_of_autograd() -> Any:
    return torch.zeros(3, requires_grad=True) * 2


def _dtensor() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    return {"sharded": distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])}


SPECIMENS["dtensor"] = Specimen(_dtensor, weights_only=False, world=single_process_group)


def _every_dtype() -> Iterator[torch.dtype]:
    unsavable = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str):
        if str(dtype) not in unsavable:
            yield dtype


DTYPES = list(_every_dtype())
"""Every dtype of the installed torch that torch.save takes, quantized ones included."""


def tensor_of(dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of any dtype whose bytes are all different from their neighbours."""
    return (torch.arange(64) * 37 % 251).to(torch.uint8).view(dtype)


for _dtype in DTYPES:
    SPECIMENS[str(_dtype).removeprefix("torch.")] = Specimen(lambda dtype=_dtype: tensor_of(dtype))
