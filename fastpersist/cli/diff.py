"""`fastpersist diff A B [GLOB…]`: how two files or steps differ: structure first, then the bits of each tensor."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from fastpersist.cli.terminal import bytes_bar, print_error, print_table, printable, size_text
from fastpersist.errors import FastPersistError

if TYPE_CHECKING:
    from fastpersist.contents.comparison import Comparison

__all__ = ["add_parser", "run"]

EXIT_EQUAL = 0
EXIT_DIFFERENT = 1
EXIT_TROUBLE = 2

_EPILOG = """\
examples:
  fastpersist diff before.pt after.pt
  fastpersist diff runs/a/step-00000100 runs/b/step-00000100 'model.*'
  fastpersist diff model.pt model.safetensors --quiet && echo the same
  fastpersist diff a.pt b.pt --json | jq '.tensors[] | select(.max_rel > 1e-3) .name'

A GLOB is a tensor's name, or wildcards over all of it: * also matches dots.
Names, dtypes, shapes and plain values (numbers, text, …) are compared first, then the
bits of all tensors that both have. Where bits differ, max |a-b| and the largest
|a-b| / max(|a|, |b|) are of the finite elements, in single precision for floats of up
to 32 bits and else in double; NaN and Inf count the elements that differ and are NaN or
infinite, in A and in B. Both files are read once, in pieces.

--json prints one object: equal; only_in_a and only_in_b, names of tensors; described,
tensors of another dtype or shape, name to [in A, in B]; values, what is no tensor,
name to [in A, in B], null where it is missing; tensors, a list of {name, dtype, shape,
differing_count, max_abs, max_rel, nan_counts, inf_counts}; equal_count; compared_bytes;
undecided, tensors that need their own code, name to reason.

Exit codes, as of cmp and diff: 0 equal, 1 different, 2 trouble (not found, damaged, or
nothing differs but some tensors could not be compared).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "diff",
        help="compare two files or checkpoints: structure, then tensors",
        description="Compare two files or checkpoints, of any format each: structure first, then the bits of tensors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("a", "b"):
        parser.add_argument(
            name, metavar=name.upper(), help="a file, a directory of safetensors files, or a checkpoint"
        )
    parser.add_argument("globs", metavar="GLOB", nargs="*", default=[], help="compare only what has such a name")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors; the exit code tells")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the differences."""
    from fastpersist.contents.comparison import compare
    from fastpersist.contents.stored import open_contents

    try:
        with open_contents(arguments.a) as ours, open_contents(arguments.b, like=ours) as theirs:
            total_bytes = sum(tensor.size_bytes for tensor in ours.tensors.values())
            with bytes_bar("comparing", total_bytes, quiet=arguments.quiet) as bar:
                found = compare(ours, theirs, arguments.globs, on_read=bar.update)
    except FastPersistError as error:
        print_error(str(error))
        return EXIT_TROUBLE
    if arguments.json:
        print(json.dumps(_as_json(found), indent=2))
    elif not arguments.quiet:
        _print(found)
    if found.differs:
        return EXIT_DIFFERENT
    return EXIT_TROUBLE if found.undecided else EXIT_EQUAL


def _as_json(found: Comparison) -> dict[str, object]:
    return {
        "equal": not found.differs and not found.undecided,
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "described": found.described,
        "values": found.values,
        "tensors": [
            {
                "name": one.name,
                "dtype": str(one.dtype).removeprefix("torch."),
                "shape": list(one.shape),
                "differing_count": one.differing_count,
                "max_abs": one.max_abs,
                "max_rel": one.max_rel,
                "nan_counts": one.nan_counts,
                "inf_counts": one.inf_counts,
            }
            for one in found.tensors
        ],
        "equal_count": found.equal_count,
        "compared_bytes": found.compared_bytes,
        "undecided": found.undecided,
    }


def _print(found: Comparison) -> None:
    for side, names in (("A", found.only_in_a), ("B", found.only_in_b)):
        for name in names:
            print(f"only in {side}  {printable(name)}")
    for name, (ours, theirs) in found.described.items():
        print(f"tensor     {printable(name)}: {ours} / {theirs}")
    for name, texts in found.values.items():
        ours, theirs = ("missing" if text is None else printable(text) for text in texts)
        print(f"value      {printable(name)}: {ours} / {theirs}")
    for name, why in found.undecided.items():
        print(f"undecided  {printable(name)}: {why}")
    if found.tensors:
        headers = ("tensor", "dtype", "differ", "of", "max |a-b|", "max rel", "NaN a/b", "Inf a/b")
        rows = [
            (
                printable(one.name),
                str(one.dtype).removeprefix("torch."),
                str(one.differing_count),
                str(math.prod(one.shape)),
                f"{one.max_abs:.3g}",
                f"{one.max_rel:.3g}",
                "/".join(map(str, one.nan_counts)) if any(one.nan_counts) else "",
                "/".join(map(str, one.inf_counts)) if any(one.inf_counts) else "",
            )
            for one in found.tensors
        ]
        print_table(headers, ["left"] * 2 + ["right"] * 6, rows)
        print()
    compared = f"{found.equal_count} tensors have equal bits, {len(found.tensors)} differ"
    print(f"{'different' if found.differs else 'equal'}: {compared}; {size_text(found.compared_bytes)} read of each")
