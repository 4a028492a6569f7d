"""States that name themselves: everything in the state of step n is computed from n.

So what a file holds says which save wrote it, and one wrong byte shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

import fastpersist as fp

SMALL_BYTES = 400_000
"""Seven requests with the small ring of support.forking, which has room for four."""


def make_state(step: int, size_bytes: int = SMALL_BYTES) -> dict[str, torch.Tensor]:
    """Return the state of a step, a dict that both formats can hold, of about `size_bytes`."""
    # Odd constants, multiplied modulo 2**64: other bytes in each step. Viewed as floats, some are NaN.
    numbers = torch.arange((size_bytes - 5_001) // 16) * 0x5851F42D4C957F2D
    numbers += torch.tensor(step + 1) * 0x14057B7EF767814F
    return {
        "step": torch.tensor(step),
        "weights": numbers.view(torch.float32),
        "nothing": torch.empty(0, 3),
        "moments": (numbers * 0x2545F4914F6CDD1D).view(torch.bfloat16),
        "bytes": numbers[:5_001].to(torch.uint8),
    }


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare dtype, shape and bits; unlike torch.equal, a NaN is itself."""
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
    )


def differences(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Name the tensors that are missing, superfluous or different in one bit."""
    return sorted(
        name
        for name in {*found, *wanted}
        if name not in found or name not in wanted or not same_bits(found[name], wanted[name])
    )


def load_step(path: Path, size_bytes: int = SMALL_BYTES) -> int:
    """Return the step a file holds; it must be that step's state in every bit, and verify must agree."""
    state = fp.load(path)
    step = int(state["step"])
    wrong = differences(state, make_state(step, size_bytes))
    assert not wrong, f"{path} says step {step}, but these tensors are not of that step: {wrong}"
    report = fp.verify(path)
    assert report.ok, report
    assert report.has_checksums
    return step


def pending_files(directory: Path) -> list[Path]:
    """List the files of unfinished saves in a directory."""
    return sorted(directory.glob(".*.pending-*"))
