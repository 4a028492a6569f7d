"""Keeps the files that users have put into a checkpoint-N when the Trainer saves that step again.

A stock Trainer overwrites its own files and leaves all others alone. FastPersist replaces the whole directory. So this
module holds foreign files beside the old checkpoint, by hard links where the file system has them, and moves them into
the new one as soon as it is published. They do not become part of the checkpoint: a change to them is no damage. If the
process dies in between, they stay in `.checkpoint-N.held`, and the next save of that step puts them back. Links and
special files are not kept: no checkpoint with one of them counts as whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator

from transformers.trainer_utils import rotate_checkpoints

__all__ = ["clear_up", "drop_held", "hold_foreign", "own_names", "put_back"]

_log = logging.getLogger("fastpersist")

_MANIFEST_NAME = "MANIFEST.json"
# Names of the Trainer's own files: a stock checkpoint has no list of them. None may stay beside newer files.
_TRAINERS = re.compile(
    r"((pytorch_model|model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|trainer_state\.json|training_args\.bin"
    r"|checkpoint-is-incomplete\.txt|((pytorch_model_fsdp|optimizer)(_\d+|\.bin)|global_step\d+)(/.*)?)"
)


def hold_foreign(path: str, *, wait: Callable[[], None]) -> None:
    """Hold the foreign files of a directory, if it exists, before a save replaces it.

    Args:
        path: The final name.
        wait: Waits until an earlier save has put back the files that it held.

    Raises:
        OSError: A file can neither be linked nor copied, or a directory not be listed.
    """
    held = _held_path(path)
    if os.path.isdir(held):
        wait()
    own = own_names(path) or set()
    for name in _names_below(path):
        if name == _MANIFEST_NAME or _TRAINERS.fullmatch(name) or name in own:
            continue
        source, target = os.path.join(path, name), os.path.join(held, name)
        if os.path.islink(source) or not os.path.isfile(source):
            _log.warning("%s is removed with the replaced checkpoint: links and special files are not kept", source)
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.lexists(target):
            os.unlink(target)  # left by a process that died
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


def put_back(path: str) -> None:
    """Move the held files into a new checkpoint, except for names that it has itself. Log errors."""
    held = _held_path(path)
    try:
        for name in _names_below(held):
            target = os.path.join(path, name)
            if not os.path.lexists(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.rename(os.path.join(held, name), target)
        if os.path.isdir(held):
            shutil.rmtree(held)
    except OSError as error:
        _log.warning("foreign files of %s stay in %s, because moving them back failed: %s", path, held, error)


def clear_up(path: str, run_dir: str, limit: int | None, best: str | None) -> None:
    """Put the held files back; delete old checkpoints as the Trainer does. The new one is durable by now."""
    put_back(path)
    try:
        rotate_checkpoints(output_dir=run_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)
    except OSError as error:
        _log.warning("old checkpoints in %s could not be deleted: %s", run_dir, error)


def drop_held(path: str, *, unless: bool) -> None:
    """Drop the files held for a save that failed: the old directory still has them, or they are put back."""
    if not unless and os.path.isdir(path):
        put_back(path)  # the new directory has the name already if only its sync failed


def _held_path(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.held")


def _names_below(path: str) -> Iterator[str]:
    """Yield the relative paths of all non-directories below a directory; none if it does not exist.

    Raises:
        OSError: A directory cannot be listed.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # an unlisted file would be lost with the old directory
            raise error

    for folder, folders, names in os.walk(path, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*names, *links]:
            yield os.path.relpath(os.path.join(folder, name), path)


def own_names(path: str) -> set[str] | None:
    """Return the names of a checkpoint's own files, from its manifest; None without a readable one."""
    try:
        with open(os.path.join(path, _MANIFEST_NAME), encoding="utf-8") as file:
            return {entry["name"] for entry in json.load(file)["files"]}
    except (OSError, ValueError, LookupError, TypeError):
        return None
