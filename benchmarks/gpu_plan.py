"""Divides the time of gpu.py among its parts, and chooses sizes: arithmetic only.

This module measures nothing and imports nothing; gpu.py and its part "overlap" use the results.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BYTES_PER_PARAMETER",
    "SHARES",
    "STEP_OF_WRITE",
    "overlap_blocks",
    "overlap_parameters",
    "overlap_s",
    "part_budget_s",
    "part_limit_s",
    "state_mib",
]

_MIB = 1 << 20

SHARES = {"save": 0.22, "overlap": 0.38, "load": 0.16, "tmpfs": 0.09, "memory": 0.08, "gpudirect": 0.07}
"""How the time is divided, in this order. What libcufile may never return from is last."""

_START_S = 15.0  # a process imports torch, makes a context, fills a state
_LEAST_S = 5.0
_KEPT_S = 25.0  # for each part to come, when one takes longer than it should: a start and the first runs

BYTES_PER_PARAMETER = 6
"""Of the training: bf16, the parameter and its two moments."""

STEP_OF_WRITE = 1.2
"""A step takes so many times what a write takes: the write fits, as the target has it."""

_TARGET_PARAMETERS = 1_000_000_000
_RATE_OF_DISK = 0.9  # what a save gets of the disk, as the target has it
_PEER_BYTES_PER_S = 1e9  # dcp.async_save writes by one thread, through the page cache
_LOAD_BYTES_PER_S = 1.5e9  # torch.load and dcp.load, which look once at what was saved
_BLOCKS = ((3, 3), (2, 3), (2, 2), (1, 3), (1, 2))  # rounds, and steps of each way in a round; the most first


def part_budget_s(part: str, left_s: float, parts_to_come: Sequence[str]) -> float | None:
    """Return in which time a part may begin rounds: its share of what is left, less its start. None: too little is.

    Args:
        part: The name of the part.
        left_s: The seconds left for this part and all after it.
        parts_to_come: The names of this part and all after it.
    """
    if left_s < _LEAST_S:
        return None
    share = SHARES[part] / sum(SHARES[one] for one in parts_to_come)
    return max(left_s * share - _START_S, _LEAST_S)


def part_limit_s(budget_s: float, left_s: float, parts_after: int) -> float:
    """Return after how long a part is killed: a round that is under way may end, but those to come get their turn.

    Args:
        budget_s: The seconds that `part_budget_s` returned.
        left_s: The seconds left for this part and all after it.
        parts_after: The number of parts after this one; the last part may end a little late.
    """
    kept_s = min(parts_after * _KEPT_S, left_s * 0.45) if parts_after else -_START_S
    return min(budget_s * 1.4 + 3 * _START_S, left_s - kept_s)


def state_mib(write_bytes_per_s: float, budget_s: float, disk_bytes: int, host_bytes: int) -> int:
    """Return the size of the state that is saved and loaded: about a second of writing, with the usual time for all.

    Args:
        write_bytes_per_s: The write rate of the disk.
        budget_s: The seconds for all parts.
        disk_bytes: Free space on the disk.
        host_bytes: Memory that could still be taken.
    """
    wanted_bytes = write_bytes_per_s * budget_s / 300
    return max(int(min(wanted_bytes, disk_bytes // 6, host_bytes // 6, 8 << 30)) // _MIB, 64)


def overlap_s(parameter_count: float, write_bytes_per_s: float, rounds: int, step_count: int) -> float:
    """Return about how long the part "overlap" takes, its start not counted.

    Three saves alone, of which the first pins memory; two steps of each way as a warm-up, and one more of those that
    save, whose files are then loaded; the rounds.
    """
    size_bytes = parameter_count * BYTES_PER_PARAMETER
    write_s = size_bytes / (_RATE_OF_DISK * write_bytes_per_s)
    step_s = STEP_OF_WRITE * write_s
    peer_step_s = max(step_s, size_bytes / min(_PEER_BYTES_PER_S, _RATE_OF_DISK * write_bytes_per_s))
    counted = rounds * step_count
    steps_s = (2 + counted) * step_s + (3 + counted) * step_s + (3 + counted) * peer_step_s
    return 3.5 * write_s + steps_s + 2 * size_bytes / _LOAD_BYTES_PER_S


def overlap_parameters(
    write_bytes_per_s: float, budget_s: float, *, disk_bytes: int, device_bytes: int, host_bytes: int
) -> tuple[int, str]:
    """Return how many parameters the training has, and, if they are fewer than the target's 10⁹, why.

    Args:
        write_bytes_per_s: The write rate of the disk.
        budget_s: The seconds for this part, its start not counted.
        disk_bytes: Free space on the disk: two checkpoints of each of two ways, and one to spare.
        device_bytes: Memory of the device: state, gradients, a copy and what was loaded, to compare.
        host_bytes: Memory that could still be taken: pinned by each of two ways, and page cache.
    """
    least_rounds, least_steps = _BLOCKS[-1]
    most = {
        "": float(_TARGET_PARAMETERS),
        f"time for no more at {write_bytes_per_s / 1e9:.2f} GB/s": (
            budget_s / overlap_s(1, write_bytes_per_s, least_rounds, least_steps)
        ),
        f"room on the disk for no more ({disk_bytes} bytes)": disk_bytes / (5 * BYTES_PER_PARAMETER),
        f"memory of the device for no more ({device_bytes} bytes)": device_bytes / (5 * BYTES_PER_PARAMETER),
        f"host memory for no more ({host_bytes} bytes)": host_bytes / (4 * BYTES_PER_PARAMETER),
    }
    why = min(most, key=lambda reason: most[reason])
    return int(most[why]), why


def overlap_blocks(step_seconds: Sequence[float], left_s: float, rounds_max: int) -> tuple[int, int]:
    """Return how many rounds there are, and how many steps of each way a round has: the most that time allows.

    Args:
        step_seconds: The seconds that a step of each way takes.
        left_s: The seconds left for the rounds.
        rounds_max: The most rounds.
    """
    allowed = [block for block in _BLOCKS if block[0] <= max(rounds_max, 1)]
    fitting = (block for block in allowed if block[0] * block[1] * sum(step_seconds) <= left_s)
    return next(fitting, allowed[-1])
