"""Explain what a save would do with a state, without saving it: `Checkpointer.explain`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch

from fastpersist.formats.pickle_scan import iter_tensors, scan_pickle
from fastpersist.saving.capture import Capture, Kind
from fastpersist.saving.containers import TorchZipContainer
from fastpersist.saving.ownership import Owners
from fastpersist.transfer.arena import Arena

__all__ = ["explain"]

_log = logging.getLogger("fastpersist")

_KINDS = (("stable", Kind.STABLE), ("constant", Kind.CONSTANT), ("volatile", Kind.VOLATILE))


def explain(state: object, owners: Owners) -> str:
    """Tell which bytes of a state are stable, constant and volatile, key by key, and how long save() would take.

    Args:
        state: The state.
        owners: The optimizers and constants.

    Returns:
        A table in megabytes, the expected stall, and why state of the optimizer is volatile, if it is.

    Raises:
        ConfigError, RuntimeError, TypeError, …: The state cannot be saved; as in `save`.
    """
    started_s = time.perf_counter()
    container = TorchZipContainer(state, "state", checksum=True)
    capture = Capture(owners, Arena(0))
    capture.add(container)
    plan_s = time.perf_counter() - started_s

    key_of: dict[str, str] = {}
    for name, tensor in iter_tensors(scan_pickle(container.skeleton.pickle).root):
        if tensor.storage is not None:
            key_of.setdefault(tensor.storage.key, _top_key(name))
    by_key: dict[str, dict[Kind, int]] = {}
    for index, (source, kind) in enumerate(zip(container.sources, capture.kinds, strict=True)):
        row = by_key.setdefault(key_of.get(str(index), "(other)"), {})
        row[kind] = row.get(kind, 0) + source.size_bytes
    why = capture.why_volatile
    capture.release()

    width = max([len("key"), *map(len, by_key)])
    lines = [f"{'key':{width}}  " + "  ".join(f"{name:>12}" for name, _ in _KINDS)]
    for key, row in [*by_key.items(), ("all", _sum(by_key))]:
        lines.append(f"{key:{width}}  " + "  ".join(f"{row.get(kind, 0) / 1e6:9.2f} MB" for _, kind in _KINDS))
    copied_bytes = _sum(by_key).get(Kind.VOLATILE, 0)
    stall_s = plan_s + copied_bytes / _copy_bytes_per_s()
    lines.append(
        f"save() returns after about {stall_s * 1e3:.1f} ms: {plan_s * 1e3:.1f} ms to plan, the rest to copy what is "
        "volatile. What is stable is written while training goes on; the next step copies what is not written by then"
    )
    if why:
        lines.append(f"not all of the optimizer's state is stable: {why}")
    return "\n".join(lines)


def _sum(by_key: Mapping[str, Mapping[Kind, int]]) -> dict[Kind, int]:
    return {kind: sum(row.get(kind, 0) for row in by_key.values()) for _, kind in _KINDS}


def _top_key(name: str) -> str:
    """Return the first part of a tensor's name: "model" of "model.layer.weight", of "model[0]"."""
    ends = [at for at in (name.find("."), name.find("[")) if at > 0]
    return name[: min(ends)] if ends else name


def _copy_bytes_per_s() -> float:
    """Measure how fast this machine copies memory, in a few milliseconds."""
    source = torch.ones(8 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    started_s = time.perf_counter()
    target.copy_(source)
    return float(source.nbytes) / max(time.perf_counter() - started_s, 1e-9)
