"""Archives around hand-made pickles, whose tensors lie where they like in their storages of 64 bytes."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from support.archives import with_pickle

import fastpersist as fp

NUMEL = 16  # of the float32 storages in the file


HUGE = 40_000


class Storage:
    """A storage of the file, as the pickle names it."""

    def __init__(self, key: int, kind: type = torch.FloatStorage, numel: int = NUMEL) -> None:
        self.persistent_id = ("storage", kind, str(key), "cpu", numel)


class Made:
    """What the unpickler makes by calling a function, and gives a state."""

    def __init__(self, function: object, *arguments: object, state: object = None) -> None:
        self._reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self._reduced


class _Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    def persistent_id(self, obj: object) -> object:
        return obj.persistent_id if isinstance(obj, Storage) else None


def craft(path: Path, obj: object) -> None:
    """Write a sound archive of five storages of 64 bytes around the pickle of an object."""
    fp.save([torch.ones(NUMEL) for _ in range(5)], path, durable=False)
    file = io.BytesIO()
    _Pickler(file, 2).dump(obj)
    with_pickle(path, file.getvalue())


def tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int = 0,
    *,
    storage: Storage | None = None,
    state: object = None,
) -> Made:
    arguments = (storage or Storage(0), offset, shape, stride, False, OrderedDict())
    return Made(torch._utils._rebuild_tensor_v2, *arguments, state=state)
