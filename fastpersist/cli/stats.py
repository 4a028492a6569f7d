"""`fastpersist stats PATH [GLOB…]`: smallest, largest, mean and norm of each tensor; how many NaN and infinities."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from fastpersist.cli.terminal import (
    EXIT_GOOD,
    EXIT_USAGE,
    bytes_bar,
    count_text,
    print_error,
    print_table,
    printable,
    shape_text,
    size_text,
)
from fastpersist.formats.names import is_wanted

if TYPE_CHECKING:
    from fastpersist.contents.statistics import Statistics

__all__ = ["add_parser", "run"]

_EPILOG = """\
examples:
  fastpersist stats model.pt
  fastpersist stats runs/a/step-00000100 'optimizer.*'
  fastpersist stats model.safetensors --json | jq '.tensors[] | select(.nan_count > 0) .name'

A GLOB is a tensor's name, or wildcards over all of it: * also matches dots.
NaN and infinities are counted, and left out of all other figures. Sums are in double
precision. Complex tensors have no min, max and mean. The file is read once, in pieces.

--json prints one object: path; tensors, a list of {name, dtype, shape, min, max, mean,
norm, nan_count, inf_count}, null where a figure makes no sense; unreadable, which maps
the names of tensors whose values need their own code to the reason.

Exit codes: 0 good (whatever the values are), 1 damaged, 2 usage, not found, or no
tensor has such a name.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "stats",
        help="min, max, mean, norm, NaN and infinities of each tensor",
        description="Read a file or a checkpoint, and tell what the values of its tensors are like.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="a file, a directory of safetensors files, or a checkpoint")
    parser.add_argument("globs", metavar="GLOB", nargs="*", default=[], help="read only tensors with such a name")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of each tensor."""
    from fastpersist.contents.statistics import can_be_widened, iter_statistics
    from fastpersist.contents.stored import open_contents

    with open_contents(arguments.path) as contents:
        unreadable = {name: why for name, why in contents.unreadable.items() if is_wanted(name, arguments.globs)}
        tensors = []
        for name, tensor in contents.tensors.items():
            if is_wanted(name, arguments.globs) and can_be_widened(tensor.dtype):
                tensors.append(tensor)
            elif is_wanted(name, arguments.globs):
                unreadable[name] = f"torch has no arithmetic for {tensor.dtype}"
        if arguments.globs and not tensors and not unreadable:
            print_error(f"no tensor in {arguments.path} is named {' or '.join(arguments.globs)}")
            return EXIT_USAGE
        total_bytes = sum(tensor.size_bytes for tensor in tensors)
        with bytes_bar("reading", total_bytes, quiet=arguments.quiet) as bar:
            found = list(iter_statistics(tensors, on_read=bar.update))
    if arguments.json:
        content = {"path": arguments.path, "tensors": [_as_json(one) for one in found], "unreadable": unreadable}
        print(json.dumps(content, indent=2))
        return EXIT_GOOD
    print(f"{printable(arguments.path)}: {count_text(len(found), 'tensor')}, {size_text(total_bytes)}")
    if found:
        headers = ("tensor", "dtype", "shape", "min", "max", "mean", "norm", "NaN", "Inf")
        print_table(headers, ["left"] * 3 + ["right"] * 6, [_row(one) for one in found])
    for name, why in unreadable.items():
        print(f"{printable(name)} was not read: {why}")
    return EXIT_GOOD


def _as_json(one: Statistics) -> dict[str, object]:
    return {
        "name": one.tensor.name,
        "dtype": str(one.tensor.dtype).removeprefix("torch."),
        "shape": list(one.tensor.shape),
        "min": one.min,
        "max": one.max,
        "mean": one.mean if one.mean is None or math.isfinite(one.mean) else str(one.mean),
        "norm": one.norm if math.isfinite(one.norm) else str(one.norm),
        "nan_count": one.nan_count,
        "inf_count": one.inf_count,
    }


def _row(one: Statistics) -> tuple[str, ...]:
    return (
        printable(one.tensor.name),
        str(one.tensor.dtype).removeprefix("torch."),
        shape_text(one.tensor.shape),
        *("" if value is None else f"{value:.6g}" for value in (one.min, one.max, one.mean, one.norm)),
        str(one.nan_count or ""),
        str(one.inf_count or ""),
    )
