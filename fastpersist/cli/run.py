"""`fastpersist run SCRIPT ARGS…`: runs a program unchanged, with torch.save and torch.load replaced by ours.

The program becomes the `__main__` of this process, as with `python`: arguments, import path, objects pickled from
`__main__`, exit code, traceback. `integrations.torch_save.install` replaces the functions.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from fastpersist.cli.terminal import EXIT_GOOD, EXIT_USAGE, print_error

__all__ = ["add_parser", "run"]

EXIT_FAILED = 1  # as Python's, when an exception ends a program

_EPILOG = """\
examples:
  fastpersist run train.py --epochs 3
  fastpersist run --async -m train.main

The program runs as with `python SCRIPT ARGS…` or `python -m MODULE ARGS…`: arguments, exit
code and tracebacks are its own, and stock tools read its files. Other processes that it starts
keep torch's own save and load; so under torchrun every rank is run with it:

  torchrun --nproc-per-node 2 --no-python fastpersist run SCRIPT ARGS…

The command imports torch before the program begins: set environment variables that torch
reads at import, such as OMP_NUM_THREADS, outside.

Exit codes: the program's own; also 1 when a save with --async could not be written, and
2 when there is no such program.
"""


@dataclass(frozen=True)
class _Program:
    """A program that was found, before it runs.

    Attributes:
        code: The code to execute.
        names: Python's attributes of a main module, such as `__file__`.
        argument_0: The program's sys.argv[0].
    """

    code: CodeType
    names: dict[str, Any]
    argument_0: str


class _NoProgramError(Exception):
    """There is no program to run; the message says what is missing."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a program unchanged, with torch.save and torch.load at our speed",
        add_help=False,
        prefix_chars="\0",  # argparse would take some of the program's own words for options, or swallow them
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run, is_somebody_elses=True)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastpersist run",
        usage="fastpersist run [-h] [--async] [--not-durable] (SCRIPT | -m MODULE) ARGS…",
        description="Run a program unchanged, with torch.save and torch.load at our speed. SCRIPT is a Python file, or "
        "a directory or zip file with a __main__.py.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--async",
        dest="is_async",
        action="store_true",
        help="let torch.save return when everything is copied; loading the file, and the program's end, wait for it",
    )
    parser.add_argument(
        "--not-durable",
        dest="is_durable",
        action="store_false",
        help="let torch.save return when the page cache has everything, as torch's own does",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the program; an exception or SystemExit that ends it propagates."""
    from fastpersist import FastPersistError, install, installed

    words: list[str] = arguments.words
    own_count = next((i for i, word in enumerate(words) if word in ("-m", "--") or word[:1] != "-"), len(words))
    options = _options().parse_args(words[:own_count])
    words = words[own_count:]
    if words[:1] == ["--"]:
        del words[0]
    is_module = words[:1] == ["-m"]
    if is_module:
        del words[0]
    if not words:
        print_error("name a script, or a module behind -m; see fastpersist run --help")
        return EXIT_USAGE
    ending = None
    code = EXIT_GOOD
    # What comes after the program's last line, its threads and atexit handlers, saves before torch.save returns.
    install(durable=options.is_durable)
    try:
        with installed(async_=options.is_async, durable=options.is_durable):
            ending = _run_as_main(words, is_module=is_module)
    except _NoProgramError as error:
        print_error(str(error))
        return EXIT_USAGE
    except FastPersistError as error:  # of a background save, not yet raised
        print_error(str(error))
        code = EXIT_FAILED
    if ending is None or (code and isinstance(ending, SystemExit) and not ending.code):
        return code
    raise ending


def _run_as_main(words: Sequence[str], *, is_module: bool) -> BaseException | None:
    """Find the program and run it; return the exception that ended it, None without one.

    Raises:
        _NoProgramError: There is none.
    """
    main = ModuleType("__main__")
    for name in ("__main__", "__mp_main__"):  # the second is what processes call it that multiprocessing has spawned
        sys.modules[name] = main  # and it stays: atexit handlers may pickle
    try:
        sys.argv[:] = ["-m", *words[1:]]  # what the packages around a module see, which are imported to find it
        program = _find_module(words[0]) if is_module else _find_script(words[0])
        sys.argv[0] = program.argument_0
        vars(main).update(program.names)
        exec(program.code, vars(main))
    except _NoProgramError:
        raise
    except BaseException as error:  # noqa: BLE001 - it is not ours
        _show_without_us(error)
        return error
    return None


def _find_script(path: str) -> _Program:
    """Find the program of `python PATH`: a file, or the `__main__.py` in a directory or zip file."""
    whole_path = os.path.abspath(path)
    if pkgutil.get_importer(whole_path) is not None:
        _put_first_on_path(whole_path)
        spec = PathFinder.find_spec("__main__", [whole_path])
        if spec is None:
            raise _NoProgramError(f"there is no __main__.py in {whole_path}")
        return _program_of(spec, path)
    loader: SourceFileLoader | SourcelessFileLoader
    try:
        if path.endswith(".pyc"):
            loader = SourcelessFileLoader("__main__", whole_path)
            code = loader.get_code("__main__")
        else:
            loader = SourceFileLoader("__main__", whole_path)
            code = loader.source_to_code(loader.get_data(whole_path), whole_path)  # get_code() would leave a .pyc
    except OSError as error:
        raise _NoProgramError(f"cannot run {whole_path}: {error.strerror}") from error
    if code is None:
        raise _NoProgramError(f"cannot run {whole_path}: it holds no code")
    _put_first_on_path(os.path.dirname(os.path.realpath(whole_path)))
    names = {"__file__": whole_path, "__loader__": loader, "__package__": None, "__spec__": None, "__cached__": None}
    return _Program(code, _with_builtins(names), path)


def _find_module(name: str) -> _Program:
    """Find the program of `python -m NAME`: a module, or the `__main__` of a package."""
    _put_first_on_path(os.getcwd())
    spec = _find_spec(name)
    if spec is None:
        raise _NoProgramError(f"there is no module {name}")
    if spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
        if spec is None:
            raise _NoProgramError(f"{name} is a package without __main__.py; it cannot be run")
    return _program_of(spec, spec.origin or name)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise  # a package around it is there, and imports something that is not
    except ValueError as error:
        raise _NoProgramError(f"cannot run {name!r}: {error}") from error


def _program_of(spec: ModuleSpec, argument_0: str) -> _Program:
    """Return the code of a module that the import system has found."""
    get_code = getattr(spec.loader, "get_code", None)
    code = None if get_code is None else get_code(spec.name)
    if code is None:
        raise _NoProgramError(f"cannot run {spec.name}: it has no Python code")
    names = {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
        "__cached__": spec.cached,
    }
    return _Program(code, _with_builtins(names), argument_0)


def _with_builtins(names: dict[str, Any]) -> dict[str, Any]:
    return {**names, "__builtins__": builtins}  # the module in `__main__`, where all others have its dictionary


def _put_first_on_path(directory: str) -> None:
    """Replace the first entry of sys.path, which Python sets for the command `fastpersist`, unless it set none."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = directory


def _show_without_us(error: BaseException) -> None:
    """Let Python's final traceback begin with the program's own first line."""
    theirs = error.__traceback__
    while theirs is not None and theirs.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        theirs = theirs.tb_next
    shown, hook = theirs, sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hook(kind, error.with_traceback(shown), shown)

    sys.excepthook = show
