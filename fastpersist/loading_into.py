"""`fp.load_into`: which of two ways fills a target.

Modules and tensors alone are filled straight from the file, whatever its format (`filling`). A target that holds more,
such as optimizers, is restored as `Checkpointer.load(into=)` restores it (`resuming`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fastpersist.arguments import local_path
from fastpersist.distributed.shared_reader import reader_for
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.fill_tensors import IncompatibleKeys, fill_target, misfit
from fastpersist.loading.restore import restore_whole
from fastpersist.transfer.engine_selection import engine_ladder, refuse_null_engine
from fastpersist.transfer.torch_boundary import untraced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["load_into"]


@untraced
def load_into(
    path: str | os.PathLike[str],
    target: object,
    *,
    strict: bool = True,
    verify: bool = False,
    engine: str = "auto",
    process_group: ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Fill existing tensors from a file, in place, without a second copy of the state.

    Everything is checked first: names, shapes, dtypes and the structure of the file. If anything is wrong, nothing has
    been changed. Values are converted where dtypes differ, as load_state_dict does.

    Args:
        path: A file written by fastpersist, torch.save or safetensors.
        target: A Module, filled as its load_state_dict would be from the state_dict in the file; a tensor; an
            optimizer, bare or wrapped (`.optimizer`), or any object with load_state_dict; or dicts, lists and tuples,
            nested, of these, with the structure of the object in the file. Plain values (numbers, text, None …) in a
            dict or a list are set to the file's; a dict beside them, or beside an optimizer, gets those that it lacks.
        strict: Demand that both sides have the same names. Without it, what is only on one side is passed over;
            shapes must still agree, and optimizers fit.
        verify: Check the CRCs of the whole file before the first byte of the target changes. The file is read twice.
        engine: "auto", or an engine's name, which then never falls back.
        process_group: All its ranks call this with the same file, each with its own target, and share the reading; as
            in `load`, it returns on all of them or raises on all. What one finds wrong changes no target of any.

    Returns:
        The names that were passed over, as Module.load_state_dict does: `missing_keys` and `unexpected_keys`.

    Raises:
        CheckpointNotFoundError: There is no such file.
        ConfigError: Names, shapes or the class of an optimizer do not agree, or the target has what cannot be filled;
            the message lists it by its name in the target. Nothing was changed, unless a load_state_dict refused its
            entry: then the message says what is *partly overwritten*.
        FormatError, ChecksumError, UnsupportedError: As in load; nothing was changed.
        StorageError: An error of the disk. If the message says *partly overwritten*, the tensors it lists have
            unknown contents: load again, or from another checkpoint.
        PeerError: With a process group: another rank failed, or is gone. *Partly overwritten* as above; without
            these words the target is either as it was or, if that rank failed last, filled.
        CoordinationError: The ranks were given different files.

    Thread safety: any thread; nobody else may use the target's tensors meanwhile.
    """
    name = local_path(path)
    with reader_for(process_group, name) as read, CheckpointSource(name) as source:
        if _is_tensors_only(target):
            return fill_target(source, target, strict=strict, verify=verify, engine=engine, read=read)
        if source.kind == "safetensors":
            raise misfit(source.path, ["it holds tensors only; the target holds more than tensors and Modules"])
        for one in engine_ladder(engine, source.fd, for_reading=True):
            refuse_null_engine(one)
        return restore_whole(source, target, strict=strict, verify=verify, engine=engine, read=read)


def _is_tensors_only(target: object) -> bool:
    if isinstance(target, Mapping):
        return all(map(_is_tensors_only, target.values()))
    if isinstance(target, (list, tuple)):
        return all(map(_is_tensors_only, target))
    return isinstance(target, (torch.Tensor, torch.nn.Module))
