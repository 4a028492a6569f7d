"""Redirects a framework's stock saves below one directory into a `DirectorySave`.

Frameworks assemble a checkpoint in many functions, which users override; all end in torch.save or safetensors'
save_file with a path. `saves_into` intercepts these two, on one thread and for paths below one directory. All other
files there (configuration, tokenizer) are written as usual, and published with the rest.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fastpersist import DirectorySave, PeerDirectorySave

from ..torch_save import routed
from .replacement import Function, Replacement

__all__ = ["Redirection", "saves_into"]

# The names under which packages import safetensors' save_file.
_SAVE_FILE_NAMES = (
    ("safetensors.torch", "save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("accelerate.utils.other", "safe_save_file"),
)

_redirections = threading.local()


def _places() -> Iterator[tuple[ModuleType, str]]:
    for module_name, name in _SAVE_FILE_NAMES:
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, name):
            yield module, name


def _wrap_save_file(before: Function) -> Function:
    def save_file(
        tensors: dict[str, Any], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
    ) -> None:
        for redirection in reversed(_redirections.__dict__.get("stack", ())):
            if redirection.take_safetensors(tensors, os.fspath(filename), metadata):
                return
        before(tensors, filename, metadata=metadata)

    return save_file


_save_file = Replacement(_places, _wrap_save_file)


class Redirection:
    """Takes the saves of one block of `saves_into`.

    Attributes:
        at_once: Write each file completely before the saving call returns, for code that then reads, renames or
            replaces it. Otherwise files are written while training goes on, and exist once everything is published.
    """

    def __init__(
        self,
        files: DirectorySave | PeerDirectorySave,
        optimizer: object,
        constant: object,
        shared: Callable[[str], bool] | None,
    ) -> None:
        self._files = files
        self._root = os.path.realpath(files.path)
        self._optimizer = optimizer
        self._constant = constant
        self._shared = shared
        self.at_once = False

    def take(self, obj: object, path: str) -> bool:
        """Save an object as torch.save would, if the path is in the directory; return whether it is."""
        return self._save(obj, path, "torch", None)

    def take_safetensors(self, tensors: Mapping[str, Any], path: str, metadata: Mapping[str, str] | None) -> bool:
        """Save tensors as safetensors' save_file would, if the path is in the directory; return whether it is."""
        return self._save(tensors, path, "safetensors", metadata)

    def _save(self, obj: object, path: str, file_format: str, metadata: Mapping[str, str] | None) -> bool:
        name = self._name_of(path)
        if name is None:
            return False
        own = self._shared is not None and not self._shared(name)
        if own and isinstance(self._files, PeerDirectorySave):
            return True  # the coordinator saves it
        if self.at_once and isinstance(self._files, DirectorySave):
            self._files.save_at_once(obj, name, format=file_format, metadata=metadata)
            return True
        self._files.save(
            obj, name, self._optimizer, constant=self._constant, format=file_format, metadata=metadata, own=own
        )
        return True

    def _name_of(self, path: str) -> str | None:
        """Return the name of a file below the directory, None for one elsewhere."""
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        name = os.path.relpath(real, self._root)
        return None if name == os.pardir or name.startswith(os.pardir + os.sep) else name


@contextmanager
def saves_into(
    files: DirectorySave | PeerDirectorySave,
    *,
    optimizer: object = None,
    constant: object = (),
    shared: Callable[[str], bool] | None = None,
) -> Iterator[Redirection]:
    """Redirect this thread's torch.save and save_file calls below `files.path` into `files`.

    Args:
        files: The target, not yet published.
        optimizer: The optimizer whose tensors are written in place, as in `DirectorySave.save`.
        constant: Objects that never change, as in `DirectorySave.save`.
        shared: With several ranks: takes a file name, and returns whether all ranks save this file, in the same order.
            Only the coordinator saves the other files; a follower's save under such a name is dropped. None: all files
            are shared.

    Yields:
        The redirection, which can write at once.

    Raises:
        ConfigError: In the block: a file is saved twice, unless both times are `at_once`; or safetensors cannot hold
            the object.
    """
    redirection = Redirection(files, optimizer, constant, shared)
    stack = _redirections.__dict__.setdefault("stack", [])
    stack.append(redirection)
    _save_file.hold()
    try:
        with routed(redirection.take):
            yield redirection
    finally:
        _save_file.release()
        stack.remove(redirection)
