"""Warns at save time of objects that a load with weights_only=True, the default, will refuse."""

from __future__ import annotations

import collections
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping

import torch

from fastpersist.errors import FastPersistError
from fastpersist.formats.pickle_scan import scan_pickle
from fastpersist.saving.containers import Container, TorchZipContainer
from fastpersist.saving.skeleton import pickle_skeleton, reduced_types
from fastpersist.transfer.torch_boundary import not_allowed_globals, python3_name

__all__ = ["warn_caller", "warn_of_file", "warn_of_globals"]

_log = logging.getLogger("fastpersist")


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that called us, however deep we are."""
    # After a use of torch.compile, its frames lie between a public function and its caller (see `untraced`).
    folders = (*sys.modules["fastpersist"].__path__, os.path.join(torch.__path__[0], "_dynamo"))
    ours = tuple(folder + os.sep for folder in folders)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def warn_of_globals(state: object) -> None:
    """Warn if weights_only=True, the default of every load, would refuse this state: name what to allow, and where.

    One warning lists everything that must be allowed, so that users do not find the items one by one.
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
        imports = f"import {', '.join(modules)}; " if modules else ""
        allowed = ", ".join(name.removeprefix("builtins.") for name in needed)
        advice = f". Save plain values instead, or before loading: {imports}"
        advice += f"torch.serialization.add_safe_globals([{allowed}])"
    warn_caller(f"torch.load, fp.load and Checkpointer.load refuse this with weights_only=True: {told}{advice}")


def warn_of_file(container: Container, state: object) -> None:
    """Warn as `warn_of_globals` does of a state that is saved to one file, but not if the user called torch.save."""
    if isinstance(container, TorchZipContainer) and _names_refused(container.skeleton.pickle):
        frame = sys._getframe()
        # torch._dynamo: as in `warn_caller`.
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BELOW_THE_CALLER):
            if frame.f_globals["__name__"].startswith("fastpersist.integrations"):
                return
            frame = frame.f_back
        warn_of_globals(state)


_BELOW_THE_CALLER = ("fastpersist", "torch._dynamo")
_GLOBAL = re.compile(rb"c([^\x00-\x20]+)\n([^\x00-\x20]+)\n")


def _names_refused(skeleton: bytes) -> bool:
    """Tell whether a pickle may name a global that weights_only=True refuses, in a fraction of the time of a scan.

    Text that looks like a global counts as one.
    """
    found = {b".".join(name).decode(errors="replace") for name in _GLOBAL.findall(skeleton)}
    return bool(not_allowed_globals(tuple(found)))


def _needed(obj: object) -> dict[str, bool]:
    """Return the globals to allow for a load with weights_only=True, and for each whether allowing it is enough."""
    try:
        skeleton = pickle_skeleton(obj).pickle
        refused = not_allowed_globals(scan_pickle(skeleton).globals) if _names_refused(skeleton) else []
    except FastPersistError as error:  # a pickle beyond what our scanner follows; torch.load may still read it
        _log.debug("its globals are not known: %s", error)
        return {}
    needed = dict.fromkeys(map(python3_name, refused), True)
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
