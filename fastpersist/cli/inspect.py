"""`fastpersist inspect PATH`: lists a file, a checkpoint or a directory of checkpoints, without loading it.

It runs no code from the file. `fastpersist.inspect` reads the contents; this module formats them, as text or JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastpersist.cli.argument_types import whole_number
from fastpersist.cli.terminal import EXIT_DAMAGED, EXIT_GOOD, print_table, printable, shape_text, size_text
from fastpersist.display import time_text

if TYPE_CHECKING:
    from fastpersist import Manifest, TensorEntry

__all__ = ["add_parser", "run", "tensor_as_json"]

_LATEST_NAME = "LATEST"
_LATEST_BYTES_MAX = 256
_METRICS_SHOWN_COUNT = 4

_EPILOG = """\
examples:
  fastpersist inspect model.pt
  fastpersist inspect runs/a
  fastpersist inspect runs/a/step-00000100 --json

--json prints one object:
  path, format          "torch_zip" or "safetensors" for a file, "directory" for a
                        checkpoint directory, "root" for a directory of those
  size_bytes, has_checksums,
  tensor_count          of all tensors, whatever --limit says
  tensors               list of {name, dtype, shape, size_bytes, offset_bytes,
                        record, crc32}; offset_bytes is from the file's start and
                        null for tensors without data, crc32 is a number and null
                        in files without checksums; in directories also file
  globals               names that the pickle would import, as "module.name"
  metadata              of a safetensors header
a checkpoint directory also has
  files                 list of {name, size_bytes, crc32}
  step, time_s          null for a checkpoint of no step; Unix time
  commit_number         order in which the steps of a root were committed; or null
  metrics               numbers; "nan", "inf" and "-inf" as strings
  versions, host, stats software that wrote it, machine, and figures of the save
a root has
  checkpoint_count      of all committed checkpoints, whatever --limit says
  checkpoints           list of objects with path, size_bytes, has_checksums and
                        the further keys of a checkpoint directory, by step
  latest                text of the file LATEST, a hint; null without one
  leftovers             names of unfinished, replaced and damaged checkpoints

Exit codes: 0 listed, 1 damaged (in a root: any step), 2 not found, not readable
or no checkpoint.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "inspect",
        help="list the tensors of a file or a checkpoint, or the steps in a directory of checkpoints",
        description="List what a file, a checkpoint or a directory of checkpoints holds. This runs no code from it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", metavar="PATH", help="a file written by fastpersist, torch.save or safetensors, a step, or a root"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--limit", type=whole_number(0), metavar="N", help="list only the first N tensors, or the newest N steps"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the contents of the path."""
    from fastpersist import inspect

    manifest = inspect(arguments.path)
    if manifest.format == "root":
        shown = manifest.checkpoints
        if arguments.limit is not None:
            shown = shown[max(0, len(shown) - arguments.limit) :]
        if arguments.json:
            print(json.dumps(_root_as_json(manifest, shown), indent=2))
        else:
            _print_root(manifest, shown)
        return EXIT_DAMAGED if _damaged(manifest) else EXIT_GOOD
    tensors = manifest.tensors[: arguments.limit]
    if arguments.json:
        print(json.dumps(_as_json(manifest, tensors), indent=2))
    else:
        _print_text(manifest, tensors)
    return EXIT_GOOD


def _damaged(manifest: Manifest) -> list[str]:
    """Return the names that look like steps but are no checkpoints, hidden ones (unfinished or replaced) included."""
    return [name for name in manifest.leftovers if not name.startswith(".")]


def _latest(root: str) -> str | None:
    """Read the hint, if there is one."""
    from fastpersist.commit.filesystem import open_regular
    from fastpersist.errors import FormatError

    try:
        with open(open_regular(os.path.join(root, _LATEST_NAME)), "rb") as file:
            return file.read(_LATEST_BYTES_MAX).decode(errors="backslashreplace").strip()
    except (OSError, FormatError):
        return None


# ----------------------------------------------------------------------------------------------------------- JSON


def _as_json(manifest: Manifest, shown: Sequence[TensorEntry]) -> dict[str, object]:
    in_directory = manifest.format == "directory"
    return {
        "path": manifest.path,
        "format": manifest.format,
        "size_bytes": manifest.size_bytes,
        "has_checksums": manifest.has_checksums,
        "tensor_count": len(manifest.tensors),
        "tensors": [tensor_as_json(tensor, in_directory=in_directory) for tensor in shown],
        "globals": list(manifest.globals),
        "metadata": dict(manifest.metadata),
        **(_checkpoint_as_json(manifest) if in_directory else {}),
    }


def tensor_as_json(tensor: TensorEntry, *, in_directory: bool) -> dict[str, object]:
    """Return what is known of a tensor."""
    return {
        **({"file": tensor.file} if in_directory else {}),
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size_bytes": tensor.size_bytes,
        "offset_bytes": tensor.offset_bytes,
        "record": tensor.record,
        "crc32": tensor.crc32,
    }


def _checkpoint_as_json(manifest: Manifest) -> dict[str, object]:
    return {
        "files": [
            {"name": entry.name, "size_bytes": entry.size_bytes, "crc32": entry.crc32} for entry in manifest.files
        ],
        "step": manifest.step,
        "time_s": manifest.time_s,
        "commit_number": manifest.commit_number,
        "metrics": {name: value if math.isfinite(value) else str(value) for name, value in manifest.metrics.items()},
        "versions": dict(manifest.versions),
        "host": dict(manifest.host),
        "stats": dict(manifest.stats),
    }


