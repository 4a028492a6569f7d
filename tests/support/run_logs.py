"""Roots with a log of events, as a run of any length would have left them; no checkpoint is written."""

from __future__ import annotations

import json
from pathlib import Path

EPOCH_S = 1.79e9
EVERY_S = 8.0
SIZE_BYTES = 1_490_000_000


def write_run(root: Path, save_count: int, *, ranks: int = 1, keep: int = 3, fails: tuple[int, ...] = ()) -> None:
    """Write the logs of a run that saved every tenth step.

    Args:
        root: The directory to make.
        save_count: The number of saves of each rank.
        ranks: The number of ranks. Each has its log; the last one takes three times as long to write as the others.
        keep: Steps that stay; earlier ones are removed.
        fails: The numbers of the saves of rank 0 that failed.
    """
    root.mkdir(parents=True)
    (root / "LATEST").write_text(f"step-{10 * (save_count - 1):08d}\n")
    for rank in range(ranks):
        name = "events.jsonl" if rank == 0 else f"events-rank-{rank:05d}.jsonl"
        with (root / name).open("w") as file:
            for number in range(save_count):
                file.writelines(
                    json.dumps(line) + "\n"
                    for line in _lines(
                        number, rank, slow=rank > 0 and rank == ranks - 1, fails=number in fails and rank == 0
                    )
                )
                if rank == 0 and number >= keep:
                    file.write(json.dumps(_line("removed", number, rank, 2.0, number - keep)) + "\n")


def _line(
    kind: str, number: int, rank: int, after_s: float, of: int | None = None, **figures: object
) -> dict[str, object]:
    step = 10 * (number if of is None else of)
    return {
        "event": kind,
        "time_s": EPOCH_S + EVERY_S * number + after_s,
        "step": step,
        "rank": rank,
        "path": f"step-{step:08d}",
        **figures,
    }


def _lines(number: int, rank: int, *, slow: bool, fails: bool) -> list[dict[str, object]]:
    write_s = 1.2 if slow else 0.4
    figures: dict[str, object] = {
        "bytes": SIZE_BYTES,
        "stall_s": 0.004,
        "capture_s": 0.3,
        "write_s": write_s,
        "sync_s": 0.1,
        **({"step_s": 0.8, "step_beside_save_s": 0.81} if number else {}),
        "engine": "uring",
    }
    lines = [_line("save_begun", number, rank, 0.0)]
    if fails:
        return [*lines, _line("failed", number, rank, 0.5, error="NoSpaceError: the disk is full")]
    lines += [_line(kind, number, rank, write_s + 0.1, **figures) for kind in ("captured", "written")]
    return [*lines, _line("committed", number, rank, write_s + 0.2, **figures, commit_s=0.05)]
