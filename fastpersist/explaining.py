"""Say, before it matters, what a save would do with a state, and what would keep others from reading it."""

from __future__ import annotations

import collections
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping

import torch

from fastpersist.arena import Arena
from fastpersist.capture import Capture, Kind
from fastpersist.errors import FastPersistError
from fastpersist.formats.pickle_scan import iter_tensors, scan_pickle
from fastpersist.loading import not_allowed_globals
from fastpersist.owners import Owners
from fastpersist.pickling import pickle_skeleton, reduced_types
from fastpersist.saving import Container, TorchZipContainer

__all__ = ["explain", "warn_caller", "warn_of_file", "warn_of_globals"]

_log = logging.getLogger("fastpersist")

_KINDS = (("stable", Kind.STABLE), ("constant", Kind.CONSTANT), ("volatile", Kind.VOLATILE))


def explain(state: object, owners: Owners) -> str:
    """Tell which bytes of a state are stable, constant and volatile, key by key, and how long save() would take.

    Args:
        state: What would be saved.
        owners: Whose storages are stable.

    Returns:
        A table and the expected stall, several lines.

    Raises:
        ConfigError, RuntimeError, …: The state cannot be saved; as in `save`.
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
        "volatile. What is stable is written while training goes on; the next step copies what is left of it"
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


def warn_caller(message: str) -> None:
    """Warn with the line outside this package that called us, however deep we are."""
    # torch.compile, once it was used, stands between a public function and who calls it (see `untraced`).
    ours = tuple(os.path.dirname(path) + os.sep for path in (__file__, os.path.join(torch.__path__[0], "_dynamo", "")))
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def warn_of_globals(state: object) -> None:
    """Warn if weights_only=True, the default of every load, would refuse this state: what it needs, and where.

    One warning has all that loading needs, so that nobody finds out one by one.
    """
    needed = _needed(state)
    if not needed:
        return
    places: dict[str, list[str]] = {}
    if isinstance(state, Mapping):
        places = {f"key {key!r}": list(of_key) for key, value in state.items() if (of_key := _needed(value))}
    known = {name for names in places.values() for name in names}
    if rest := [name for name in needed if name not in known]:
        places["the state"] = rest
    told = "; ".join(f"{place} needs {', '.join(names)}" for place, names in places.items())
    never = sorted(name for name, can_be_allowed in needed.items() if not can_be_allowed)
    modules = sorted({name.rpartition(".")[0] for name in needed} - {"builtins"})
    if never:
        advice = f"; no list of safe globals lets {', '.join(never)} through, whose items are added one by one. Save "
        advice += "plain values, lists and dicts instead, or load with weights_only=False what you trust"
    else:
        advice = f". Save plain values instead, or before loading: import {', '.join(modules)}; "
        advice += f"torch.serialization.add_safe_globals([{', '.join(needed)}])"
    warn_caller(f"torch.load, fp.load and Checkpointer.load refuse this with weights_only=True: {told}{advice}")


def warn_of_file(container: Container, state: object) -> None:
    """Warn as `warn_of_globals` of what is about to be saved as one file; nothing of it if torch.save was called."""
    if isinstance(container, TorchZipContainer) and _names_refused(container.skeleton.pickle):
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("fastpersist"):
            if frame.f_globals["__name__"].startswith("fastpersist.integrations"):
                return
            frame = frame.f_back
        warn_of_globals(state)


_GLOBAL = re.compile(rb"c([^\x00-\x20]+)\n([^\x00-\x20]+)\n")


def _names_refused(skeleton: bytes) -> bool:
    """Tell whether a pickle may name a global that weights_only=True refuses; a fraction of the time of a scan.

    Text that looks like a global is taken for one.
    """
    found = {b".".join(name).decode(errors="replace") for name in _GLOBAL.findall(skeleton)}
    return bool(not_allowed_globals(tuple(found)))


def _needed(obj: object) -> dict[str, bool]:
    """Return what has to be allowed to load an object with weights_only=True, and whether that would be enough."""
    try:
        skeleton = pickle_skeleton(obj).pickle
        refused = not_allowed_globals(scan_pickle(skeleton).globals) if _names_refused(skeleton) else []
    except FastPersistError as error:  # a pickle beyond what our scanner follows; torch.load may still read it
        _log.debug("its globals are not known: %s", error)
        return {}
    needed = dict.fromkeys(refused, True)
    if refused:
        for kind, reduced in reduced_types(obj).items():
            name = f"{kind.__module__}.{kind.__qualname__}"
            _, _, state, items, entries = (*reduced, None, None, None)[:5]
            # torch sets state only on what is of an allowed class, though the pickle may name a function that makes it.
            if state is not None and not_allowed_globals((name,)):
                needed.setdefault(name, True)
            if (items is not None and kind is not list) or (entries is not None and kind not in _ENTRY_TAKERS):
                needed[name] = False
    return needed


_ENTRY_TAKERS = (dict, collections.OrderedDict, collections.Counter)
