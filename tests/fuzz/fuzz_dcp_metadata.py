"""Fuzz read_metadata: mutated metadata of DCP checkpoints, as files.

    python tests/fuzz/fuzz_dcp_metadata.py --seconds 5 --seed 1

Whatever the input, only FormatError may come out, in bounded time and memory.
"""

from __future__ import annotations

import collections
import os
import pickle
import random
from pathlib import Path, PurePosixPath

import torch
from fuzzing import main, mutated
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fastpersist.dcp.metadata import read_metadata
from fastpersist.errors import FormatError

GOLDEN = Path(__file__).parent.parent / "data" / "dcp-metadata"


def metadata_of(tensor_count: int, chunk_count: int) -> Metadata:
    """Describe tensors of which each is cut into so many chunks."""
    found = Metadata({"epoch": BytesStorageMetadata()}, {}, {}, StorageMeta(PurePosixPath("/runs/a"), "7c0e"))
    for number in range(tensor_count):
        name = f"model.{number}.weight"
        offsets = [torch.Size([3 * chunk, 0]) for chunk in range(chunk_count)]
        chunks = [ChunkStorageMetadata(offset, torch.Size([3, 4])) for offset in offsets]
        size = torch.Size([3 * chunk_count, 4])
        found.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
        found.planner_data[name] = ("model", number, "weight")
        for chunk, offset in enumerate(offsets):
            index = MetadataIndex(name, offset, chunk)
            found.storage_data[index] = _StorageInfo(f"__{chunk}_0.distcp", 64 * number, 1200)
    return found


SEEDS = [path.read_bytes() for path in sorted(GOLDEN.iterdir())]
SEEDS += [pickle.dumps(metadata_of(*counts), protocol) for counts in ((1, 1), (3, 4)) for protocol in (2, 4)]
LARGE = pickle.dumps(metadata_of(10, 50))

FILE = os.memfd_create("metadata")

outcomes: collections.Counter[str] = collections.Counter()


def make_input(rng: random.Random) -> bytes:
    return mutated(rng, LARGE if rng.random() < 0.1 else rng.choice(SEEDS), SEEDS)


def try_input(data: bytes) -> None:
    os.ftruncate(FILE, 0)
    os.pwrite(FILE, data, 0)
    try:
        read_metadata(f"/proc/self/fd/{FILE}")
        outcomes["read"] += 1
    except FormatError as error:
        outcomes["refused"] += 1
        str(error)


if __name__ == "__main__":
    # Linear, as the scan is: two bytes of input make objects of some hundred bytes.
    main(make_input, try_input, memory_bytes_max=lambda length: (20 << 20) + 500 * length)
    print(dict(outcomes))
