"""The rows of `bench save`: fastpersist.save in its forms, and other writers at their best settings.

Each row's clock runs from the call until bytes and name would survive a power cut. We sync for writers that do not.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import fastpersist
from fastpersist.cli.bench.rows import Row, Sample
from fastpersist.cli.bench.states import State, flatten

__all__ = ["own_save_rows", "peer_save_rows", "stock_save_rows", "sync_below", "sync_path", "usable_engines"]

_DEEPSPEED = "DeepSpeed FastFileWriter"
_MIB = 1 << 20


def usable_engines(directory: str, *, buffered: bool) -> list[str]:
    """Return the engines that work in a directory, except for cufile, which must be named.

    Args:
        directory: An existing one.
        buffered: Include the engines that use the page cache.
    """
    return [
        probe.name
        for probe in fastpersist.engines(directory)
        if probe.usable and probe.name != "cufile" and (buffered or not probe.name.endswith("-buffered"))
    ]


def own_save_rows(state: State, engines: list[str]) -> list[Row]:
    """Return fastpersist's rows: auto, each of `engines`, without checksums, as safetensors."""

    def save(obj: object, path: str, **options: Any) -> Sample:
        started_s = time.perf_counter()
        report = fastpersist.save(obj, path, **options)
        return Sample(time.perf_counter() - started_s, state.payload_bytes, report.engine)

    def row(name: str, **options: Any) -> Row:
        return Row(name, "fastpersist", lambda path: save(state.tree, path, **options))

    flat = flatten(state.tree)
    return [
        row("fp.save"),
        *(row(f"fp.save, {engine}", engine=engine) for engine in engines),
        row("fp.save, checksum=False", checksum=False),
        Row("fp.save .safetensors", "fastpersist", lambda path: save(flat, path), suffix=".safetensors"),
    ]


def peer_save_rows(state: State) -> list[Row]:
    """Return the rows of torch.save, safetensors, DCP and DeepSpeed."""
    return [
        *stock_save_rows(state),
        _dcp_row(state, thread_count=1),
        _dcp_row(state, thread_count=2),
        _deepspeed_row(state),
    ]


def stock_save_rows(state: State) -> list[Row]:
    """Return the rows of torch.save and safetensors."""
    return [_torch_row(state, crc=True), _torch_row(state, crc=False), _safetensors_row(state)]


def _peer(state: State, name: str, write: Callable[[str], object], suffix: str = ".pt") -> Row:
    """Return a row that writes a file and then makes file and name durable."""

    def run(path: str) -> Sample:
        started_s = time.perf_counter()
        write(path)
        sync_path(path)
        sync_path(os.path.dirname(path))
        return Sample(time.perf_counter() - started_s, state.payload_bytes)

    return Row(name, "peer", run, suffix)


def sync_path(path: str) -> None:
    """Make a file's bytes, or a directory's names, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_below(path: str) -> None:
    """Make all files and names in a directory durable."""
    for directory, _, names in os.walk(path):
        for name in names:
            sync_path(os.path.join(directory, name))
        sync_path(directory)


def _torch_row(state: State, *, crc: bool) -> Row:
    def write(path: str) -> None:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(crc)
        try:
            torch.save(state.tree, path)
        finally:
            torch.serialization.set_crc32_options(before)

    return _peer(state, f"torch.save + fsync, CRC {'on' if crc else 'off'}", write)


def _safetensors_row(state: State) -> Row:
    name = "safetensors save_file + fsync"
    if importlib.util.find_spec("safetensors") is None:
        return Row(name, "peer", None, why_not="not installed: pip install safetensors")
    from safetensors.torch import save_file

    flat = flatten(state.tree)
    return _peer(state, name, lambda path: save_file(flat, path), ".safetensors")


def _dcp_row(state: State, *, thread_count: int) -> Row:
    name = f"DCP FileSystemWriter, {thread_count} thread{'s' if thread_count > 1 else ''}"
    if not torch.distributed.is_available():
        return Row(name, "peer", None, why_not="this torch is built without torch.distributed")
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    def write(path: str) -> None:
        # sync_files: it syncs its data files itself; we add its directory, which holds their names.
        writer = FileSystemWriter(path, sync_files=True, thread_count=thread_count)
        try:
            save(state.tree, storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            # It is how DCP reports everything, Ctrl-C included.
            if any(isinstance(failure[0], KeyboardInterrupt) for failure in error.failures.values()):
                raise KeyboardInterrupt from error
            raise RuntimeError(f"DCP: {error}") from error

    return _peer(state, name, write, ".dcp")


def _deepspeed_row(state: State) -> Row:
    """Return the row of DeepSpeed's writer under stock torch.save; its "async_io" operator is compiled on first use."""
    if importlib.util.find_spec("deepspeed") is None:
        return Row(_DEEPSPEED, "peer", None, why_not="not installed: pip install deepspeed")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed and its compiler talk; standard output is the table
            deepspeed = importlib.import_module("deepspeed.io")
            operator = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # noqa: BLE001 - compilers and loaders fail in many ways; all mean that it is not there
        reason = str(error).splitlines()[0] if str(error) else ""
        return Row(_DEEPSPEED, "peer", None, why_not=f"its async_io cannot be built: {type(error).__name__} {reason}")
    # Requests as ours and fio's: 8 MiB, eight at a time. 128 MiB of locked memory make two buffers of eight requests.
    handle = operator.aio_handle(
        block_size=8 * _MIB, queue_depth=8, single_submit=False, overlap_events=True, intra_op_parallelism=1
    )
    buffer = handle.new_cpu_locked_tensor(128 * _MIB, torch.empty(0, dtype=torch.uint8))
    configuration = deepspeed.FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer)

    def write(path: str) -> None:
        writer = deepspeed.FastFileWriter(path, configuration)
        torch.save(state.tree, writer)
        writer.close()

    return _peer(state, _DEEPSPEED, write)
