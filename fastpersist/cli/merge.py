"""`fastpersist merge DIR… OUT`: makes one ordinary file of a checkpoint in several directories, or in shards."""

from __future__ import annotations

import argparse
import sys

from fastpersist.cli.terminal import EXIT_GOOD, printable, size_text

__all__ = ["add_parser", "run"]

_EPILOG = """\
examples:
  fastpersist merge node-a/step-00000100 node-b/step-00000100 state.pt
  fastpersist merge runs/fsdp/step-00000100 model.safetensors

Ranks that share no file system save each step into several directories, one in each
file system. Copy or mount those of one step on one machine (rsync, scp), and name all
of them.

The file equals that of a save by one rank, byte for byte, and torch.load reads it. The
command also merges a directory of torch.distributed.checkpoint (.metadata and
*.distcp); this takes as much memory as the state, and loads objects like torch.load
with weights_only=True, which refuses those that would run code.

Exit codes: 0 good, 1 a part is missing or damaged, 2 usage or not found.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "merge",
        help="make one file of a checkpoint in several directories or in shards",
        description="Make one ordinary file of a checkpoint in several directories or in shards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", help="the directory of a step, one of each store")
    parser.add_argument("out", metavar="OUT", help="the file to make: .pt, or .safetensors for a flat dict of tensors")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument(
        "--format", choices=("auto", "torch", "safetensors"), default="auto", help="format of OUT; auto: by its suffix"
    )
    parser.add_argument(
        "--no-weights-only", action="store_true", help="load objects of any kind: only if you trust the checkpoint"
    )
    parser.add_argument("--engine", default="auto", metavar="NAME", help="the engine that reads and writes")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Merge, and print the result."""
    from fastpersist.checkpointer.merge import merge

    report = merge(
        arguments.directories,
        arguments.out,
        overwrite=arguments.overwrite,
        format=arguments.format,
        weights_only=not arguments.no_weights_only,
        engine=arguments.engine,
        progress=sys.stderr.isatty() and not arguments.quiet,
    )
    if not arguments.quiet:
        print(f"{printable(report.path)}: {size_text(report.size_bytes)} in {report.total_s:.2f} s")
    return EXIT_GOOD
