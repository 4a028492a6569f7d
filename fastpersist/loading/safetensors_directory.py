"""Finds the safetensors files of a model in a directory, as HuggingFace writes them, and the tensors in each.

With `model.safetensors.index.json` these are the files that it names; without it `model.safetensors`, or else all
safetensors files. Here are names and headers only: `fill_target` fills targets from the files, and
`dcp.huggingface.storage_reader` reads shards of them.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import ExitStack

from fastpersist.commit.filesystem import open_regular, storage_errors
from fastpersist.errors import CheckpointNotFoundError, FormatError, StorageError
from fastpersist.formats.manifest import check_file_name
from fastpersist.formats.safetensors import INDEX_NAME, SINGLE_NAME
from fastpersist.loading.checkpoint_file import CheckpointSource

__all__ = ["file_names", "holds_safetensors", "open_all", "parse_index", "read_index"]

_SUFFIX = ".safetensors"


def holds_safetensors(path: str) -> bool:
    """Tell whether a path is a directory with safetensors files, or with an index of such files."""
    if not os.path.isdir(path):
        return False
    return os.path.lexists(os.path.join(path, INDEX_NAME)) or bool(_names_in(path))


def read_index(directory: str) -> dict[str, str] | None:
    """Return the file of each tensor, by the index; None without an index, and beside a file of the whole model.

    Raises:
        FormatError: The file is no index.
        StorageError: It cannot be read.
    """
    if os.path.exists(os.path.join(directory, SINGLE_NAME)):  # transformers looks for it first, too
        return None
    try:
        return parse_index(os.path.join(directory, INDEX_NAME))
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def parse_index(path: str) -> dict[str, str]:
    """Return the file of each tensor, by an index; the files are beside it.

    Raises:
        FormatError: The file is no index.
        StorageError: It cannot be read.
    """
    with storage_errors("reading", path), open(open_regular(path), "rb") as file:
        text = file.read()
    try:
        weight_map = json.loads(text)["weight_map"]
        found = {str(tensor): str(name) for tensor, name in weight_map.items()}
        for name in found.values():
            check_file_name(name)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"it does not say which tensor is in which file: {error}", path=path) from None
    return found


def file_names(directory: str) -> list[str]:
    """Return the names of the safetensors files of a directory without an index.

    Raises:
        CheckpointNotFoundError: There are none.
        StorageError: The directory cannot be listed.
    """
    found = _names_in(directory)
    if SINGLE_NAME in found:
        return [SINGLE_NAME]
    if not found:
        message = f"there is no HuggingFace checkpoint at {directory}: it has neither {INDEX_NAME} nor *{_SUFFIX}"
        raise CheckpointNotFoundError(errno.ENOENT, message, directory)
    return found


def _names_in(directory: str) -> list[str]:
    with storage_errors("listing", directory):
        try:
            names = os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            names = []
    return sorted(name for name in names if name.endswith(_SUFFIX) and not name.startswith("."))


def open_all(directory: str, stack: ExitStack) -> list[CheckpointSource]:
    """Open the files of a model, and prove that each tensor lies in one of them, where the index has it.

    Args:
        directory: The directory of the files.
        stack: Closes the files.

    Raises:
        CheckpointNotFoundError: There are no files, or some that the index names are missing: the message names them.
        FormatError: A file or the index is damaged, or they contradict each other.
        StorageError: An error of the disk.
    """
    weight_map = read_index(directory)
    names = file_names(directory) if weight_map is None else sorted(set(weight_map.values()))
    if missing := [name for name in names if not os.path.lexists(os.path.join(directory, name))]:
        message = f"{directory} is not the whole checkpoint: {INDEX_NAME} names {', '.join(missing)}, missing here"
        raise CheckpointNotFoundError(errno.ENOENT, message, directory)
    sources = [stack.enter_context(CheckpointSource(os.path.join(directory, name))) for name in names]
    file_of: dict[str, str] = {}
    for name, source in zip(names, sources, strict=True):
        if source.kind == "other":
            source.refuse_incomplete()
        if source.kind != "safetensors":
            raise FormatError(f"it is no safetensors file, but {source.looks_like()}", path=source.path)
        for entry in source.header.entries:
            if entry.name in file_of:
                text = f"{entry.name!r} is in two files, {file_of[entry.name]} and {name}: remove what is not needed"
                raise FormatError(text, path=directory)
            file_of[entry.name] = name
    for tensor, name in (weight_map or {}).items():
        if file_of.get(tensor) != name:
            raise FormatError(
                f"{INDEX_NAME} says that {tensor!r} is in {name}, and it is not", path=os.path.join(directory, name)
            )
    return sources
