"""`fastpersist convert A B`: another format, dtype, names or number of files, streamed, durable and checked."""

from __future__ import annotations

import argparse

from fastpersist.cli.terminal import EXIT_GOOD, bytes_bar, count_text, printable, size_text

__all__ = ["add_parser", "run"]

_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_SHOWN_COUNT = 3

_EPILOG = """\
examples:
  fastpersist convert model.pt model.safetensors
  fastpersist convert model.safetensors model.pt --dtype bfloat16
  fastpersist convert runs/a/step-00000100 weights.safetensors --keys 'model.*' --rename model.=
  fastpersist convert model.safetensors model-hf --shard-bytes 5GB
  fastpersist convert model-hf model.pt

A is a file of torch.save, of safetensors or of ours, a directory of safetensors files,
the directory of a step, or a sharded checkpoint (.metadata, *.distcp). B gets the
tensors, by their flat names: a .pt file is a dict of name to tensor, whatever A was.
Everything else in A (numbers, settings, the nesting, classes) is left out, and said so.
Identical tensors under several names stay one in a .pt file; other views become tensors
of their own. Floating-point tensors are converted with --dtype, all others keep theirs.

The source is read in pieces, so memory stays below 128 MiB for files of any size. B is
durable and complete, or not there: bytes are compared with the CRCs that A records, and
with those of what was written. --shard-bytes takes 5GB, 800MB, 4GiB.

Exit codes: 0 written, 1 A is damaged, 2 usage, not found, or cannot be converted.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "convert",
        help="write tensors anew: another format, dtype, names, or shards",
        description="Write the tensors of a file or a checkpoint anew: in another format, dtype, naming, or in shards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="a file, a directory of safetensors files, or a checkpoint")
    parser.add_argument("b", metavar="B", help="the file to make, .pt or .safetensors; a directory with --shard-bytes")
    parser.add_argument("--dtype", choices=_DTYPES, help="convert floating-point tensors to this dtype")
    parser.add_argument("--keys", metavar="GLOB", nargs="+", default=[], help="take only tensors with such a name")
    parser.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        type=_prefixes,
        help="replace the prefix OLD of names; may be given several times, the longest that fits counts",
    )
    parser.add_argument("--shard-bytes", metavar="SIZE", help="make a directory of safetensors files with an index")
    parser.add_argument(
        "--format", choices=("auto", "torch", "safetensors"), default="auto", help="format of B; auto: by its suffix"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace B; files in a directory that are no checkpoint stay"
    )
    parser.add_argument("--engine", default="auto", metavar="NAME", help="the engine that reads and writes")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.set_defaults(run=run)


def _prefixes(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW, such as module.=")
    return old, new


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print the result."""
    import torch

    from fastpersist.arguments import byte_count
    from fastpersist.contents.conversion import Wish, convert
    from fastpersist.contents.stored import open_contents
    from fastpersist.formats.names import is_wanted

    wish = Wish(
        patterns=arguments.keys,
        prefixes=dict(arguments.rename),
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        file_format=arguments.format,
        shard_bytes=None if arguments.shard_bytes is None else byte_count(arguments.shard_bytes, "--shard-bytes"),
        overwrite=arguments.overwrite,
    )
    with open_contents(arguments.a, engine=arguments.engine) as contents:
        tensors = contents.tensors.items()
        total_bytes = sum(tensor.size_bytes for name, tensor in tensors if is_wanted(name, arguments.keys))
        with bytes_bar("converting", total_bytes, quiet=arguments.quiet) as bar:
            report = convert(contents, arguments.b, wish, engine=arguments.engine, on_read=bar.update)
    if arguments.quiet:
        return EXIT_GOOD
    files = "" if wish.shard_bytes is None else f" in {count_text(report.file_count, 'file')}"
    print(
        f"{printable(report.path)}: {count_text(report.tensor_count, 'tensor')}, {size_text(report.size_bytes)}{files} "
        f"in {report.total_s:.2f} s; {report.checked_count} compared with CRCs of the source"
    )
    if dropped := report.dropped_values:
        shown = ", ".join(map(printable, dropped[:_SHOWN_COUNT])) + (", …" if len(dropped) > _SHOWN_COUNT else "")
        print(f"left out, since they are no tensors: {count_text(len(dropped), 'value')} ({shown})")
    return EXIT_GOOD
