"""`fastpersist info [DIR]`: probes which features work on this machine and in a directory."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from typing import Any

from fastpersist.cli.terminal import EXIT_GOOD, printable, size_text
from fastpersist.errors import ConfigError

__all__ = ["add_parser", "filesystem_name", "run"]

_EPILOG = """\
examples:
  fastpersist info
  fastpersist info /mnt/nvme --json

--json prints one object:
  fastpersist, torch, python, kernel      versions
  machine                                 architecture, such as "x86_64"
  crc32                                   which CRC-32 implementation runs here
  ring_bytes, chunk_bytes                 host memory for all transfers; one request
  tuned_by                                the tuning file that applies here, null when there is none
  directory, filesystem                   the probed directory; its type, such as "ext4"
  direct_io       {supported, memory_alignment_bytes, offset_alignment_bytes, why_not}
  engines         list of {name, usable, why_not, way}, best first; way: of cufile, how bytes reach the GPU, else null
  auto            the engine that a save here takes, null when none is usable
  gpu             {torch, is_started, usable, why_not, pinned_bytes, why_not_pinned}: what torch is built for, such as
                  "CUDA 13.0"; whether CUDA is started here; whether fastpersist copies from and to the GPU itself, else
                  why torch does; host memory pinned in this process

Exit codes: 0 good, 2 the directory is missing or takes no file.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "info",
        help="say which engines work in a directory, and why the others do not",
        description="Say what works here. Each engine does one real write and read in the directory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="default: the current one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gpu", action="store_true", help="start CUDA, too, to see what the engine cufile does")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    if not os.path.isdir(arguments.directory):
        raise ConfigError(f"{arguments.directory} is no directory; name one on the disk that is asked about")
    found = _find(arguments.directory, start_gpu=arguments.gpu)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _print_text(found)
    return EXIT_GOOD


def _find(directory: str, *, start_gpu: bool) -> dict[str, Any]:
    import torch

    from fastpersist import __version__, _native, engines
    from fastpersist.commit.filesystem import storage_errors
    from fastpersist.config import config, config_for, tuning_path
    from fastpersist.transfer.engine_selection import engine_ladder

    if (start_gpu or config().engine == "cufile") and torch.cuda.is_available():
        torch.cuda.init()
    probes = engines(directory)
    with storage_errors("creating a file in", directory), tempfile.TemporaryFile(dir=directory) as file:
        supported, memory_alignment_bytes, offset_alignment_bytes, why_not = _native.direct_io_limits(file.fileno())
        ladder = engine_ladder("auto", file.fileno(), one_writer=True)
        limits = config_for(file.fileno())
        tuned_by = tuning_path(file.fileno())
    usable = {probe.name for probe in probes if probe.usable}
    return {
        "fastpersist": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "crc32": _native.crc32_implementation(),
        "ring_bytes": limits.ring_bytes,
        "chunk_bytes": limits.chunk_bytes,
        "tuned_by": tuned_by if tuned_by is not None and os.path.exists(tuned_by) else None,
        "directory": os.path.realpath(directory),
        "filesystem": filesystem_name(directory),
        "direct_io": {
            "supported": supported,
            "memory_alignment_bytes": memory_alignment_bytes,
            "offset_alignment_bytes": offset_alignment_bytes,
            "why_not": why_not,
        },
        "engines": [
            {
                "name": probe.name,
                "usable": probe.usable,
                "why_not": probe.why_not,
                "way": _way(directory) if probe.name == "cufile" and probe.usable else None,
            }
            for probe in probes
        ],
        "auto": next((name for name in ladder if name in usable), None),
        "gpu": _gpu(),
    }


def _way(directory: str) -> str:
    """Return how the usable engine cufile moves bytes between files here and the GPU."""
    from fastpersist.errors import FastPersistError
    from fastpersist.transfer import gpudirect

    try:
        return gpudirect.way(directory)
    except FastPersistError as error:
        return f"from host memory alone: {error}"


