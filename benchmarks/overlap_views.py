"""What a process of overlap.py measures: a whole run with one way, turns of several, the disk alone, or many saves.

Each takes a job as JSON carries it, and returns its samples as JSON can carry them. Medians are the report's.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from overlap_disk import BareLoop
from overlap_training import Recipe, Training
from overlap_ways import Options, Unavailable, Way, make_way

from fastpersist.cli.bench.overlap.run import check_newest, step_and_save, train_and_save
from fastpersist.cli.bench.worker import resident_bytes

__all__ = ["VIEWS", "set_up_process"]


def whole_run(job: dict[str, Any]) -> dict[str, Any]:
    """Train with one way from first step to everything durable."""
    training = Training(Recipe(**job["recipe"]))
    way = make_way(job["way"], job["root"], training, Options(**job["options"]))
    result = train_and_save(
        training, way, every=job["every"], warm_up_count=job["warm_up_count"], step_count=job["step_count"]
    )
    return {**result, "loss": training.losses[-1]}


def disk_alone(job: dict[str, Any]) -> dict[str, Any]:
    """Write as many bytes as a checkpoint has with the bare loop, with nothing beside it; also learn what they are."""
    training = Training(Recipe(**job["recipe"]))
    training.step()  # makes the optimizer's state
    size_bytes = training.state_bytes()
    loop = BareLoop(job["root"], size_bytes, depth=job["depths"][0], chunk_bytes=job["chunk_bytes"])
    return {"state_bytes": size_bytes, "seconds": [loop.once() for _ in range(3)]}


class _Turns:
    """Steps of one training that take turns: alone, beside the bare loop, and with a save before them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._training = Training(Recipe(**job["recipe"]))
        for _ in range(2):
            self._training.step()
        self._state_bytes = self._training.state_bytes()
        self._ways: list[tuple[str, Way]] = []
        self._saved_step = 0
        # Twice, as the difference between the two is what this measurement cannot tell from nothing.
        self.kinds: dict[str, Callable[[], dict[str, float]]] = {"alone": self._alone, "alone, again": self._alone}
        self.notes: dict[str, str] = {}
        for depth in job["depths"]:
            loop = BareLoop(job["root"], self._state_bytes, depth=depth, chunk_bytes=job["chunk_bytes"])
            self._offer(f"bare loop, depth {depth}", functools.partial(self._beside, loop))
        for name in job["ways"]:
            root = os.path.join(job["root"], name)
            os.mkdir(root)
            self._offer(f"save, {name}", functools.partial(self._with_save, name, root, job["options"]))

    def _offer(self, name: str, make_turn: Callable[[], Callable[[], dict[str, float]]]) -> None:
        """Add a kind of turn, or the note that it cannot be had."""
        try:
            self.kinds[name] = make_turn()
        except Unavailable as reason:
            self.notes[name] = str(reason)

    def _alone(self) -> dict[str, float]:
        return {"step_s": self._training.step().step_s}

    def _beside(self, loop: BareLoop) -> Callable[[], dict[str, float]]:
        loop.prepare()  # now, as this is what fails where there is no direct I/O
        loop.remove()

        def turn() -> dict[str, float]:
            try:
                loop.prepare()
                start = time.perf_counter()
                loop.start()
                self._training.step()
                end = time.perf_counter()
                write_s = loop.join()
            finally:
                loop.remove()
            return {"step_s": end - start, "write_s": write_s, "after_s": max(0.0, write_s - (end - start))}

        return turn

    def _with_save(self, name: str, root: str, options: dict[str, Any]) -> Callable[[], dict[str, float]]:
        way = make_way(name, root, self._training, Options(**options))
        self._ways.append((name, way))

        def turn() -> dict[str, float]:
            self._saved_step += 1
            start = time.perf_counter()
            way.save(self._saved_step)
            saved = time.perf_counter()
            times = self._training.step(before_update=way.before_update, update_guard=way.update_guard)
            end = time.perf_counter()
            way.settle()
            return {
                "step_s": end - start,
                "save_s": saved - start,
                "gate_s": times.gate_s,
                "after_s": time.perf_counter() - end,  # the removal of an older checkpoint included
            }

        return turn

    def finish(self) -> dict[str, Any]:
        """End the ways; return what is known of each."""
        known = {}
        for name, way in self._ways:
            way.settle()
            report = way.report()
            way.finish()
            known[f"save, {name}"] = {
                "settings": way.settings,
                "checkpoint_bytes": way.newest()[1],
                "report": report,
            }
        return known

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors of the state."""
        return self._state_bytes


def turns(job: dict[str, Any]) -> dict[str, Any]:
    """Run the turns, each round in another order, so that none always runs in the wake of the same neighbour."""
    cycle = _Turns(job)
    names = list(cycle.kinds)
    order = random.Random(0)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(job["warm_up_count"] + job["turn_count"]):
        for name in order.sample(names, len(names)):
            sample = cycle.kinds[name]()
            if number >= job["warm_up_count"]:
                samples[name].append(sample)
    return {
        "samples": samples,
        "notes": cycle.notes,
        "state_bytes": cycle.state_bytes,
        "ways": cycle.finish(),
        "peak_bytes": resident_bytes("VmHWM"),
    }


def _footprint() -> dict[str, int]:
    gc.collect()
    return {
        "resident_bytes": resident_bytes("VmRSS"),
        "thread_count": len(os.listdir("/proc/self/task")),
        "descriptor_count": len(os.listdir("/proc/self/fd")),
    }


def soak(job: dict[str, Any]) -> dict[str, Any]:
    """Save after every step, many times; note memory, threads and descriptors early and at the end."""
    training = Training(Recipe(**job["recipe"]))
    way = make_way(job["way"], job["root"], training, Options(**job["options"]))
    early_count = min(100, max(1, job["save_count"] // 2))
    stalls_s = []
    footprints = {}
    for number in range(1, job["save_count"] + 1):
        stalls_s.append(step_and_save(training, way, number)[0].stall_s)
        if number in (early_count, job["save_count"]):
            way.settle()
            footprints[number] = _footprint()
    way.finish()
    return {
        "settings": way.settings,
        "footprints": footprints,
        "after_finish": _footprint(),
        "median_stall_s": statistics.median(stalls_s),
        "checkpoint_bytes": check_newest(way, job["save_count"], training.state_bytes()),
    }


VIEWS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "whole run": whole_run,
    "disk alone": disk_alone,
    "turns": turns,
    "soak": soak,
}


def set_up_process() -> None:
    """Train on one thread; allow as many descriptors as there may be, for peers that need one per tensor."""
    torch.set_num_threads(1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
