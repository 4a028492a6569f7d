"""The ways to save and load that gpu.py compares, each with its best settings on a GPU.

Every save is durable when its time ends: we sync for those that do not. Every load ends with its bytes on the device.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_disk import remove, sync
from gpu_measure import Device, Row, State, check_equal, state_bytes

import fastpersist as fp
from fastpersist.cli.bench.load_rows import PageCache
from fastpersist.cli.bench.overlap.ways import DcpStagedWay, Options

__all__ = ["DcpSaver", "gpudirect_rows", "load_rows", "save_rows", "written_files"]


@contextlib.contextmanager
def _torch_settings(**settings: object) -> Iterator[None]:
    """Set torch.save's own options: compute_crc32, use_pinned_memory_for_d2h."""
    from torch.utils.serialization import config

    with config.patch({f"save.{name}": value for name, value in settings.items()}):
        yield


class DcpSaver:
    """dcp.async_save of one state with its best settings: `DcpStagedWay`, which here removes nothing.

    Args:
        device: The device of the state. For a CPU nothing can be pinned, and the stager copies as it can.
        state: The state that is saved.
        root: The directory that gets a directory for each save.
    """

    def __init__(self, device: Device, state: State, root: str) -> None:
        self._state, self._step = state, 0
        os.makedirs(root, exist_ok=True)
        self._way = DcpStagedWay(root, self, Options(pins=device.is_cuda, keep_count=sys.maxsize))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Not used: DCP does not call it."""
        raise AttributeError("a state that is not trained")

    def state(self, step: int) -> dict[str, Any]:
        """Return the state, which no step changes."""
        return dict(self._state)

    def save(self) -> str:
        """Save, and wait until it is durable; return where."""
        self._step += 1
        self._way.save(self._step)
        self._way.settle()
        return os.path.join(self._way.root, f"step-{self._step:08d}")

    def close(self) -> None:
        """Let go of the staging memory."""
        self._way.finish()


def _dcp_load(path: str, wanted: State) -> State:
    """Load what lies at a path into tensors like those."""
    import torch.distributed.checkpoint as dcp

    found: State = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(path))
    return found


def _stock_load(path: str, device: Device) -> State:
    found: State = torch.load(path, map_location=device.torch, weights_only=True)
    return found


def _published(write: Callable[[str], object], path: str) -> None:
    """Write under another name, sync, rename, sync the directory: what a careful user does around torch.save."""
    pending_path = f"{path}.pending"
    write(pending_path)
    sync(pending_path)
    os.rename(pending_path, path)
    sync(os.path.dirname(path))


def save_rows(device: Device, state: State, directory: str, *, only_files_of_torch: bool) -> list[Row]:
    """Return the rows that save a state, ours first, so that its first run shows what pinning costs.

    Args:
        device: The device of the state.
        state: The state that is saved.
        directory: An empty directory; one file at a time is in it.
        only_files_of_torch: Leave out safetensors and DCP.
    """
    path = os.path.join(directory, "state.pt")

    def row(name: str, kind: str, save: Callable[[], object]) -> Row:
        return _save_row(name, kind, save, device, state, path)

    def torch_save(**settings: object) -> None:
        with _torch_settings(**settings):
            _published(lambda pending_path: torch.save(state, pending_path), path)

    rows = [
        row("fp.save", "ours", lambda: fp.save(state, path)),
        row("fp.save, checksum=False", "ours", lambda: fp.save(state, path, checksum=False)),
        row("torch.save", "peer", torch_save),
        row("torch.save, CRC off", "peer", lambda: torch_save(compute_crc32=False)),
        row(
            "torch.save, CRC off, pinned", "peer",
            lambda: torch_save(compute_crc32=False, use_pinned_memory_for_d2h=True),
        ),
    ]  # fmt: skip
    if not only_files_of_torch:
        rows += [_safetensors_row(device, state, directory), _dcp_row(device, state, directory)]
    return rows


def _save_row(name: str, kind: str, save: Callable[[], object], device: Device, state: State, path: str) -> Row:
    parts: dict[str, list[float]] = {}

    def run() -> None:
        report = save()
        if isinstance(report, fp.SaveReport):
            for part in ("plan_s", "write_s", "sync_s"):
                parts.setdefault(part, []).append(getattr(report, part))

    def clean() -> None:
        remove(path)
        remove(f"{path}.pending")

    return Row(
        name, kind, run, state_bytes(state),
        check=lambda: check_equal(_stock_load(path, device), state), clean=clean, parts=parts,
    )  # fmt: skip


def _safetensors_row(device: Device, state: State, directory: str) -> Row:
    path = os.path.join(directory, "state.safetensors")

    def run() -> None:
        from safetensors.torch import save_file

        _published(lambda pending_path: save_file(state, pending_path), path)

    def check() -> None:
        from safetensors.torch import load_file

        check_equal(load_file(path, device=device.name), state)

    def clean() -> None:
        remove(path)
        remove(f"{path}.pending")

    return Row("safetensors save_file", "peer", run, state_bytes(state), check=check, clean=clean)


def _dcp_row(device: Device, state: State, directory: str) -> Row:
    root = os.path.join(directory, "dcp")
    savers: list[DcpSaver] = []
    paths: list[str] = []

    def prepare() -> None:
        os.makedirs(root, exist_ok=True)
        if not savers:
            savers.append(DcpSaver(device, state, root))

    def run() -> None:
        paths[:] = [savers[0].save()]

    def clean() -> None:
        remove(root)

    return Row(
        "dcp.async_save, until durable", "peer", run, state_bytes(state), prepare,
        check=lambda: check_equal(_dcp_load(paths[0], state), state), clean=clean,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ loading


def written_files(state: State, directory: str, note: Callable[[str], object]) -> dict[str, str]:
    """Write the files that are loaded; return their paths by suffix, and note what was written in another way, or not.

    Args:
        state: The state that they hold.
        directory: An empty directory.
        note: Called with what a reader has to know.
    """
    paths = {".pt": os.path.join(directory, "state.pt")}
    try:
        fp.save(state, paths[".pt"])
    except Exception as error:  # noqa: BLE001 - what cannot be saved by us may be loaded by us
        note(f"the file that is loaded is torch.save's, as fp.save failed: {type(error).__name__}: {error}")
        _published(lambda pending_path: torch.save(state, pending_path), paths[".pt"])
    path = os.path.join(directory, "state.safetensors")
    try:
        from safetensors.torch import save_file

        _published(lambda pending_path: save_file(state, pending_path), path)
    except Exception as error:  # noqa: BLE001 - its row is left out
        note(f"no file of safetensors is loaded: {type(error).__name__}: {error}")
        remove(f"{path}.pending")
        return paths
    return paths | {".safetensors": path}


def load_rows(device: Device, state: State, paths: dict[str, str], cold: PageCache) -> list[Row]:
    """Return the rows that load cold files to the device.

    Args:
        device: The device to load to.
        state: The state that the files hold.
        paths: The paths that `written_files` returned.
        cold: Prepares the files.
    """
    path = paths[".pt"]

    def row(name: str, kind: str, load: Callable[[], State], path: str = path, make: object = None) -> Row:
        return _load_row(name, kind, load, state, path, cold, make)

    targets: list[State] = []

    def make_target() -> None:
        targets[:] = [{name: torch.zeros_like(tensor) for name, tensor in state.items()}]

    def load_into() -> State:
        fp.load_into(path, targets[0])
        return targets.pop()

    rows = [
        row("fp.load(map_location)", "ours", lambda: fp.load(path, map_location=device.torch)),
        row("fp.load_into", "ours", load_into, make=make_target),
        row("torch.load(map_location)", "peer", lambda: _stock_load(path, device)),
        row(
            "torch.load(mmap, map_location)", "peer",
            lambda: _touched(torch.load(path, map_location=device.torch, mmap=True, weights_only=True), device),
        ),
    ]  # fmt: skip
    if ".safetensors" in paths:

        def load_file() -> State:
            from safetensors.torch import load_file

            return _touched(load_file(paths[".safetensors"], device=device.name), device)

        rows.append(row("safetensors load_file(device)", "peer", load_file, paths[".safetensors"]))
    return rows


def _load_row(
    name: str, kind: str, load: Callable[[], State], state: State, path: str, cold: PageCache, make: object = None
) -> Row:
    results: list[State] = []

    def prepare() -> None:
        results.clear()
        cold.prepare(path)
        if callable(make):
            make()

    def run() -> None:
        results.append(load())

    return Row(
        name, kind, run, state_bytes(state), prepare,
        check=lambda: check_equal(results[0], state), clean=results.clear,
    )  # fmt: skip


def _touched(state: State, device: Device) -> State:
    """Without a GPU, read a byte of each mapped page, as the user of the tensors will."""
    if not device.is_cuda:
        for tensor in state.values():
            tensor.view(torch.uint8)[::4096].sum()
    return state


# ------------------------------------------------------------------------------------------------ GPUDirect Storage


def gpudirect_rows(device: Device, state: State, directory: str, path: str, cold: PageCache) -> list[Row]:
    """Return the rows that save and load by the engine "cufile", each beside what auto does.

    Without checksums bytes go from the device to the disk; with them through host memory, where a CPU sees them.

    Args:
        device: The device of the state.
        state: The state that is saved and loaded.
        directory: The directory that gets one file at a time.
        path: A file with the state, elsewhere.
        cold: Prepares this file.
    """
    saved_path = os.path.join(directory, "saved.pt")

    def save(name: str, **options: Any) -> Row:
        def run() -> None:
            fp.save(state, saved_path, **options)

        return _save_row(name, "ours", run, device, state, saved_path)

    def load(name: str, **options: Any) -> Row:
        def run() -> State:
            found: State = fp.load(path, map_location=device.torch, **options)
            return found

        return _load_row(name, "ours", run, state, path, cold)

    return [
        save("fp.save, checksum=False", checksum=False),
        save("fp.save, checksum=False, engine=cufile", engine="cufile", checksum=False),
        save("fp.save, engine=cufile", engine="cufile"),
        load("fp.load(map_location)"),
        load("fp.load, engine=cufile", engine="cufile"),
    ]
