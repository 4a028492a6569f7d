"""Many ranks save step after step while one of them is killed, stopped for seconds, or late; as long as one likes.

    PYTHONPATH=tests .venv/bin/python -m support.rank_storm --ranks 32 --seconds 60 --seed 1     # or: make storm

Each round starts so many processes in a gloo group. They load the newest step, save more, and one thing happens to one
rank. After each round:

- a rank that was killed has failed all others, with an error that says so; no rank waits for it;
- a rank that was stopped, or late, has failed nobody;
- every committed step is whole, and what a rank saw published is committed.

A round is made of the seed and its number alone, so `--only n` repeats it; what the kernel schedules differs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.process_groups import RankEnding, rank_endings

import fastpersist as fp

KINDS = ("kill", "stop", "late", "nothing")
_SAVE_COUNT = 4
_PEER_TIMEOUT_S = 20.0
_ROUND_S = 240.0


class Happening(NamedTuple):
    """What happens in a round: to which rank, how long after one of the saves has begun, for how many seconds."""

    kind: str
    victim: int
    after_s: float
    lasts_s: float
    sharded: bool


def happening(seed: int, number: int, ranks: int) -> Happening:
    """Return what happens in a round."""
    rng = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    return Happening(kind, rng.randrange(ranks), rng.uniform(0, 0.05), rng.uniform(0.3, 2.5), rng.random() < 0.5)


def storm(root: Path, ranks: int, seed: int, number: int) -> str:
    """Run a round; return a line about it.

    Raises:
        AssertionError: Something was not as promised.
    """
    what = happening(seed, number, ranks)
    started_s = time.monotonic()
    endings = rank_endings(ranks, _train, root, what, timeout_s=_ROUND_S, group_timeout_s=60.0)
    published = [ending.result for ending in endings if ending.result is not None]
    for rank, ending in enumerate(endings):
        _check(rank, ending, what)
    steps = _require_whole(root, ranks)
    assert not published or max(published) <= max(steps), f"step {max(published)} was published, and is not there"
    if len(published) == ranks:
        hidden = [name for name in os.listdir(root) if name.startswith(".step-")]
        assert not hidden, f"a round in which nobody died leaves {hidden}"
    text = f"round {number}: {what.kind}, rank {what.victim}{', sharded' if what.sharded else ''}"
    newest = steps[-1] if steps else 0
    return f"{text}: {len(published)} of {ranks} ranks came to step {newest}, {time.monotonic() - started_s:.1f} s"


def _check(rank: int, ending: RankEnding, what: Happening) -> None:
    if what.kind == "kill" and rank == what.victim:
        assert ending.signal in (0, signal.SIGKILL), ending
    elif ending.error_type is not None:
        assert what.kind == "kill", f"{what.kind}: rank {rank} has failed\n{ending.trace}"
        assert issubclass(ending.error_type, fp.CoordinationError | fp.PeerError), ending.trace
    else:
        assert ending.signal == 0, ending


def _state(step: int, rank: int, count: int, sharded: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.full((300, 7), float(step)), "step": step}
    if sharded:
        state[f"of rank {rank}"] = torch.full((5,), float(rank + step))
    return {"model": state, "count": count}


def _train(rank: int, count: int, root: Path, what: Happening) -> int:
    torch.set_num_threads(1)
    pids: list[Any] = [None] * count
    dist.all_gather_object(pids, os.getpid())
    with fp.Checkpointer(
        root, process_group=dist.group.WORLD, sharded=what.sharded, peer_timeout_s=_PEER_TIMEOUT_S
    ) as checkpoints:
        loaded = checkpoints.load(missing_ok=True)
        step = 0 if loaded is None else int(loaded["model"]["step"])
        for number in range(_SAVE_COUNT):
            step += 1
            if number == 1 and rank == (what.victim + 1) % count and what.kind in ("kill", "stop"):
                threading.Thread(target=_strike, args=(pids[what.victim], what), daemon=True).start()
            if what.kind == "late" and rank == what.victim and number == 1:
                time.sleep(what.lasts_s)
            checkpoints.save(step, _state(step, rank, count, what.sharded), rank_state={"rank": rank}).result()
    return step


def _strike(pid: int, what: Happening) -> None:
    pidfd = os.pidfd_open(pid)  # the victim is alive; on a busy machine its number may be another's when it is struck
    time.sleep(what.after_s)
    with contextlib.suppress(ProcessLookupError):
        if what.kind == "kill":
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        time.sleep(what.lasts_s)
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def _require_whole(root: Path, ranks: int) -> list[int]:
    """Load every committed step, and compare all of it."""
    checkpoints = fp.Checkpointer(root)
    steps = checkpoints.steps()
    for step in steps:
        loaded = checkpoints.load(step, keys=["model.*", "count"], verify=True)
        for name, value in loaded["model"].items():
            wanted = _state(step, int(name.split()[-1]) if name.startswith("of rank") else 0, ranks, sharded=True)
            expected = wanted["model"].get(name, wanted["model"].get("of rank 0"))
            same = torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected
            assert same, f"{name} of step {step} is {value}"
    return steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rounds for so many seconds, and at least one of each kind unless `--only` names one."""
    parser = argparse.ArgumentParser(description="Ranks that are killed, stopped and late while they save.")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one round")
    options = parser.parse_args(arguments)
    logging.getLogger("fastpersist").setLevel(logging.CRITICAL)  # each rank would say that a save has failed
    end_s = time.monotonic() + options.seconds
    number = 0 if options.only is None else options.only
    with tempfile.TemporaryDirectory(prefix="fastpersist-storm-") as directory:
        while True:
            try:
                print(storm(Path(directory), options.ranks, options.seed, number), flush=True)
            except AssertionError as error:
                repeat = f"--ranks {options.ranks} --seed {options.seed} --only {number}"
                print(f"round {number} ({happening(options.seed, number, options.ranks)}): {repeat}\n{error}")
                return 1
            number += 1
            if options.only is not None or (time.monotonic() >= end_s and number >= len(KINDS)):
                return 0


if __name__ == "__main__":
    sys.exit(main())
