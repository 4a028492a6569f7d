"""The processes of `bench overlap`: whole runs with one way of saving, turns of several, and many saves in a row.

The parent (`child_process`) starts `main`, sends jobs and gets of each its result or the reason why there is none. A
forked process does each: its peak of memory is its own, and no way of saving finds what another one has set up. The one
that forks has imported torch, once for all, and done nothing with it, neither on several threads nor on a GPU.
"""

from __future__ import annotations

import dataclasses
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

from fastpersist.cli.bench.overlap.further_ways import FURTHER_WAYS
from fastpersist.cli.bench.overlap.run import check_newest, step_and_save, train_and_save
from fastpersist.cli.bench.overlap.training import LAYERS, SyntheticTraining
from fastpersist.cli.bench.overlap.ways import (
    CheckpointerWay,
    DcpStagedWay,
    DcpWay,
    Options,
    TorchSaveWay,
    Trained,
    Unavailable,
    Way,
)
from fastpersist.cli.bench.worker import resident_bytes
from fastpersist.cli.child_process import Answers

__all__ = ["ALL_WAYS", "WARM_UP_COUNT", "WAYS", "Job", "main"]

WAYS: dict[str, Callable[[str, Trained, Options], Way]] = {
    "no checkpoints": Way,
    "fp.Checkpointer": CheckpointerWay,
    "torch.save + fsync": TorchSaveWay,
    "dcp.async_save": DcpWay,
    "dcp.async_save, stager kept": DcpStagedWay,
}

ALL_WAYS = WAYS | FURTHER_WAYS
"""By the names of their rows; WAYS are those that are measured if none is named."""

WARM_UP_COUNT = 2  # with the first save, peers start threads and everybody allocates memory; the second waits for it

