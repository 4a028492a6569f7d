"""Lightning's FSDP and ModelParallel, where each rank saves its shards into a directory, in the background.

These strategies use no CheckpointIO: they assemble a directory with dcp.save and torch.save. `ShardedSaving` replaces
that function, and calls it with a hidden directory. It redirects the files into one `DirectorySave` of all ranks
(`sharded_redirection`, `redirection`), which publishes the whole directory under Lightning's names. Loading calls the
strategy's function too, and `FastPersistReader` reads the shards.

The ranks agree on the training thread that each has begun, at a point where Lightning has a barrier anyway. From there
on only the writers communicate. Each rank's plugin decides which names wait for which.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch.distributed as dist

from fastpersist import (
    DirectorySave,
    PeerDirectorySave,
    PendingSave,
    UnsupportedError,
    directory_save_together,
    require_replaceable,
)

from .._shared.redirection import saves_into
from .ddp import SLURM_PREFIX, moves_parameters, on_all_ranks, shards_checkpoints
from .file_order import FileOrder, key_of, local_path, sync_path

__all__ = ["ShardedSaving"]

_FILE_OF_CHECKPOINT = re.compile(r"__\d+_\d+\.distcp|\.metadata(?:\.tmp)?|meta\.pt|MANIFEST\.json")
"""Files that the strategies save into a directory."""

_SLURM_NAME = ".slurm.ckpt"
"""First name of a save for Slurm: Lightning counts all names like its own for Slurm, hidden ones too."""

_BESIDE_FILE = ".directory"
"""In the first name of a save that replaces a file, which stays until the save is durable: a.directory.ckpt."""


class Plugin(Protocol):
    """The part of the plugin that this module uses."""

    @property
    def order(self) -> FileOrder:
        """The saves, links and removals that are not done."""

    @property
    def durable(self) -> bool:
        """Whether saves survive power loss."""

    @property
    def engine(self) -> str:
        """The engine that writes and reads."""

    def prepare(self) -> tuple[object, str]:
        """Wait and raise as needed before a save; return the optimizer that it gates, and the gate."""

    def accept(self, key: str, pending: PendingSave) -> None:
        """Take a save that has begun."""

    def wait_for(self, path: str | os.PathLike[str]) -> None:
        """Wait until the saves to a path are durable."""


class ShardedSaving:
    """Replaces `save_checkpoint` and `load_checkpoint` of a strategy, of a Trainer or of Fabric, on all ranks.

    It stays for the strategy's life, so saves after `fit()` work the same way.

    Args:
        strategy: A strategy that saves shards.
        plugin: This rank's plugin.
        is_of_fabric: Whether it is Fabric's strategy, whose functions take other arguments.
    """

    def __init__(self, strategy: Any, plugin: Plugin, *, is_of_fabric: bool) -> None:
        self._strategy = strategy
        self._plugin = plugin
        self._save_alone = strategy.save_checkpoint
        self._load_alone = strategy.load_checkpoint
        self._plans: dict[str, Any] = {}
        strategy.save_checkpoint = self._save_of_fabric if is_of_fabric else self._save_of_trainer
        strategy.load_checkpoint = self._load
        if not is_of_fabric:  # the Trainer asks the strategy for the state when it saves
            for name in ("lightning_module_state_dict", "optimizer_state"):
                setattr(strategy, name, _staying(getattr(strategy, name)))

    @classmethod
    def stand_in(cls, strategy: Any, plugin: Plugin, *, is_of_fabric: bool = False) -> bool:
        """Replace the strategy's functions, unless it saves single files; return whether they are replaced now."""
        if not shards_checkpoints(strategy):
            return False
        found = getattr(vars(strategy).get("save_checkpoint"), "__self__", None)
        if isinstance(found, ShardedSaving):
            found._plugin = plugin
        else:
            cls(strategy, plugin, is_of_fabric=is_of_fabric)
        return True

    # --- called by the Trainer and Fabric

    def _save_of_trainer(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self._save(
            filepath,
            lambda path: self._save_alone(checkpoint, path, storage_options=storage_options),
            is_usual=storage_options is None,
        )

    def _save_of_fabric(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        self._save(
            path,
            lambda path: self._save_alone(path, state, storage_options=storage_options, filter=filter),
            is_usual=storage_options is None and filter is None,
        )

    def _load(self, *arguments: Any, **options: Any) -> Any:
        from .._shared.sharded_redirection import reads_shards  # slow to import; only sharding strategies need it

        given = [*arguments, *(options[name] for name in ("path", "checkpoint_path") if name in options)][0]
        path = local_path(self._strategy.broadcast(given), expands=False)
        if path is not None:
            on_all_ranks(path, lambda: self._plugin.wait_for(path))
        with reads_shards(engine=self._plugin.engine):
            return self._load_alone(*arguments, **options)

    # --- inside

    def _save(self, given: Any, put_together: Callable[[Any], None], *, is_usual: bool) -> None:
        path = local_path(self._strategy.broadcast(given), expands=False)
        if path is None or not is_usual:
            put_together(given)  # the strategy refuses it, or saves it elsewhere
            return
        key = key_of(path)
        is_for_slurm = os.path.basename(key).startswith(SLURM_PREFIX)
        replaces_file = self._strategy.broadcast(os.path.isfile(key) and not os.path.islink(key))
        target = _BESIDE_FILE.join(os.path.splitext(key)) if replaces_file else key
        if is_for_slurm:
            target = os.path.join(os.path.dirname(key), _SLURM_NAME)
        gating: tuple[object, str] = (None, "optimizer")
        files: DirectorySave | PeerDirectorySave | None = None
        pending: PendingSave | None = None

        def prepare() -> None:
            nonlocal gating
            gating = self._plugin.prepare()
            if moves_parameters(self._strategy):
                gating = (None, "optimizer")
            if self._strategy.global_rank == 0:
                self._plugin.order.make_room(key)
                if os.path.isdir(target):
                    require_replaceable(target, _FILE_OF_CHECKPOINT.fullmatch)

        def begin() -> str:
            nonlocal files
            files = self._begin(target)
            return files.path

        def fill() -> None:
            nonlocal pending
            pending = self._fill(files, directory, put_together, gating)

        try:
            on_all_ranks(key, prepare)
            directory = on_all_ranks(key, begin)[0]
            on_all_ranks(key, lambda: self._require_seen(directory))
            on_all_ranks(key, fill)
        except BaseException:
            if files is not None:
                files.abort()
            if pending is not None:
                pending.exception()  # count the error as delivered: it is raised here, not once more by the writer
            raise
        if target != key:
            on_all_ranks(key, lambda: self._rename(pending, target, key))
        elif pending is not None:
            self._plugin.accept(key, pending)

    def _begin(self, target: str) -> DirectorySave | PeerDirectorySave:
        everybody: Any = dist.group.WORLD
        engine = self._plugin.engine
        return directory_save_together(target, everybody, overwrite="foreign", engine=engine, make_parents=True)

    def _require_seen(self, directory: str) -> None:
        if not os.path.isdir(directory):
            raise UnsupportedError(
                f"rank {self._strategy.global_rank} does not see {directory}, which rank 0 has made: all ranks "
                "save shards to one file system; without fastpersist, stock saving works"
            )

    def _fill(
        self,
        files: Any,
        directory: str,
        put_together: Callable[[Any], None],
        gating: tuple[object, Any],
    ) -> PendingSave:
        from .._shared.sharded_redirection import shards_into

        optimizer, gate = gating
        plans = {} if self._plugin.order.under_way() else self._plans  # only one save at a time can use the plans
        with ExitStack() as stack:
            if isinstance(files, DirectorySave):  # all files but shards are small, and the coordinator's
                stack.enter_context(saves_into(files, shared=lambda _name: False))
            stack.enter_context(shards_into(files, directory, optimizer=optimizer, gate=gate, plans=plans))
            put_together(directory)
        pending: PendingSave = files.publish(durable=self._plugin.durable)
        return pending

    def _rename(self, pending: PendingSave | None, target: str, key: str) -> None:
        if pending is not None:
            pending.result()
        if self._strategy.global_rank == 0:
            if os.path.isfile(key):  # a checkpoint of a strategy that saves single files
                os.remove(key)
            os.rename(target, key)
            if self._plugin.durable:
                sync_path(os.path.dirname(key))


def _staying(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a strategy's function to leave the state on its device: the writer copies it to the host."""

    @functools.wraps(stock)
    def staying(*arguments: Any, **options: Any) -> Any:
        from .._shared.sharded_redirection import shards_where_they_are

        with shards_where_they_are():
            return stock(*arguments, **options)

    return staying
