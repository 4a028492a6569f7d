"""Finds the newest whole Lightning checkpoint after a crash."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

from fastpersist import FastPersistError, verify

__all__ = ["last_checkpoint"]

_MANIFEST_NAME = "MANIFEST.json"
_SHARD_SUFFIX = ".distcp"
_OTHERS_NAME = "meta.pt"
"""The file that Lightning writes last into a directory of shards; without it, the directory is no checkpoint."""
_NAMES = (_MANIFEST_NAME, _OTHERS_NAME, ".metadata")


def last_checkpoint(dirpath: str | os.PathLike[str]) -> str | None:
    """Return the newest whole .ckpt of a directory, for `fit(ckpt_path=...)`; None if there is none.

    This goes back from the newest by time of modification. It reads files, and our directories of FSDP and
    ModelParallel, and compares their checksums; a stock directory must have all of its parts. It skips a damaged
    checkpoint, with a warning that says which and why.

    Args:
        dirpath: The directory of ModelCheckpoint.

    Thread safety: any thread, any process, also while training saves there.
    """
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for path in sorted(Path(dirpath).expanduser().glob("[!.]*.ckpt")):
        with contextlib.suppress(OSError):  # removed meanwhile, or a dangling symbolic link
            status = path.stat()
            if path.is_file() or (path.is_dir() and _has_shards(path)):
                found.setdefault((status.st_dev, status.st_ino), (status.st_mtime_ns, str(path)))
    for _, name in sorted(found.values(), reverse=True):
        try:
            why = _why_not_whole(name)
        except (FastPersistError, OSError) as error:
            why = str(error)
        if why is None:
            return name
        warnings.warn(f"{name} is damaged and skipped: {why}", RuntimeWarning, stacklevel=2)
    return None


def _has_shards(path: Path) -> bool:
    return any(name in _NAMES or name.endswith(_SHARD_SUFFIX) for name in os.listdir(path))


def _why_not_whole(path: str) -> str | None:
    """Return what is wrong with a checkpoint, None if nothing is."""
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, _MANIFEST_NAME)):
        if not os.path.exists(os.path.join(path, _OTHERS_NAME)):
            return "its save was never finished"
        from .._shared.sharded_redirection import why_not_whole  # slow to import; only shards need it

        return why_not_whole(path) or _damages_of(os.path.join(path, _OTHERS_NAME))
    return _damages_of(path)


def _damages_of(path: str) -> str | None:
    report = verify(path)
    return None if report.ok else "; ".join(str(damage) for damage in report.damages[:3])
