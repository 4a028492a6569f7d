"""A program of two ranks that save to and load from one file by the engine "cufile", over the doubles.

    python -m support.gpudirect_ranks DIRECTORY what      # a name of WORK; prints JSON: what each rank has found

A process of its own, because ranks are forks, and the children of a process that has used CUDA cannot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cuda_double import read_storage
from support.cufile_double import SAYS_P2P, CuFileDouble, cufile_double
from support.device_states import Stage, device_stage, device_state
from support.process_groups import run_ranks

import fastpersist as fp
from fastpersist.distributed import replica_check
from fastpersist.transfer import gpudirect

MIB = 1 << 20
SIZES = [3 * MIB, 100, 2 * MIB + 4096 + 5, 5000, MIB]


class Rank:
    """What one rank works with."""

    def __init__(self, stage: Stage, library: CuFileDouble, directory: Path) -> None:
        self.stage = stage
        self.library = library
        self.directory = directory
        self.group = dist.group.WORLD
        self.state, self.contents = device_state(SIZES)

    @property
    def path(self) -> Path:
        return self.directory / "x.pt"

    def found(self, engine: str, loaded: dict[str, Any]) -> dict[str, Any]:
        """Say what was seen until now, for the other side of a pipe."""
        library = self.library
        return {
            "engine": engine,
            "is_equal": {name: read_storage(loaded[name]._untyped_storage) for name in self.contents} == self.contents,
            "write_count": library.call_count("cuFileWrite"),
            "read_count": library.call_count("cuFileRead"),
            "host_transfer_count": library.host_transfer_count,
            "copied_to_host_bytes": self.stage.cuda.copied_to_host_bytes,
            "violations": library.violations,
        }


def _bytes_on_the_host(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.frombuffer(bytearray(read_storage(storage)), dtype=torch.uint8)


@contextmanager
def _rank(directory: Path) -> Iterator[Rank]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpudirect, "_MODULES", "/proc/self")
        with device_stage(patch) as stage:
            stage.allow_loading()
            patch.setattr(
                replica_check, "byte_tensor", _bytes_on_the_host
            )  # a torch without CUDA views no device's memory
            library = cufile_double()
            library.set_way(SAYS_P2P)
            yield Rank(stage, library, directory)


def _save_and_load(rank: Rank, engine: str, **options: Any) -> dict[str, Any]:
    report = fp.save(rank.state, rank.path, engine=engine, process_group=rank.group, **options)
    return rank.found(report.engine, _load(rank, engine))


def _named(rank: Rank) -> dict[str, Any]:
    """Save once more, by another engine, what the file can be compared with."""
    found = _save_and_load(rank, "cufile", checksum=False)
    other = rank.directory / "auto" / rank.path.name
    other.parent.mkdir(exist_ok=True)
    fp.save(rank.state, other, engine="auto", checksum=False, process_group=rank.group)
    return found


def _load(rank: Rank, engine: str) -> dict[str, Any]:
    loaded: dict[str, Any] = fp.load(rank.path, weights_only=False, engine=engine, process_group=rank.group)
    return loaded


def _owner_of(rank: Rank) -> torch.optim.Optimizer:
    """Return an optimizer that owns the state: what no optimizer owns is the first rank's to write."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    rank.stage.own(rank.state, parameter)
    return torch.optim.SGD([parameter], lr=0.1)


def _save_async(rank: Rank) -> dict[str, Any]:
    named = {"optimizer": _owner_of(rank), "engine": "cufile", "checksum": False}
    fp.save_async(rank.state, rank.path, process_group=rank.group, **named).result()
    return rank.found("", _load(rank, "cufile"))


def _checkpointer(rank: Rank) -> dict[str, Any]:
    named = {"optimizer": _owner_of(rank), "process_group": rank.group, "engine": "cufile"}
    with fp.Checkpointer(rank.directory / "root", **named) as checkpoints:
        checkpoints.save(1, rank.state).result()
        engine = checkpoints.stats()[-1].engine
        return rank.found(engine, checkpoints.load(weights_only=False))


def _one_rank_fails(rank: Rank) -> dict[str, Any]:
    if rank.group.rank() == 1:
        rank.library.fail("cuFileWrite", 2, 5034)
    try:
        _save_and_load(rank, "cufile", checksum=False)
    except fp.FastPersistError as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "left": sorted(each.name for each in rank.directory.iterdir()),
        }
    return {}


WORK: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "named": _named,
    "checksums": lambda rank: _save_and_load(rank, "cufile"),
    "auto": lambda rank: _save_and_load(rank, "auto", checksum=False),
    "async": _save_async,
    "checkpointer": _checkpointer,
    "failure": _one_rank_fails,
}


def main() -> None:
    """Do what the command line says."""
    directory, what = Path(sys.argv[1]), sys.argv[2]

    def work(_rank_number: int, _count: int) -> dict[str, Any]:
        with _rank(directory) as rank:
            return WORK[what](rank)

    print(json.dumps(run_ranks(2, work, timeout_s=200)))


if __name__ == "__main__":
    main()
