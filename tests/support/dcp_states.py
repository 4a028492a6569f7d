"""States for tests of DCP in one process: made, saved, loaded and compared; what DCP warns of, and what it raises."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.torch_release import TORCH
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from fastpersist.commit.step_listing import read_manifest
from fastpersist.formats.manifest import FileEntry, encode_manifest
from fastpersist.integrations.torch_dcp import FastPersistReader, FastPersistWriter

PART = "__0_0.distcp"

IGNORED = (
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore:Detected an existing checkpoint:UserWarning",
    "ignore:TypedStorage is deprecated:UserWarning",  # torch 2.7, of its own writer
)

tells_why = pytest.mark.skipif(
    (2, 9) <= TORCH < (2, 12), reason="with this torch, dcp.load does not say why there are no metadata"
)
has_use_collectives = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="this torch has no use_collectives="
)

PLACEMENTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "rows": (1, (Shard(0),)),
    "columns": (1, (Shard(1),)),
    "replicas": (1, (Replicate(),)),
    "blocks": (2, (Shard(0), Shard(1))),
    "hybrid": (2, (Replicate(), Shard(0))),
}
"""Ways to lay out the tensors of a state: the dimensions of the mesh, and what is done along each."""


def make_state(seed: int = 1) -> dict[str, Any]:
    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": rand(300, 400),
        "on blocks": rand(1 << 17),
        "bias": rand(5),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "transposed": rand(30, 40).t(),
        "strided": rand(40, 50)[::2, ::3],
        "view": rand(100, 10)[3:7],
        "parameter": torch.nn.Parameter(rand(7)),
        "conjugate": torch.complex(rand(9), rand(9)).conj(),
        "negative": torch.complex(rand(9), rand(9)).conj().imag,
        "many": [
            (rand(33) * 100).to(dtype)
            for dtype in (
                *(torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
                *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
                *(torch.float8_e4m3fn, torch.float8_e5m2),
            )
        ],
        "nested": {"text": f"seed {seed}", "number": seed, "list": [torch.full((3,), seed), None, 2.5]},
    }


def blank(state: Any) -> Any:
    """Return a state of the same shape with nothing in it."""

    def emptied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return None if leaf is None else type(leaf)()

    return tree_map(emptied, state)


def portrait(state: Any) -> list[Any]:
    """Return every value, tensors as their bits."""

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        plain = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
        plain = plain.resolve_conj().resolve_neg().contiguous()
        return plain.dtype, tuple(plain.shape), bytes(plain.reshape(-1).view(torch.uint8).numpy())

    return [drawn(leaf) for leaf in tree_leaves(state)]


def loaded(path: Path, reader: Any, like: Any) -> list[Any]:
    target = blank(like)
    dcp.load(target, storage_reader=reader(path))
    return portrait(target)


def save(state: Any, path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=FastPersistWriter(path, **options))


def load(path: Path, like: Any, **options: Any) -> Any:
    target = blank(like)
    dcp.load(target, storage_reader=FastPersistReader(path, **options))
    return target


def failures(error: BaseException) -> list[BaseException]:
    """Return what the ranks raised."""
    return [raised for raised, _ in error.failures.values()]  # type: ignore[attr-defined]


def failure_of(call: Any) -> BaseException:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        call()
    return failures(caught.value)[0]


def raised_by(call: Callable[[], object]) -> dict[int, BaseException]:
    """Return what the ranks have raised, by rank, as DCP tells every one of them."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        call()
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


def place_of(path: Path, name: str) -> Any:
    metadata = FastPersistReader(path).read_metadata()
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def safetensors_place(name: str, shape: list[int], dtype: torch.dtype) -> Any:
    """Return a place as DCP notes it for tensors of safetensors, in this torch's way."""
    found_class = pytest.importorskip("torch.distributed.checkpoint._hf_utils")._HFStorageInfo
    place = (0, 8) if "offset" in inspect.signature(found_class).parameters else ()  # torch 2.8
    return found_class(name, *place, torch.Size(shape), dtype)


def put_metadata(step: Path, data: bytes) -> None:
    """Replace the metadata of a step, and what its manifest says of them: who does that can write both."""
    (step / ".metadata").write_bytes(data)
    manifest = read_manifest(str(step))
    files = [entry for entry in manifest.files if entry.name != ".metadata"]
    entry = FileEntry(".metadata", len(data), zlib.crc32(data))
    (step / "MANIFEST.json").write_bytes(encode_manifest(replace(manifest, files=(*files, entry))))


SMALL = {"a": torch.arange(1 << 16), "b": torch.ones(7), "c": "text"}
"""A state whose tensor "a" begins at a block of the part file, and "b" does not."""

WRITERS = {
    "ours": FastPersistWriter,
    "torch's": dcp.FileSystemWriter,
    "torch's with 2 threads": lambda path: dcp.FileSystemWriter(path, thread_count=2),
    "torch's, a file an item": lambda path: dcp.FileSystemWriter(path, single_file_per_rank=False),
}
