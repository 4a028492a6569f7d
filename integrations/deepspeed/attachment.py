"""`attach` gives a DeepSpeed engine save_checkpoint and load_checkpoint over one `DirectorySave` of all ranks.

`engine_tensors` finds the tensors to write in place; `checkpoint_engine` implements DeepSpeed's interface.
"""

from __future__ import annotations

import inspect as signatures
import logging
import os
import re
import uuid
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from fastpersist import (
    ConfigError,
    DirectorySave,
    FastPersistError,
    PeerDirectorySave,
    PeerError,
    PendingSave,
    StorageError,
    UnsupportedError,
    directory_save_together,
    require_engine,
    require_replaceable,
)

from .._shared.agreement import PeerFailure, are_several, is_first_rank, on_all_ranks
from .._shared.requirements import require_writers
from .checkpoint_engine import FastPersistCheckpointEngine
from .engine_tensors import EngineTensors

__all__ = ["Attachment", "attach"]

_log = logging.getLogger("fastpersist")

_Result = TypeVar("_Result")

_REPLACED = ("checkpoint_engine", "save_non_zero_checkpoint", "save_checkpoint", "load_checkpoint")
_MODEL_NAME = re.compile(r"mp_rank_\d+_model_states\.pt")
_MANIFEST_NAME = "MANIFEST.json"
# fastpersist_ranks.pt: an older version wrote it, and nothing reads it.
_FILE_OF_CHECKPOINT = re.compile(rf".*(model|optim)_states\.pt|fastpersist_ranks\.pt|{re.escape(_MANIFEST_NAME)}")


def attach(
    deepspeed_engine: Any,
    /,
    *,
    background: bool = True,
    writers: Literal["auto", "all", "node"] | int = "auto",
    constant: object = (),
    on_error: Literal["raise", "warn"] = "raise",
    engine: str = "auto",
) -> Attachment:
    """Let a DeepSpeed engine save and load its checkpoints with FastPersist; all ranks call it.

    From now on engine.save_checkpoint returns when everything that may change before the next step is copied.
    Parameters, masters and optimizer states are written in place; the engine's next step waits until the part not yet
    written is copied. A tag becomes visible when the files of all ranks are durable, and then `latest` names it. One
    save is under way at a time: the next one, and load_checkpoint, wait for it.

    An existing tag is replaced as a whole, if it holds nothing but a checkpoint. Put your own files into save_dir, or
    into the tag's directory after `Attachment.wait`.

    All ranks need one file system.

    Args:
        deepspeed_engine: The engine of deepspeed.initialize: ZeRO of any stage, pipelines, experts.
        background: False: save_checkpoint returns when the checkpoint is published.
        writers: The ranks that write replicated state (parameters, and without ZeRO the optimizer): "all", "node" (one
            of each node), a number, or "auto": the tuned choice, or all. 1: rank 0 alone, without comparing the ranks'
            replicas.
        constant: Modules and tensors that never change, such as frozen weights; they are written in place.
        on_error: What to do about a background save that failed. "raise": the next save_checkpoint, load_checkpoint,
            `wait` or `close` raises the error, on all ranks. "warn": that call issues a RuntimeWarning instead. The
            error is logged at once.
        engine: "auto", or an I/O engine's name, which then never falls back.

    Returns:
        The attachment, which waits for saves, and restores the engine's functions.

    Raises:
        ConfigError: Unknown options, or the engine has been attached before.
        UnsupportedError: It keeps optimizer states on NVMe, or checkpoints on node-local storage; stock saving works
            there.

    Thread safety: only the training thread.
    """
    require_engine(engine)
    require_writers(writers)
    if on_error not in ("raise", "warn"):
        raise ConfigError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
    if not hasattr(deepspeed_engine, "checkpoint_engine"):
        raise ConfigError(
            "attach() takes the engine, the first result of deepspeed.initialize, not a "
            f"{type(deepspeed_engine).__name__}"
        )
    if isinstance(deepspeed_engine.checkpoint_engine, FastPersistCheckpointEngine):
        raise ConfigError("this DeepSpeed engine is attached already; close() what attach returned, before another one")
    if deepspeed_engine.zero_nvme_offload_optimizer():
        raise UnsupportedError("optimizer states that DeepSpeed keeps on NVMe are copied by DeepSpeed itself")
    if deepspeed_engine.use_node_local_storage():
        raise UnsupportedError(
            "use_node_local_storage: all ranks need one file system, and here each node has its own; leave it out of "
            "the checkpoint section of DeepSpeed's configuration, or save without fastpersist"
        )
    return Attachment(
        deepspeed_engine,
        background=background,
        writers=writers,
        constant=constant,
        on_error=on_error,
        engine=engine,
    )