def _gpu() -> dict[str, Any]:
    """Find the GPU support, without starting CUDA."""
    import torch

    from fastpersist import _native
    from fastpersist.transfer import cuda

    is_started = torch.cuda.is_initialized()
    knows_all = is_started or torch.version.hip is not None
    why_not = cuda.why_not_native() if knows_all else _native.cuda_driver_why_not()
    return {
        "torch": _torch_gpu(),
        "is_started": is_started,
        "usable": not why_not,
        "why_not": why_not,
        "pinned_bytes": _native.pinned_bytes(),
        "why_not_pinned": _native.why_not_pinned(),
    }


def _torch_gpu() -> str | None:
    """Return the GPU platform that this torch is built for; None without one."""
    import torch

    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    for name, version in versions.items():
        if version:
            return f"{name} {version}"
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type.upper()


def _print_text(found: dict[str, Any]) -> None:
    from tabulate import tabulate

    direct_io = found["direct_io"]
    if direct_io["supported"]:
        limits = (
            f"memory in steps of {direct_io['memory_alignment_bytes']} bytes, "
            f"offsets in steps of {direct_io['offset_alignment_bytes']} bytes"
        )
    else:
        limits = f"no: {direct_io['why_not']}"
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "python"))
    print(f"fastpersist  {found['fastpersist']}")
    print(f"with         {versions}, Linux {found['kernel']} {found['machine']}")
    print(f"CRC-32 by    {found['crc32']}")
    print(f"ring         {size_text(found['ring_bytes'])}, in requests of {size_text(found['chunk_bytes'])}")
    print(f"tuned by     {printable(found['tuned_by'] or 'nothing; fastpersist tune finds out whether that is best')}")
    print(f"directory    {printable(found['directory'])}")
    print(f"file system  {found['filesystem']}")
    print(f"direct I/O   {limits}")
    for line in _gpu_lines(found["gpu"]):
        print(printable(line))
    print()
    rows = [(engine["name"], printable(_engine_text(engine, found["gpu"]))) for engine in found["engines"]]
    print(tabulate(rows, headers=("engine", "here")))
    print()
    print("auto would take " + (found["auto"] or "none of them: nothing can be saved here"))


def _engine_text(engine: dict[str, Any], gpu: dict[str, Any]) -> str:
    if engine["usable"]:
        return f"usable ({engine['way']})" if engine["way"] else "usable"
    if engine["name"] == "cufile" and gpu["torch"] is None:
        return "no: this torch has no GPUs"
    if engine["name"] == "cufile" and gpu["usable"] and not gpu["is_started"]:
        return "not asked, since that would start CUDA: --gpu does"
    return f"no: {engine['why_not']}"


def _gpu_lines(gpu: dict[str, Any]) -> list[str]:
    if gpu["torch"] is None:
        return ["GPU          none for this torch: it is built for the CPU alone"]
    if not gpu["usable"]:
        return [f"GPU          torch for {gpu['torch']} copies from and to it, piece by piece: {gpu['why_not']}"]
    found = "" if gpu["is_started"] else ", if the driver, which is there, starts"
    lines = [f"GPU          torch for {gpu['torch']}; copies from and to it are fastpersist's own{found}"]
    if gpu["why_not_pinned"]:
        lines.append(f"pinned       no: {gpu['why_not_pinned']}")
    elif gpu["pinned_bytes"]:
        lines.append(f"pinned       {size_text(gpu['pinned_bytes'])} of host memory")
    else:
        lines.append("pinned       nothing yet; a process that saves or loads tensors of a GPU pins the ring")
    return lines


def filesystem_name(directory: str) -> str:
    """Return the type of a directory's file system, such as "ext4", from the kernel's table of mounts.

    Args:
        directory: An existing directory.
    """
    from fastpersist.commit.filesystem import mount_of

    mount = mount_of(directory)
    return "unknown" if mount is None else mount.type_name