def _root_as_json(manifest: Manifest, shown: Sequence[Manifest]) -> dict[str, object]:
    return {
        "path": manifest.path,
        "format": manifest.format,
        "size_bytes": manifest.size_bytes,
        "has_checksums": manifest.has_checksums,
        "checkpoint_count": len(manifest.checkpoints),
        "checkpoints": [
            {
                "path": found.path,
                "size_bytes": found.size_bytes,
                "has_checksums": found.has_checksums,
                **_checkpoint_as_json(found),
            }
            for found in shown
        ],
        "latest": _latest(manifest.path),
        "leftovers": list(manifest.leftovers),
    }


# ----------------------------------------------------------------------------------------------------------- text


def _print_text(manifest: Manifest, shown: Sequence[TensorEntry]) -> None:
    in_directory = manifest.format == "directory"
    tensor_bytes = sum(tensor.size_bytes for tensor in manifest.tensors)
    print(f"{'directory' if in_directory else 'file':9}  {printable(manifest.path)}")
    if in_directory:
        print(f"step       {'none' if manifest.step is None else manifest.step}")
        print(f"time       {time_text(manifest.time_s)}")
    else:
        print(f"format     {manifest.format}")
    print(f"size       {manifest.size_bytes} bytes ({size_text(manifest.size_bytes)})")
    print(f"checksums  {'CRC-32' if manifest.has_checksums else 'none'}")
    for kind, table in (
        ("metric", {name: _number_text(value) for name, value in manifest.metrics.items()}),
        ("version", manifest.versions),
        ("host", manifest.host),
        ("stat", {name: _value_text(value) for name, value in manifest.stats.items()}),
    ):
        for name, value in table.items():
            print(f"{kind:9}  {printable(name)} = {printable(str(value))}")
    print(f"tensors    {len(manifest.tensors)}, together {size_text(tensor_bytes)}")
    for key, text in manifest.metadata.items():
        print(f"metadata   {printable(key)} = {printable(text)}")
    for name in manifest.globals:
        print(f"global     {printable(name)}")
    if in_directory:
        print_table(
            ("file", "bytes", "CRC-32"),
            ("left", "right", "left"),
            [(printable(entry.name), str(entry.size_bytes), _crc_text(entry.crc32)) for entry in manifest.files],
        )
    if not shown:
        return
    rows = [
        (
            *([printable(tensor.file)] if in_directory else []),
            printable(tensor.name),
            printable(tensor.dtype),
            shape_text(tensor.shape),
            str(tensor.size_bytes),
            "" if tensor.offset_bytes is None else str(tensor.offset_bytes),
            _crc_text(tensor.crc32),
        )
        for tensor in shown
    ]
    print_table(
        ["file"] * in_directory + ["tensor", "dtype", "shape", "bytes", "offset", "CRC-32"],
        ["left"] * in_directory + ["left", "left", "left", "right", "right", "left"],
        rows,
    )
    if len(shown) < len(manifest.tensors):
        print(f"… and {len(manifest.tensors) - len(shown)} more")


def _print_root(manifest: Manifest, shown: Sequence[Manifest]) -> None:
    latest = _latest(manifest.path)
    names = [os.path.basename(found.path) for found in manifest.checkpoints]
    print(f"root       {printable(manifest.path)}")
    print(f"size       {manifest.size_bytes} bytes ({size_text(manifest.size_bytes)})")
    print(f"checksums  {'CRC-32' if manifest.has_checksums else 'none'}")
    print(f"steps      {len(names)}")
    if latest is not None and latest not in names:
        print(f"{_LATEST_NAME}     {printable(latest)}, which is not complete here")
    for name in manifest.leftovers:
        print(f"{'damaged' if name in _damaged(manifest) else 'leftover':9}  {printable(name)}")
    if len(shown) < len(names):
        print(f"           … and {len(names) - len(shown)} older ones")
    if not shown:
        return
    rows = []
    newest = _newest(manifest)
    for found in shown:
        name = os.path.basename(found.path)
        marks = ["newest"] * (found is newest) + [_LATEST_NAME] * (name == latest)
        rows.append(
            (
                printable(name),
                time_text(found.time_s),
                size_text(found.size_bytes),
                str(len(found.files)),
                _metrics_text(found.metrics),
                ", ".join(marks),
            )
        )
    print_table(
        ("step", "time", "size", "files", "metrics", ""), ("left", "left", "right", "right", "left", "left"), rows
    )


def _newest(root: Manifest) -> Manifest:
    """Return the checkpoint that was committed last."""
    from fastpersist.commit.step_listing import Commit, in_commit_order

    found = dict(enumerate(root.checkpoints))
    commits = {at: Commit(one.commit_number, one.time_s or 0.0, one.metrics) for at, one in found.items()}
    return found[in_commit_order(commits)[-1]]


def _metrics_text(metrics: dict[str, float]) -> str:
    texts = [f"{printable(name)} {_number_text(value)}" for name, value in metrics.items()]
    more = ["…"] if len(texts) > _METRICS_SHOWN_COUNT else []
    return ", ".join(texts[:_METRICS_SHOWN_COUNT] + more)


def _number_text(value: float) -> str:
    return f"{value:.6g}"


def _value_text(value: float | int | str) -> str:
    return _number_text(value) if isinstance(value, float) else str(value)


def _crc_text(crc32: int | None) -> str:
    return "" if crc32 is None else f"{crc32:08x}"
