"""The processes of `bench overlap`: a training of nothing in particular, and measurements of it.

The parent (`child_process`) starts `main`, sends jobs and gets of each its result or the reason why there is none. A
forked process does each: its peak of memory is its own, and no way of saving finds what another one has set up. The one
that forks has imported torch, once for all, and done nothing with it, neither on several threads nor on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import statistics
import time
from typing import Any

import torch
from torch import nn

from fastpersist.cli.bench.overlap.run import TrainedModel, train_and_save
from fastpersist.cli.bench.overlap.ways import (
    CheckpointerWay,
    DcpStagedWay,
    DcpWay,
    Options,
    TorchSaveWay,
    Unavailable,
    Way,
)
from fastpersist.cli.child_process import Answers

__all__ = ["WARM_UP_COUNT", "WAYS", "Job", "SyntheticTraining", "main"]

WAYS: dict[str, type[Way]] = {
    "no checkpoints": Way,
    "fp.Checkpointer": CheckpointerWay,
    "torch.save + fsync": TorchSaveWay,
    "dcp.async_save": DcpWay,
    "dcp.async_save, stager kept": DcpStagedWay,
}

WARM_UP_COUNT = 2  # with the first save, peers start threads and everybody allocates memory; the second waits for it

_SEED = 20260
_ROW_COUNT = 16  # of the inputs: so few that the length of a step is the products' affair
_WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64)
_LAYER_COUNT_MIN = 4
_BYTES_PER_PARAMETER = 12  # float32: itself and two moments


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What one process is to do.

    Attributes:
        root: An empty directory of its own.
        size_bytes: Of the state.
        device: "cpu", "cuda", "cuda:1", …
        thread_count: Threads that compute on the CPU.
        engine: Of fastpersist.
        product_count: Matrix products that each step makes beside its training.
        way: One of WAYS; None: find out how long things take, and train nothing else.
        step_count: Steps that count.
    """

    root: str
    size_bytes: int
    device: str
    thread_count: int
    engine: str
    product_count: int = 0
    way: str | None = None
    step_count: int = 1


class SyntheticTraining(TrainedModel):
    """Square layers under AdamW, random inputs, and products that only take time. One thread.

    Args:
        size_bytes: Of parameters and moments, about.
        device: Where they are.
        product_count: Products of a step; they touch nothing of the state.
    """

    def __init__(self, size_bytes: int, device: str, product_count: int = 0) -> None:
        torch.manual_seed(_SEED)
        self._device = torch.device(device)
        parameter_count = max(size_bytes // _BYTES_PER_PARAMETER, 1)
        self.width = next((w for w in _WIDTHS if _LAYER_COUNT_MIN * w * w <= parameter_count), _WIDTHS[-1])
        layer_count, rest = divmod(parameter_count, self.width**2)
        shapes = [(self.width, self.width)] * layer_count + [(self.width, rest // self.width)] * (rest >= self.width)
        with self._device:
            model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
            side = 2048 if self._device.type == "cuda" else 256
            self._factors = [torch.randn(side, side) for _ in range(3)]
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=self.width**-0.5)  # or gradients would vanish, and steps change nothing
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        self.product_count = product_count

    def compute(self, product_count: int) -> None:
        """Keep the device busy."""
        first, second, out = self._factors
        for _ in range(product_count):
            torch.mm(first, second, out=out)

    def loss(self) -> torch.Tensor:
        """Return the loss of random inputs."""
        inputs = torch.randn(_ROW_COUNT, self.width, device=self._device)
        output: torch.Tensor = self.model(inputs)
        return output.square().mean()

    def follow_backward(self) -> None:
        """Make the step as long as wanted."""
        self.compute(self.product_count)

    def end_step(self, loss: torch.Tensor) -> None:
        """Wait for the device."""
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the stream that trains, and for no other: saving has streams of its own, which go on."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def main() -> None:
    """Do the jobs of one parent until it closes its end."""
    answers = Answers()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # peers may need one descriptor per tensor
    for request in answers.requests():
        job = Job(**request)
        answers.send_from_fork(functools.partial(_do, job), "the process that trained died")


def _do(job: Job) -> dict[str, Any]:
    try:
        torch.set_num_threads(job.thread_count)
        return {"result": _find_lengths(job) if job.way is None else _run(job)}
    except Unavailable as reason:
        return {"unavailable": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result of this way
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def _options(job: Job) -> Options:
    return Options(engine=job.engine, pins=torch.device(job.device).type == "cuda")


def _run(job: Job) -> dict[str, Any]:
    training = SyntheticTraining(job.size_bytes, job.device, job.product_count)
    way = WAYS[job.way or ""](job.root, training, _options(job))
    return train_and_save(training, way, every=1, warm_up_count=WARM_UP_COUNT, step_count=job.step_count)


def _find_lengths(job: Job) -> dict[str, Any]:
    """Return the bytes of the state, and the seconds of a save with nothing beside it, a step, and a product."""
    training = SyntheticTraining(job.size_bytes, job.device)
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
    training.compute(3)
    training.synchronize()
    start = time.perf_counter()
    training.compute(20)
    training.synchronize()
    return {
        "state_bytes": training.state_bytes(),
        "write_s": statistics.median(writes_s[1:]),  # the first one makes the ring
        "step_s": min(steps_s),
        "product_s": (time.perf_counter() - start) / 20,
        "engine": way.report()[-1]["engine"],
        "device": torch.cuda.get_device_name(job.device) if training._device.type == "cuda" else "",
    }
