"""The golden files of format version 1: small files that this and every later version must load and write alike.

    PYTHONPATH=tests python tests/support/golden.py   # writes those that are missing, touches none that is there

Everything in them is exact and typed out here, so that no random generator or rounding can change it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DIRECTORY = Path(__file__).resolve().parents[1] / "data" / "format-v1"


def training() -> Any:
    weight = torch.arange(12, dtype=torch.float32).view(3, 4) / 4
    moment = torch.arange(12, dtype=torch.float32).view(3, 4).t()
    return {
        "model": collections.OrderedDict([("weight", weight), ("tied", weight), ("row", weight[1])]),
        "optimizer": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": moment, "exp_avg_sq": moment[1:, ::2]}},
            "param_groups": [{"lr": 0.001, "betas": (0.9, 0.999), "params": [0]}],
        },
        "parameter": torch.nn.Parameter(torch.tensor([1.5, -2.0])),
        "step": 7,
        "name": "golden é",
    }


def dtypes() -> Any:
    codes = torch.arange(16, dtype=torch.uint8)
    names = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    names += ["complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"]
    tensors: dict[str, Any] = {name: (codes % 2).clone().view(getattr(torch, name)) for name in names}
    tensors |= {"scalar": torch.tensor(3), "empty": torch.empty(0, 2), "meta": torch.empty(5, device="meta")}
    tensors["conj"] = torch.tensor([1 + 2j]).conj()
    tensors["sparse"] = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), is_coalesced=True, check_invariants=True)
    return tensors


def weights() -> dict[str, torch.Tensor]:
    return {
        "pages": torch.arange(2048, dtype=torch.int32),
        "bias": torch.tensor([0.5, -1.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 4),
    }


# File name, object, and how it is saved.
GOLDEN: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "training.pt": (training, {}),
    "dtypes.pt": (dtypes, {}),
    "no-checksums.pt": (training, {"checksum": False}),
    "nothing.pt": (lambda: None, {}),
    "weights.safetensors": (weights, {"metadata": {"format": "pt"}}),
    "no-checksums.safetensors": (weights, {"checksum": False}),
}


CHECKPOINTS = DIRECTORY.parent / "checkpoints-v1"
"""A root of two committed steps, as a Checkpointer left it, with the hidden remains of a save that was killed."""

RANK_STATE = {"position": 42, "rng": torch.arange(3, dtype=torch.uint8)}


def checkpoint(step: int) -> Any:
    return {**training(), "step": step}


def make_checkpoints() -> None:
    import fastpersist

    with fastpersist.Checkpointer(CHECKPOINTS) as checkpointer:
        for step in (7, 123456789):
            checkpointer.save(step, checkpoint(step), rank_state=RANK_STATE, metrics={"loss": 0.25, "odd é": math.inf})
    (CHECKPOINTS / ".lock").unlink()
    left = CHECKPOINTS / ".step-00000008.pending-0123456789abcdef"
    left.mkdir()
    (left / "state.pt").write_bytes(bytes(100))


PARTS = DIRECTORY.parent / "parts-v1"
"""The roots `a` and `b` of two ranks that share no file system, with one step in parts."""

PARTS_STEP = 7


def parted() -> Any:
    return {"weight": torch.arange(16 * 1024, dtype=torch.int32), "step": PARTS_STEP}


def save_parts(directory: Path) -> None:
    """Save a step as two ranks, below a root each; what lies in parts would be larger, were it not told otherwise."""
    import torch.distributed as dist
    from support.process_groups import run_ranks

    import fastpersist
    from fastpersist.distributed import replica_check

    def work(rank: int, _count: int) -> None:
        replica_check.CUT_BYTES_MIN = 64 << 10
        root = directory / "ab"[rank]
        state, group = parted(), dist.group.WORLD
        with fastpersist.Checkpointer(
            root, constant=state["weight"], process_group=group, writers="all", node_local="parts"
        ) as checkpointer:
            checkpointer.save(PARTS_STEP, state, metrics={"loss": 0.25})

    run_ranks(2, work)
    for root in "ab":
        (directory / root / ".lock").unlink(missing_ok=True)


def main() -> None:
    import fastpersist

    if not PARTS.exists():
        save_parts(PARTS)
        print(f"wrote {PARTS.name}")
    if not CHECKPOINTS.exists():
        make_checkpoints()
        print(f"wrote {CHECKPOINTS.name}")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, (make, options) in GOLDEN.items():
        if not (DIRECTORY / name).exists():
            fastpersist.save(make(), DIRECTORY / name, **options)
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
