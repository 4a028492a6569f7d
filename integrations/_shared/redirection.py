"""What a framework saves into a directory, file by file with stock functions, goes into a `DirectorySave` instead.

Frameworks put a checkpoint together in many functions, which users override; all end in torch.save or safetensors'
save_file with a path. Here those two are caught, on one thread and for paths below one directory; whatever else is put
there (configuration, tokenizer) is put there as ever, and published with the rest.
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

__all__ = ["saves_into"]

# Where packages keep safetensors' save_file under a name of their own.
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


class _Redirection:
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

    def take(self, obj: object, path: str) -> bool:
        return self._save(obj, path, "torch", None)

    def take_safetensors(self, tensors: Mapping[str, Any], path: str, metadata: Mapping[str, str] | None) -> bool:
        return self._save(tensors, path, "safetensors", metadata)

    def _save(self, obj: object, path: str, file_format: str, metadata: Mapping[str, str] | None) -> bool:
        name = self._name_of(path)
        if name is None:
            return False
        own = self._shared is not None and not self._shared(name)
        if own and isinstance(self._files, PeerDirectorySave):
            return True  # the first rank has it
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
) -> Iterator[None]:
    """Put what this thread saves below `files.path`, with torch.save or save_file, into `files`.

    Args:
        files: Not yet published.
        optimizer: Whose tensors are written from where they are, as in `DirectorySave.save`.
        constant: What never changes, as in `DirectorySave.save`.
        shared: With several ranks: given the name of a file, tells whether all ranks save it, in the same order. The
            others are the first rank's alone: what other ranks save under such a name is dropped. None: all are shared.

    Raises:
        ConfigError: In the block: a file is saved twice, or safetensors cannot hold what is saved.
    """
    redirection = _Redirection(files, optimizer, constant, shared)
    stack = _redirections.__dict__.setdefault("stack", [])
    stack.append(redirection)
    _save_file.hold()
    try:
        with routed(redirection.take):
            yield
    finally:
        _save_file.release()
        stack.remove(redirection)
