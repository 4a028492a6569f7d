"""Warns at save time of objects that a load with weights_only=True, the default, will refuse.

All is seen in the pickle that the save has made. The object is not pickled again: its own code runs once, as with
torch.save.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

import torch

from fastpersist.errors import FastPersistError
from fastpersist.formats.pickle_scan import Call, Global, PersistentId, SymbolicDict, SymbolicSet, scan_pickle
from fastpersist.saving.containers import Container, TorchZipContainer
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


def warn_of_globals(pickled: bytes) -> None:
    """Warn if weights_only=True, the default of every load, would refuse a state: name what to allow, and where.

    One warning lists everything that must be allowed, so that users do not find the items one by one. Only the class of
    an object that a function makes, and whose state is set then, cannot be seen in a pickle; numpy's dtypes are known.

    Args:
        pickled: The pickle of the state.
    """
    try:
        root = scan_pickle(pickled).root if _names_refused(pickled) else None
    except FastPersistError as error:  # a pickle beyond what our scanner follows; torch.load may still read it
        _log.debug("its globals are not known: %s", error)
        return
    needed = _needed(root)
    if not needed:
        return
    places: dict[str, list[str]] = {}
    entries = root.entries if isinstance(root, Call) else root
    if isinstance(entries, SymbolicDict):
        keyed = [(key, list(_needed(value))) for key, value in entries.items() if isinstance(key, str | int)]
        places = {f"key {key!r}": of_key for key, of_key in keyed if of_key}
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


def warn_of_file(container: Container) -> None:
    """Warn as `warn_of_globals` does of a state that is saved to one file, but not if the user called torch.save."""
    if isinstance(container, TorchZipContainer) and _names_refused(container.skeleton.pickle):
        frame = sys._getframe()
        # torch._dynamo: as in `warn_caller`.
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BELOW_THE_CALLER):
            if frame.f_globals["__name__"].startswith("fastpersist.integrations"):
                return
            frame = frame.f_back
        warn_of_globals(container.skeleton.pickle)


_BELOW_THE_CALLER = ("fastpersist", "torch._dynamo")
_GLOBAL = re.compile(rb"c([^\x00-\x20]+)\n([^\x00-\x20]+)\n")


def _names_refused(skeleton: bytes) -> bool:
    """Tell whether a pickle may name a global that weights_only=True refuses, in a fraction of the time of a scan.

    Text that looks like a global counts as one.
    """
    found = {b".".join(name).decode(errors="replace") for name in _GLOBAL.findall(skeleton)}
    return bool(not_allowed_globals(tuple(found)))


def _needed(root: object) -> dict[str, bool]:
    """Return the globals to allow for a load with weights_only=True, and for each whether allowing it is enough."""
    nodes = list(_nodes_below(root))
    names = tuple(dict.fromkeys(f"{node.module}.{node.name}" for node in nodes if isinstance(node, Global)))
    needed = dict.fromkeys(map(python3_name, not_allowed_globals(names)), True)
    if needed:
        for call in nodes:
            if not isinstance(call, Call) or not isinstance(call.function, Global):
                continue
            name = python3_name(f"{call.function.module}.{call.function.name}")
            # torch sets state only on what is of an allowed class, and each dtype of numpy has its own class.
            if name == "numpy.dtype" and call.state is not None and (kind := _dtype_class(call.arguments)):
                needed.update(dict.fromkeys(not_allowed_globals((kind,)), True))
            if (call.items is not None and name != "builtins.list") or (
                call.entries is not None and name not in _ENTRY_TAKERS
            ):
                needed[name] = False
    return needed


_ENTRY_TAKERS = ("builtins.dict", "collections.OrderedDict", "collections.Counter")


def _dtype_class(arguments: tuple[object, ...]) -> str | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not arguments or not isinstance(arguments[0], str):
        return None
    try:
        kind = type(numpy.dtype(arguments[0]))
    except TypeError:  # a dtype of another package
        return None
    return f"{kind.__module__}.{kind.__qualname__}"


def _nodes_below(root: object) -> Iterator[object]:
    """Yield a node of a scanned pickle and all below it, each once, in the order of the pickle."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        inside: tuple[object, ...] | list[object] = ()
        if isinstance(node, list | tuple):
            inside = node
        elif isinstance(node, SymbolicDict):
            inside = node.flat
        elif isinstance(node, SymbolicSet):
            inside = node.members
        elif isinstance(node, PersistentId):
            inside = (node.value,)
        elif isinstance(node, Call):
            inside = (node.function, node.arguments, node.keywords, node.state, node.items, node.entries)
        stack += reversed(inside)
