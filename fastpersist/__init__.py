"""FastPersist: PyTorch training state saved and restored at the speed of the disk, in files that stock tools read."""

from __future__ import annotations

try:
    import fastpersist._native  # noqa: F401 - first, so that its absence is explained here
except ImportError as error:
    raise ImportError(
        f"the native module fastpersist._native cannot be imported ({error}). If you are in the source tree: run "
        "`make setup`, which builds it, and use .venv/bin/python; else reinstall the package"
    ) from error

from fastpersist import events as events
from fastpersist.api import SaveReport, inspect, load, load_into, save, save_async, verify
from fastpersist.checkpointer.checkpointer import Checkpointer
from fastpersist.distributed.group_save import PeerDirectorySave, directory_save_together
from fastpersist.errors import (
    AgreementTimeoutError,
    CheckpointNotFoundError,
    ChecksumError,
    ConfigError,
    CoordinationError,
    CorruptionError,
    DeviceError,
    EndOfFileError,
    FastPersistError,
    FormatError,
    InternalError,
    NoSpaceError,
    PeerError,
    RowIndexError,
    SkippedError,
    StorageError,
    TornStateError,
    UnsavableTensorError,
    UnsupportedError,
)
from fastpersist.loading.directory_inspection import require_replaceable
from fastpersist.loading.file_inspection import Damage, Manifest, TensorEntry, VerifyReport
from fastpersist.rows.embedding import RowEmbedding
from fastpersist.rows.packing import PackReport, pack_rows
from fastpersist.rows.store import RowStats, RowStore, RowTicket
from fastpersist.rows.verification import verify_rows
from fastpersist.rows.writer import RowWriter, write_rows
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.pending_save import PendingSave, SaveStats
from fastpersist.streaming.stream import StreamStats, WeightStream, stream
from fastpersist.transfer.engine_selection import EngineProbe, engines, require_engine
from fastpersist.transfer.tensor_file import TensorFile
from fastpersist.transfer.tensor_memory import byte_view, locked_tensor
from fastpersist.transfer.tensor_requests import PendingIO

# isort: split
# It uses the names above; mypy knows integrations/ by another name.
from fastpersist.integrations.torch_save import install, installed, uninstall  # type: ignore[import-not-found]

__version__ = "0.1.0"

__all__ = [
    "AgreementTimeoutError",
    "CheckpointNotFoundError",
    "Checkpointer",
    "ChecksumError",
    "ConfigError",
    "CoordinationError",
    "CorruptionError",
    "Damage",
    "DeviceError",
    "DirectorySave",
    "EndOfFileError",
    "EngineProbe",
    "FastPersistError",
    "FormatError",
    "InternalError",
    "Manifest",
    "NoSpaceError",
    "PackReport",
    "PeerDirectorySave",
    "PeerError",
    "PendingIO",
    "PendingSave",
    "RowEmbedding",
    "RowIndexError",
    "RowStats",
    "RowStore",
    "RowTicket",
    "RowWriter",
    "SaveReport",
    "SaveStats",
    "SkippedError",
    "StorageError",
    "StreamStats",
    "TensorEntry",
    "TensorFile",
    "TornStateError",
    "UnsavableTensorError",
    "UnsupportedError",
    "VerifyReport",
    "WeightStream",
    "byte_view",
    "directory_save_together",
    "engines",
    "inspect",
    "install",
    "installed",
    "load",
    "load_into",
    "locked_tensor",
    "pack_rows",
    "require_engine",
    "require_replaceable",
    "save",
    "save_async",
    "stream",
    "uninstall",
    "verify",
    "verify_rows",
    "write_rows",
]