_ENDING_S = 3.0
_EARLY_COUNT = 100  # saves after which a training has all memory that it will ever have


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The job of one process.

    Attributes:
        root: An empty directory of its own.
        size_bytes: The size of the state.
        device: "cpu", "cuda", "cuda:1", …
        thread_count: Threads that compute on the CPU.
        engine: The engine of fastpersist.
        product_count: Matrix products that each step makes beside its training.
        ways: Names of ALL_WAYS. One: a whole run with it. Several: turns of them. None: find out how long things take.
        step_count: Steps, or turns of each way, that count; saves of a soak.
        every: The number of steps from one save to the next, in a whole run.
        soak: Save in each of many steps, and look at what the process holds.
        model: One of training.MODELS.
        batch_count: Rows or sequences in each step; None for the default.
        token_count: Tokens in each sequence; None for the default.
        max_host_bytes: The option of the Checkpointer.
    """

    root: str
    size_bytes: int
    device: str
    thread_count: int
    engine: str
    product_count: int = 0
    ways: tuple[str, ...] = ()
    step_count: int = 1
    every: int = 1
    soak: bool = False
    model: str = LAYERS
    batch_count: int | None = None
    token_count: int | None = None
    max_host_bytes: int | None = None


def main() -> None:
    """Do the jobs of one parent until it closes its end."""
    answers = Answers()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # peers may need one descriptor per tensor
    for request in answers.requests():
        job = Job(**request)
        answers.send_from_fork(functools.partial(_do, job), "the process that trained died")


def _do(job: Job) -> dict[str, Any]:
    measure = _find_lengths if not job.ways else _soak if job.soak else _run if len(job.ways) == 1 else _turns
    try:
        torch.set_num_threads(job.thread_count)
        return {"result": measure(job)}
    except Unavailable as reason:
        return {"unavailable": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result of this way
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def _training(job: Job) -> SyntheticTraining:
    return SyntheticTraining(
        job.size_bytes,
        job.device,
        job.product_count,
        model=job.model,
        batch_count=job.batch_count,
        token_count=job.token_count,
    )


def _options(job: Job) -> Options:
    pins = torch.device(job.device).type == "cuda"
    return Options(engine=job.engine, max_host_bytes=job.max_host_bytes, pins=pins)


def _run(job: Job) -> dict[str, Any]:
    """Train with one way from first step to everything durable."""
    training = _training(job)
    way = ALL_WAYS[job.ways[0]](job.root, training, _options(job))
    return train_and_save(
        training, way, every=job.every, warm_up_count=WARM_UP_COUNT * job.every, step_count=job.step_count
    )


def _turns(job: Job) -> dict[str, Any]:
    """Train in one process: steps take turns, each with a save before it in one of the ways, which is then awaited.

    So drift of the machine hits all of them alike; each round has another order, so that none always runs in the wake
    of the same neighbour.
    """
    training = _training(job)
    for _ in range(WARM_UP_COUNT):
        training.step()
    ways: dict[str, Way] = {}
    notes: dict[str, str] = {}
    for index, name in enumerate(job.ways):
        root = os.path.join(job.root, str(index))
        os.mkdir(root)
        try:
            ways[name] = ALL_WAYS[name](root, training, _options(job))
        except Unavailable as reason:
            notes[name] = str(reason)
    order = random.Random(0)
    rounds: list[dict[str, dict[str, Any]]] = []
    for step in range(1, WARM_UP_COUNT + job.step_count + 1):
        rounds.append({name: _turn(training, ways[name], step) for name in order.sample(list(ways), len(ways))})
    for way in ways.values():
        way.finish()
    return {"rounds": rounds[WARM_UP_COUNT:], "notes": notes}


def _turn(training: SyntheticTraining, way: Way, step: int) -> dict[str, Any]:
    """Save, train one step, and wait until all is durable; return what `train_and_save` does, without a peak."""
    gc.collect()
    start = time.perf_counter()
    way.save(step)
    save_s = time.perf_counter() - start
    times = training.step(before_update=way.before_update, update_guard=way.update_guard)
    times.save_s, times.step_s = save_s, time.perf_counter() - start
    start = time.perf_counter()
    way.settle()
    return {
        "settings": way.settings,
        "steps": [dataclasses.asdict(times)],
        "late_count": 0,
        "tail_s": time.perf_counter() - start,
        "checkpoint_bytes": check_newest(way, step, training.state_bytes()),
        "peak_bytes": None,
        "report": way.report()[-1:],
    }


def _soak(job: Job) -> dict[str, Any]:
    """Save after every step, many times; note memory, threads and descriptors early and at the end."""
    training = _training(job)
    way = ALL_WAYS[job.ways[0]](job.root, training, _options(job))
    early_count = min(_EARLY_COUNT, max(1, job.step_count // 2))
    stalls_s, footprints = [], {}
    for number in range(1, job.step_count + 1):
        stalls_s.append(step_and_save(training, way, number)[0].stall_s)
        if number in (early_count, job.step_count):
            way.settle()
            footprints[f"save {number}"] = _footprint()
    checkpoint_bytes = check_newest(way, job.step_count, training.state_bytes())
    way.finish()
    return {
        "footprints": footprints | {"the end": _footprint()},
        "stall_s": statistics.median(stalls_s),
        "checkpoint_bytes": checkpoint_bytes,
    }


def _footprint() -> dict[str, int]:
    gc.collect()
    return {
        "resident_bytes": resident_bytes("VmRSS"),
        "thread_count": _lasting_thread_count(),
        "descriptor_count": len(os.listdir("/proc/self/fd")),
    }


def _lasting_thread_count() -> int:
    """Count the threads of this process; those that have no more work get some seconds to end."""
    deadline_s = time.monotonic() + _ENDING_S
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return count


def _find_lengths(job: Job) -> dict[str, Any]:
    """Return the bytes of the state, and the seconds of a save with nothing beside it, a step, and a product."""
    training = _training(job)
    training.step()  # makes the optimizer's state
    way = CheckpointerWay(job.root, training, _options(job))
    writes_s, steps_s = [], []
    for number in range(4):
        start = time.perf_counter()
        way.save(number)
        way.settle()
        writes_s.append(time.perf_counter() - start)
        steps_s.append(training.step().step_s)
    way.finish()
    return {
        "state_bytes": training.state_bytes(),
        "write_s": statistics.median(writes_s[1:]),  # the first one makes the ring
        "step_s": min(steps_s),
        "product_s": training.product_s(),
        "engine": way.report()[-1]["engine"],
        "device": torch.cuda.get_device_name(job.device) if training._device.type == "cuda" else "",
    }
