"""Where a storage writer or reader of torch.distributed.checkpoint has its checkpoint: which directory it is told."""

from __future__ import annotations

import os

from fastpersist.errors import ConfigError

__all__ = ["StoragePath"]


class StoragePath:
    """What our storage writers and readers share: the directory that they were made for, or that DCP tells them later.

    Args:
        path: The directory; None if DCP will tell it.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self._path = None if path is None else os.fspath(path)

    @property
    def checkpoint_id(self) -> str | None:
        """The directory."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def _known_path(self, call: str) -> str:
        """Return the directory.

        Raises:
            ConfigError: Nobody has said it.
        """
        if self._path is None:
            name = type(self).__name__
            raise ConfigError(f"{name} does not know which directory: pass path, or checkpoint_id= to {call}")
        return self._path
