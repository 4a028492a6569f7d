"""`fastpersist ls PATH [GLOB…]`: the tensors of a file or a step, as a table or a tree, chosen by name."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastpersist.cli.inspect import tensor_as_json
from fastpersist.cli.terminal import (
    EXIT_GOOD,
    EXIT_USAGE,
    count_text,
    print_error,
    print_table,
    printable,
    shape_text,
    size_text,
)
from fastpersist.formats.names import is_wanted

if TYPE_CHECKING:
    from fastpersist import TensorEntry

__all__ = ["add_parser", "run"]

_EPILOG = """\
examples:
  fastpersist ls model.pt
  fastpersist ls model.safetensors '*.q_proj.weight' '*.k_proj.weight'
  fastpersist ls runs/a/step-00000100 --tree
  fastpersist ls model.pt --json | jq '.tensors[] | select(.dtype == "float32") .name'

A GLOB is a tensor's name, or wildcards over all of it: * also matches dots.
PATH is a file of torch.save, of safetensors or of ours, a directory of safetensors
files, the directory of a step, or a sharded checkpoint. This runs no code from it.

--json prints one object: path, tensor_count, size_bytes (of the tensors chosen), and
tensors, a list with the keys of `fastpersist inspect --json`.

Exit codes: 0 listed, 1 damaged, 2 usage, not found, or no tensor has such a name.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "ls",
        help="list tensors: names, dtypes, shapes and bytes",
        description="List the tensors of a file or a checkpoint: names, dtypes, shapes and bytes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="a file, a directory of safetensors files, or a checkpoint")
    parser.add_argument("globs", metavar="GLOB", nargs="*", default=[], help="list only tensors with such a name")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--tree", action="store_true", help="one line for each part of a name, with sums")
    form.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the tensors."""
    found, in_directory = _entries(arguments.path)
    tensors = [tensor for tensor in found if is_wanted(tensor.name, arguments.globs)]
    if arguments.globs and not tensors:
        print_error(f"none of the {len(found)} tensors in {arguments.path} is named {' or '.join(arguments.globs)}")
        return EXIT_USAGE
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    if arguments.json:
        listed = [tensor_as_json(tensor, in_directory=in_directory) for tensor in tensors]
        content = {"path": arguments.path, "tensor_count": len(tensors), "size_bytes": size_bytes, "tensors": listed}
        print(json.dumps(content, indent=2))
        return EXIT_GOOD
    print(f"{printable(arguments.path)}: {count_text(len(tensors), 'tensor')}, {size_text(size_bytes)}")
    if arguments.tree:
        print()
        _print_tree(tensors, in_directory=in_directory)
    elif tensors:
        rows = [
            (
                *([printable(tensor.file)] if in_directory else []),
                printable(tensor.name),
                printable(tensor.dtype),
                shape_text(tensor.shape),
                str(tensor.size_bytes),
            )
            for tensor in tensors
        ]
        headers = ["file"] * in_directory + ["tensor", "dtype", "shape", "bytes"]
        print_table(headers, ["left"] * in_directory + ["left", "left", "left", "right"], rows)
    return EXIT_GOOD


def _entries(path: str) -> tuple[Sequence[TensorEntry], bool]:
    """Return the tensors, and whether they lie in several files."""
    from fastpersist import TensorEntry, inspect
    from fastpersist.contents.stored import open_contents, refuse_parts, refuse_root
    from fastpersist.formats.manifest import DCP_METADATA_NAME, MANIFEST_NAME

    if not os.path.isdir(path):
        return inspect(path).tensors, False
    refuse_root(path)
    if os.path.lexists(os.path.join(path, MANIFEST_NAME)):
        manifest = inspect(path)
        names = [entry.name for entry in manifest.files]
        if DCP_METADATA_NAME not in names:  # else each part has the list of all tensors
            refuse_parts(path, names)
        return manifest.tensors, True
    with open_contents(path) as contents:
        return [
            TensorEntry(
                tensor.name,
                str(tensor.dtype).removeprefix("torch."),
                tensor.shape,
                tensor.size_bytes,
                None if tensor.file is None else tensor.offset_bytes,
                tensor.name,
                tensor.crc32,
                os.path.basename(tensor.path),
            )
            for tensor in contents.tensors.values()
        ], True


# --- tree


class _Node:
    """A part of names: what lies below it, and the tensor that ends here."""

    def __init__(self) -> None:
        self.below: dict[str, _Node] = {}
        self.tensor: TensorEntry | None = None
        self.count = 0
        self.size_bytes = 0


def _print_tree(tensors: Sequence[TensorEntry], *, in_directory: bool) -> None:
    root = _Node()
    for tensor in tensors:
        node = root
        # "optimizer.state[0].exp_avg" has the parts "optimizer", ".state", "[0]", ".exp_avg".
        for part in [tensor.file] * in_directory + re.findall(r"\[[^\]]*\]|\.?[^.\[]*", tensor.name)[:-1]:
            node.count += 1
            node.size_bytes += tensor.size_bytes
            node = node.below.setdefault(part, _Node())
        node.tensor = tensor
        node.count += 1
        node.size_bytes += tensor.size_bytes
    lines = list(_lines(root, ""))
    widths = [max((len(line[column]) for line in lines), default=0) for column in range(3)]
    for name, what, shape, size in lines:
        print(f"{name:{widths[0]}}  {what:{widths[1]}}  {shape:{widths[2]}}  {size:>10}".rstrip())


def _lines(node: _Node, indent: str) -> list[tuple[str, str, str, str]]:
    lines = []
    for position, (part, child) in enumerate(node.below.items()):
        is_last = position == len(node.below) - 1
        name = f"{indent}{'└─ ' if is_last else '├─ '}{printable(part.removeprefix('.'))}"
        if child.tensor is None:
            lines.append((name, count_text(child.count, "tensor"), "", size_text(child.size_bytes)))
        else:
            tensor = child.tensor
            lines.append((name, printable(tensor.dtype), shape_text(tensor.shape), size_text(child.size_bytes)))
        lines += _lines(child, indent + ("   " if is_last else "│  "))
    return lines