class Attachment:
    """The saves of one DeepSpeed engine; `attach` makes it. One thread uses it.

    As a context manager, it closes at the end of the block.
    """

    def __init__(
        self,
        deepspeed_engine: Any,
        *,
        background: bool,
        writers: Literal["auto", "all", "node"] | int,
        constant: object,
        on_error: str,
        engine: str,
    ) -> None:
        self._engine = deepspeed_engine
        self._background = background
        self._writers = writers
        self._constant = constant
        self._on_error = on_error
        self._io_engine = engine
        self._process = os.getpid()
        self._pending: PendingSave | None = None
        self._all_write = writers != 1 and _have_one_model(deepspeed_engine)
        self._tensors = EngineTensors(deepspeed_engine)
        if self._tensors.why_volatile:
            _log.info("save_checkpoint copies everything before it returns: %s", self._tensors.why_volatile)
        self._checkpoint_engine = FastPersistCheckpointEngine(
            before_step=self._tensors.pass_gate,
            before_load=self._join,
            on_cleanup=self._clean_up,
            all_write=self._all_write,
            many_files=_is_pipeline(deepspeed_engine) or deepspeed_engine.has_moe_layers,
            engine=engine,
        )
        self._stock = {name: getattr(deepspeed_engine, name) for name in _REPLACED}
        self._stand_ins = {
            "checkpoint_engine": self._checkpoint_engine,
            "save_non_zero_checkpoint": _saves_model(deepspeed_engine, self._checkpoint_engine),
            "save_checkpoint": self._save_checkpoint,
            "load_checkpoint": self._load_checkpoint,
        }
        self._own_names = [name for name in _REPLACED if name in vars(deepspeed_engine)]
        self._is_attached = True
        for name, stand_in in self._stand_ins.items():
            setattr(deepspeed_engine, name, stand_in)

    def pending(self) -> PendingSave | None:
        """Return this rank's part of the last save; None if there is none, or its outcome was reported."""
        return self._pending

    def wait_captured(self, timeout: float | None = None) -> None:
        """Wait until the engine's tensors may be changed outside of its step.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: The timeout has passed; they may not be changed yet.
        """
        if self._pending is not None:
            self._pending.wait_captured(timeout)

    def wait(self) -> None:
        """Wait until the save under way is published, and `latest` names it; all ranks call it.

        Raises:
            FastPersistError: With on_error="raise": the save has failed, here or on another rank.
        """
        self._settle()

    def close(self) -> None:
        """Wait, and restore the engine's functions; all ranks call it. Idempotent.

        Raises:
            FastPersistError: As in `wait`.
        """
        if not self._is_attached:
            return
        self._detach()
        self._settle()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        self._detach()  # other ranks may not come here: wait for this rank's part only; the log has its errors
        self._join()

    # --- in place of the engine's functions

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        save_checkpoint = self._stock["save_checkpoint"]
        call = signatures.signature(save_checkpoint).bind(*arguments, **options)
        call.apply_defaults()
        save_dir = call.arguments["save_dir"]
        if not save_dir:
            return save_checkpoint(*arguments, **options)  # DeepSpeed refuses it
        save_dir = os.path.abspath(save_dir)  # so that the background save does not follow a chdir
        tag = call.arguments.get("tag")
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        self._settle()
        files: DirectorySave | PeerDirectorySave | None = None
        try:
            files, hidden_path = self._begin(save_dir, tag)
            result = self._put_together(
                files, hidden_path, save_dir, tag, lambda: save_checkpoint(*arguments, **options)
            )
        except BaseException as error:
            if files is not None:
                files.abort()
            if self._on_error == "raise" or not isinstance(error, StorageError):
                raise
            _log.error("%s was not saved: %s", os.path.join(save_dir, tag), error)
            self._tell(error, depth=3)  # the next save may succeed
            return False
        finally:
            self._tensors.forget()
        names_it = call.arguments.get("save_latest", True)
        self._pending = files.publish(after=(lambda: _write_latest(save_dir, tag)) if names_it else None)
        if not self._background:
            self._settle()
        return result

    def _load_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        self._settle()
        return self._stock["load_checkpoint"](*arguments, **options)

    # --- one save

    def _begin(self, save_dir: str, tag: str) -> tuple[DirectorySave | PeerDirectorySave, str]:
        """Make the hidden directory; also return the coordinator's path of it."""
        directory = os.path.join(save_dir, tag)

        def check() -> str:
            if is_first_rank() and os.path.isdir(directory):
                require_replaceable(directory, _FILE_OF_CHECKPOINT.fullmatch)
            return tag

        tags = set(_on_all_ranks(check, directory))
        if len(tags) > 1:
            raise ConfigError(f"all ranks save the same tag, and here they are {', '.join(sorted(tags))}")

        def begin() -> DirectorySave | PeerDirectorySave:
            # A directory that appears there from now on is not ours to replace.
            overwrite: Literal["foreign", False] = "foreign" if os.path.isdir(directory) else False
            options: dict[str, Any] = {"overwrite": overwrite, "engine": self._io_engine, "make_parents": True}
            if not are_several():
                return DirectorySave(directory, **options)
            everybody: Any = dist.group.WORLD
            return directory_save_together(directory, everybody, writers=self._writers, **options)

        made: list[DirectorySave | PeerDirectorySave] = []

        def make() -> str:
            made.append(begin())
            return made[0].path

        try:
            paths = _on_all_ranks(make, directory)
        except BaseException:
            for one in made:
                one.abort()
            raise
        return made[0], paths[0]

    def _put_together(
        self,
        files: DirectorySave | PeerDirectorySave,
        hidden_path: str,
        save_dir: str,
        tag: str,
        save_checkpoint: Callable[[], _Result],
    ) -> _Result:
        """Let DeepSpeed save all of its files into `files`."""
        engine = self._checkpoint_engine
        is_seen = os.path.isdir(hidden_path)  # else this rank saves nothing, and `check` raises on all ranks

        def take(state_dict: Any, name: str, copies: list[Any]) -> None:
            if not is_seen:
                return
            if self._all_write and _MODEL_NAME.fullmatch(name):
                files.save(state_dict, name, self._tensors.replicas_owner, constant=self._constant)
            else:
                constant = [self._constant, copies]
                files.save(state_dict, name, self._tensors.owner, constant=constant, own=True)

        def check() -> None:
            failure, engine.failure = engine.failure, None
            if failure is not None:
                raise failure
            if not is_seen:
                raise UnsupportedError(
                    f"rank {dist.get_rank()} does not see {save_dir} of rank 0: all ranks need one file system; save "
                    "without fastpersist where each node has its own"
                )

        self._tensors.look()
        directory = os.path.join(save_dir, tag)
        with engine.taking(directory, take):
            result = save_checkpoint()
        _on_all_ranks(check, directory)
        return result

    # --- how saves end

    def _join(self) -> None:
        """Wait for this rank's part, without raising its error."""
        if self._pending is not None and self._process == os.getpid():
            self._pending.join()

    def _settle(self) -> None:
        """Finish the last save on all ranks, and raise its error on all of them, or warn of it."""
        pending, self._pending = self._pending, None
        error = None
        if pending is not None and self._process == os.getpid():
            pending.join()
            error = pending.undelivered_error()

        def deliver() -> None:
            if error is not None:
                raise error

        try:
            _on_all_ranks(deliver, "the last checkpoint")
        except FastPersistError as failure:
            self._tell(failure)

    def _clean_up(self) -> None:
        """Finish when the engine is destroyed, perhaps on this rank alone."""
        self._join()
        error = None if self._pending is None else self._pending.undelivered_error()
        stock = self._stock["checkpoint_engine"]
        if stock.is_decoupled():
            stock.cleanup()
        if error is not None:
            self._tell(error)

    def _tell(self, error: BaseException, depth: int = 4) -> None:
        """Raise an error, or warn the caller at that stack depth."""
        if self._on_error == "raise":
            raise error
        warnings.warn(f"a checkpoint was not saved, training goes on: {error}", RuntimeWarning, stacklevel=depth)

    def _detach(self) -> None:
        """Restore the engine's functions; functions that other code has replaced since stay."""
        self._is_attached = False
        for name, stand_in in self._stand_ins.items():
            if vars(self._engine).get(name) != stand_in:
                continue
            if name in self._own_names:
                setattr(self._engine, name, self._stock[name])
            else:
                delattr(self._engine, name)
        self._tensors.let_go()


