"""The overlap part of gpu.py: a training on the device that saves every step, by Checkpointer and by DCP.

The training is a stack of square bf16 layers under fused AdamW, whose forward and backward are made as long as a write
takes by matrix products that touch nothing of it. So the write has the time that it needs, and what a step takes longer
than without saves is what saving costs: memory traffic, PCIe, the host's cores, waiting.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_disk import remove
from gpu_measure import Device, Found, check_equal
from gpu_plan import BYTES_PER_PARAMETER, STEP_OF_WRITE, overlap_blocks
from torch.utils._pytree import tree_map_only

from fastpersist.cli.bench.overlap.run import step_and_save
from fastpersist.cli.bench.overlap.training import SyntheticTraining
from fastpersist.cli.bench.overlap.ways import CheckpointerWay, DcpStagedWay, Options, Trained, Way
from fastpersist.cli.bench.states import flatten

__all__ = ["measure_overlap"]

_ROW_COUNT = 64
_WAYS: dict[str, Callable[[str, Trained, Options], Way]] = {
    "no saves": Way,
    "fp.Checkpointer": CheckpointerWay,
    "dcp.async_save, pinned staging": DcpStagedWay,
}


def measure_overlap(
    found: Found, device: Device, directory: str, parameter_count: int, rounds: int, deadline_s: float
) -> None:
    """Train with each way in turn, in blocks of up to three steps, each of which saves.

    Args:
        found: Gets values["overlap"]: settings, and the samples of each way.
        device: The device that trains.
        directory: An empty directory on the disk.
        parameter_count: The number of parameters of the model.
        rounds: The most blocks of each way.
        deadline_s: No round begins after this time.monotonic().
    """
    training = SyntheticTraining(
        parameter_count * BYTES_PER_PARAMETER, device.name, batch_count=_ROW_COUNT, dtype=torch.bfloat16
    )
    for _ in range(2):
        training.step()  # there are moments from the first on
    count = sum(parameter.numel() for parameter in training.model.parameters())
    options = Options(pins=device.is_cuda, keep_count=1)
    write_s, first_s = _write_seconds(training, os.path.join(directory, "alone"), options)
    # A rehearsal on the CPU shall be short.
    step_s = STEP_OF_WRITE * write_s if device.is_cuda else min(STEP_OF_WRITE * write_s, 0.005)
    bare_s = min(training.step().step_s for _ in range(2))
    training.product_count = max(int((step_s - bare_s) / training.product_s()), 0)
    overlap: dict[str, Any] = {
        "parameter_count": count,
        "state_bytes": count * BYTES_PER_PARAMETER,
        "first_save_s": first_s,
        "write_alone_s": write_s,
        "step_made_s": step_s,
        "products_per_step": training.product_count,
        "ways": {},
    }
    found.values["overlap"] = overlap
    ways: dict[str, Way] = {}
    seen_s: dict[str, float] = {}
    number = 0  # of the last step
    for name, make in _WAYS.items():
        entry = {"steps": [], "integrity": "not checked", "note": ""}
        overlap["ways"][name] = entry
        try:
            root = os.path.join(directory, f"way-{len(ways)}")
            os.mkdir(root)
            ways[name] = make(root, training, options)
            # Its memory is there from then on; the second step waits for the write of the first.
            seen_s[name] = _run_block(training, ways[name], number, 2)[-1]["step_s"]
            entry["integrity"] = _check(training, ways[name], number + 3)
            number += 3
        except Exception as error:  # noqa: BLE001 - one way's failure is no other's
            entry["note"] = f"{type(error).__name__}: {error}"[:300]
            ways.pop(name, None)
        found.keep()
    rounds, step_count = overlap_blocks(list(seen_s.values()), deadline_s - time.monotonic(), rounds)
    overlap |= {"rounds": rounds, "steps_per_round": step_count}
    for round_number in range(rounds):
        round_start_s = time.monotonic()
        for name, way in list(ways.items() if round_number % 2 else reversed(ways.items())):
            try:
                overlap["ways"][name]["steps"].append(_run_block(training, way, number, step_count))
                number += step_count
            except Exception as error:  # noqa: BLE001 - as above
                overlap["ways"][name]["note"] = f"{type(error).__name__}: {error}"[:300]
                del ways[name]
            found.keep()
        now_s = time.monotonic()
        if now_s + 0.8 * (now_s - round_start_s) > deadline_s and round_number + 1 < rounds:
            found.note(f"overlap: time for {round_number + 1} of {rounds} rounds")
            break
    if "fp.Checkpointer" in ways:
        overlap["last_stats"] = ways["fp.Checkpointer"].report()[-1]
    for way in ways.values():
        way.finish()
    found.keep()


def _write_seconds(training: SyntheticTraining, root: str, options: Options) -> tuple[float, float]:
    """Return what a save takes with nothing beside it, and what the first one takes."""
    way = CheckpointerWay(root, training, options)
    seconds = []
    for step in range(3):
        start_s = time.perf_counter()
        way.save(step)
        way.settle()
        seconds.append(time.perf_counter() - start_s)
        training.step()
    way.finish()
    remove(root)
    return statistics.median(seconds[1:]), seconds[0]


def _run_block(training: SyntheticTraining, way: Way, after: int, step_count: int) -> list[dict[str, float]]:
    """Train some steps, and save after each; return where their seconds went."""
    numbers = range(after + 1, after + step_count + 1)
    steps = [dataclasses.asdict(step_and_save(training, way, number)[0]) for number in numbers]
    way.settle()
    return steps


def _check(training: SyntheticTraining, way: Way, number: int) -> str:
    """Save, train on, and look whether the file holds what was true at the save, as stock tools read it."""
    if type(way) is Way:
        return "moves no state"
    live = training.state(number)
    wanted = {name: tensor.clone() for name, tensor in flatten(live).items()}
    way.save(number)
    training.step(before_update=way.before_update, update_guard=way.update_guard)
    way.settle()
    if all(torch.equal(wanted[name], tensor) for name, tensor in flatten(live).items()):
        return "the step changed nothing, so nothing was shown"
    path = os.path.join(way.root, f"step-{number:08d}")
    if isinstance(way, CheckpointerWay):
        found = torch.load(os.path.join(path, "state.pt"), weights_only=True)
    else:
        import torch.distributed.checkpoint as dcp

        found = tree_map_only(torch.Tensor, torch.empty_like, live)
        dcp.load(found, storage_reader=dcp.FileSystemReader(path))
    check_equal(flatten(found), wanted)
    return "equal"
