"""What users have put into a checkpoint-N stays there when the Trainer saves that step again.

A stock Trainer writes over its own files and leaves all others alone. Ours are published as a new directory in place of
the old one. So files that are no part of the old checkpoint are held beside it before it goes, by hard links where the
file system has them, and put back as soon as the new one is published. They do not become part of it: they may change
without its being damaged. If the process dies in between, they are in `.checkpoint-N.held`, from where the next save of
that step puts them back. Links and special files are not kept: with one of them, no checkpoint counts as whole.
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
# What is the Trainer's wherever it is from: a stock one has no list of its files. None may stay beside newer ones.
_TRAINERS = re.compile(
    r"((pytorch_model|model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
    r"|optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|trainer_state\.json|training_args\.bin"
    r"|checkpoint-is-incomplete\.txt|((pytorch_model_fsdp|optimizer)(_\d+|\.bin)|global_step\d+)(/.*)?)"
)


def hold_foreign(path: str, *, wait: Callable[[], None]) -> None:
    """Hold what in a directory that is about to be replaced is no part of its checkpoint. There may be no directory.

    Args:
        path: The final name.
        wait: Waits until an earlier save has put back what it held.

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
            _log.warning("%s goes with the checkpoint that is replaced: links and special files are not kept", source)
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.lexists(target):
            os.unlink(target)  # of a save that died
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


def put_back(path: str) -> None:
    """Give a new checkpoint what was held, but for names that it has itself. What goes wrong is in the log."""
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
        _log.warning("what others had put into %s is in %s, as it cannot be put back: %s", path, held, error)


def clear_up(path: str, run_dir: str, limit: int | None, best: str | None) -> None:
    """Put back what was held; delete old checkpoints as the Trainer does. The new one is durable by now."""
    put_back(path)
    try:
        rotate_checkpoints(output_dir=run_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)
    except OSError as error:
        _log.warning("old checkpoints in %s could not be deleted: %s", run_dir, error)


def drop_held(path: str, *, unless: bool) -> None:
    """Forget what was held for a save that failed: it is where it was, or, if that came too late, is put back."""
    if not unless and os.path.isdir(path):
        put_back(path)  # the new one has the name already where only the sync of that has failed


def _held_path(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.held")


def _names_below(path: str) -> Iterator[str]:
    """Name all that is no directory below one, parts separated by "/"; nothing if there is none.

    Raises:
        OSError: A directory cannot be listed.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # else files that are there would go unseen, and then be gone
            raise error

    for folder, folders, names in os.walk(path, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*names, *links]:
            yield os.path.relpath(os.path.join(folder, name), path)


def own_names(path: str) -> set[str] | None:
    """Return the files of one of our checkpoints; None where there is no list of them."""
    try:
        with open(os.path.join(path, _MANIFEST_NAME), encoding="utf-8") as file:
            return {entry["name"] for entry in json.load(file)["files"]}
    except (OSError, ValueError, LookupError, TypeError):
        return None