# ------------------------------------------------------------------------------------------- which rank saves what


def _have_one_model(deepspeed_engine: Any) -> bool:
    """Return whether all ranks hold the same model, and so would save the same file."""
    return (
        are_several()
        and not deepspeed_engine.zero_optimization_partition_weights()
        and not deepspeed_engine.has_moe_layers
        and not _is_pipeline(deepspeed_engine)
        and deepspeed_engine.mp_world_size == 1
        and deepspeed_engine.seq_dp_world_size == dist.get_world_size()
    )


def _is_pipeline(deepspeed_engine: Any) -> bool:
    return "PipelineEngine" in {base.__name__ for base in type(deepspeed_engine).__mro__}


def _saves_model(deepspeed_engine: Any, checkpoint_engine: FastPersistCheckpointEngine) -> bool:
    """Return whether this rank saves model states; DeepSpeed has asked its former checkpoint engine for that."""
    if deepspeed_engine.zero_optimization_partition_weights() and deepspeed_engine.is_first_weights_partition_group():
        return True
    data_parallel_rank = dist.get_rank(deepspeed_engine.seq_data_parallel_group) if are_several() else 0
    return checkpoint_engine.is_data_parallel_writer(data_parallel_rank)


# ------------------------------------------------------------------------------------------- several ranks


def _on_all_ranks(work: Callable[[], _Result], path: str) -> list[_Result]:
    """Run a function on all ranks; raise on all of them if one has failed. Collective."""

    def error_of(failure: PeerFailure) -> Exception:
        text = f"rank {failure.rank} could not save {path}: {failure.text}"
        if failure.is_of_the_disk:
            return StorageError(None, text, path)
        return PeerError(text, rank=failure.rank, subject=path)

    return on_all_ranks(work, error_of)


# ------------------------------------------------------------------------------------------- latest


def _write_latest(save_dir: str, tag: str) -> None:
    """Replace `latest` atomically by the tag of the new checkpoint, on the coordinator."""
    path = os.path.join(save_dir, "latest")
    pending_path = os.path.join(save_dir, f".latest.pending-{uuid.uuid4().hex}")
    try:
        try:
            with open(pending_path, "xb") as file:
                file.write(tag.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(pending_path, path)
        except BaseException:
            if os.path.lexists(pending_path):
                os.unlink(pending_path)
            raise
        fd = os.open(save_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        told = f"{os.path.join(save_dir, tag)} is saved, but {path} cannot be updated to name it: {error.strerror}"
        raise StorageError(error.errno, told, path) from error
