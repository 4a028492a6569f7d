"""`fastpersist inspect FILE`: what a file holds, without loading it and without running any of its code."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from fastpersist.cli.terminal import EXIT_GOOD, printable, size_text

if TYPE_CHECKING:
    from fastpersist import Manifest, TensorEntry

__all__ = ["add_parser", "run"]

_EPILOG = """\
--json prints one object:
  path, format ("torch_zip" or "safetensors"), size_bytes, has_checksums,
  tensor_count          of all tensors, whatever --limit says
  tensors               list of {name, dtype, shape, size_bytes, offset_bytes,
                        record, crc32}; offset_bytes is from the file's start and
                        null for tensors without data, crc32 is a number and null
                        in files without checksums
  globals               what the pickle would import, as "module.name"
  metadata              of a safetensors header

Exit codes: 0 listed, 1 damaged, 2 not found, not readable or no checkpoint.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "inspect",
        help="list the tensors of a file and what its pickle would import",
        description="List the tensors of a file and the globals that its pickle names. Nothing of it is run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="written by fastpersist, torch.save or safetensors")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--limit", type=_count, metavar="N", help="list only the first N tensors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what the file holds."""
    from fastpersist import inspect

    manifest = inspect(arguments.file)
    shown = manifest.tensors[: arguments.limit]
    if arguments.json:
        print(json.dumps(_as_json(manifest, shown), indent=2))
    else:
        _print_text(manifest, shown)
    return EXIT_GOOD


def _as_json(manifest: Manifest, shown: tuple[TensorEntry, ...]) -> dict[str, object]:
    return {
        "path": manifest.path,
        "format": manifest.format,
        "size_bytes": manifest.size_bytes,
        "has_checksums": manifest.has_checksums,
        "tensor_count": len(manifest.tensors),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "size_bytes": tensor.size_bytes,
                "offset_bytes": tensor.offset_bytes,
                "record": tensor.record,
                "crc32": tensor.crc32,
            }
            for tensor in shown
        ],
        "globals": list(manifest.globals),
        "metadata": dict(manifest.metadata),
    }


def _print_text(manifest: Manifest, shown: tuple[TensorEntry, ...]) -> None:
    from tabulate import tabulate

    tensor_bytes = sum(tensor.size_bytes for tensor in manifest.tensors)
    print(f"file       {printable(manifest.path)}")
    print(f"format     {manifest.format}")
    print(f"size       {manifest.size_bytes} bytes ({size_text(manifest.size_bytes)})")
    print(f"checksums  {'CRC-32' if manifest.has_checksums else 'none'}")
    print(f"tensors    {len(manifest.tensors)}, together {size_text(tensor_bytes)}")
    for key, value in manifest.metadata.items():
        print(f"metadata   {printable(key)} = {printable(value)}")
    for name in manifest.globals:
        print(f"global     {printable(name)}")
    if not shown:
        return
    rows = [
        (
            printable(tensor.name),
            printable(tensor.dtype),
            "×".join(map(str, tensor.shape)) or "scalar",
            tensor.size_bytes,
            "" if tensor.offset_bytes is None else tensor.offset_bytes,
            "" if tensor.crc32 is None else f"{tensor.crc32:08x}",
        )
        for tensor in shown
    ]
    print()
    print(
        tabulate(
            rows,
            headers=("tensor", "dtype", "shape", "bytes", "offset", "CRC-32"),
            colalign=("left", "left", "left", "right", "right", "left"),
            disable_numparse=True,  # a tensor may be called 1e5
        )
    )
    if len(shown) < len(manifest.tensors):
        print(f"… and {len(manifest.tensors) - len(shown)} more")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is a whole number, not {text!r}")
    return int(text)
