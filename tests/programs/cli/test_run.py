"""`fastpersist run`: a program finds the world that Python would give it, except that torch.save and load are ours."""

from __future__ import annotations

import json
import py_compile
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.interpreters import RunScript, warm_interpreter
from support.programs import run_in_fork
from support.torch_save_calls import is_ours

from fastpersist.cli import main

RUN = [sys.executable, "-m", "fastpersist", "run"]
RUN_MODULE = 'import runpy; runpy.run_module("fastpersist", run_name="__main__", alter_sys=True)'

FACTS = """
import json, sys
main = sys.modules["__main__"]
assert vars(main) is globals()
facts = {name: repr(getattr(main, name, "none"))
         for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__", "__builtins__")}
facts["loader"] = repr(getattr(main.__loader__, "name", type(main.__loader__).__name__))
facts["spec"] = main.__spec__ and [main.__spec__.name, main.__spec__.origin, main.__spec__.parent]
facts["argv"] = sys.argv
facts["path"] = sys.path[0]
facts["hook"] = sys.excepthook is sys.__excepthook__
print(json.dumps(facts))
"""


def write(path: Path, program: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(program))
    return path


def run(command: Sequence[object], directory: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        input=text,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def run_script() -> Iterator[RunScript]:
    with warm_interpreter() as run:
        yield run


def run_warm(run_script: RunScript, *words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Do as `python -m fastpersist run WORDS…`, in an interpreter that has imported torch."""
    return run_script(RUN_MODULE, "run", *words, directory=directory)


def run_here(words: Sequence[object], directory: Path) -> tuple[int, str, str]:
    """Run a program with ours in a fork of this process; not for how a program ends."""
    return run_in_fork(lambda: main(["run", *map(str, words)]), directory)


# --------------------------------------------------------------------------------------------- what it finds


def make_script(directory: Path) -> list[object]:
    return [write(directory / "sub" / "facts.py", FACTS).relative_to(directory)]


def make_link(directory: Path) -> list[object]:
    write(directory / "sub" / "facts.py", FACTS)
    (directory / "link.py").symlink_to("sub/facts.py")
    return ["link.py"]


def make_file_without_suffix(directory: Path) -> list[object]:
    return [write(directory / "facts", FACTS)]


def make_compiled_file(directory: Path) -> list[object]:
    py_compile.compile(str(write(directory / "facts.py", FACTS)), cfile=str(directory / "facts.pyc"))
    return ["facts.pyc"]


def make_directory(directory: Path) -> list[object]:
    write(directory / "program" / "__main__.py", FACTS)
    return ["program"]


def make_zip_file(directory: Path) -> list[object]:
    with zipfile.ZipFile(directory / "program.zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    return ["program.zip"]


def make_module(directory: Path) -> list[object]:
    write(directory / "facts.py", FACTS)
    return ["-m", "facts"]


def make_module_in_package(directory: Path) -> list[object]:
    write(directory / "package" / "__init__.py", "import sys; assert sys.argv == ['-m', '--option', '-m', '--', 'é']")
    write(directory / "package" / "facts.py", FACTS)
    return ["-m", "package.facts"]


def make_package(directory: Path) -> list[object]:
    write(directory / "package" / "__init__.py", "")
    write(directory / "package" / "__main__.py", FACTS)
    return ["-m", "package"]


@pytest.mark.parametrize(
    "make",
    [
        make_script,
        make_link,
        make_file_without_suffix,
        make_compiled_file,
        make_directory,
        make_zip_file,
        make_module,
        make_module_in_package,
        make_package,
    ],
)
def test_program_finds_what_python_would_give_it(make: Callable[[Path], list[object]], tmp_path: Path) -> None:
    words = [*make(tmp_path), "--option", "-m", "--", "é"]
    stock = run([sys.executable, *words], tmp_path)
    assert stock.returncode == 0, stock.stderr
    code, output, errors = run_here(words, tmp_path)
    assert (code, errors) == (0, "")
    assert json.loads(output) == json.loads(stock.stdout)
    assert not (tmp_path / "sub" / "__pycache__").exists()


PROGRAM = """
    import atexit, io, multiprocessing, os, pickle, sys, threading
    import torch
    from beside import Settings

    class Own:
        "Pickled by its name in __main__."

        def __eq__(self, other):
            return isinstance(other, Own)

    def worker(connection):
        connection.send(Own())

    def late(path):
        main_thread = threading.main_thread()
        threading.Thread(target=lambda: (main_thread.join(), torch.save(Own(), path))).start()

    if __name__ == "__main__":
        torch.save({"weights": torch.arange(5.0), "own": [Own(), Settings()]}, "x.pt")
        assert torch.load("x.pt", weights_only=False)["own"][0] == Own()
        assert pickle.loads(pickle.dumps(Own)) is Own
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(target=worker, args=[theirs])
        child.start()
        assert ours.recv() == Own()
        child.join()
        atexit.register(lambda: torch.save(Own(), "atexit.pt"))
        late("thread.pt")
        print(sys.stdin.read().upper(), sys.argv[1:])
"""


@pytest.mark.parametrize("options", [[], ["--async", "--not-durable", "--"]])
def test_program_runs_and_its_files_are_ours(options: list[str], tmp_path: Path) -> None:
    write(tmp_path / "beside.py", "class Settings: pass")
    write(tmp_path / "program.py", PROGRAM)
    ended = run([*RUN, *options, "program.py", "--async"], tmp_path, text="input")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "INPUT ['--async']\n"
    assert all(is_ours(tmp_path / name) for name in ("x.pt", "thread.pt", "atexit.pt"))


def test_without_async_a_file_is_there_when_save_returns(tmp_path: Path) -> None:
    write(
        tmp_path / "program.py", "import os, torch; torch.save([1], 'x.pt'); assert os.path.exists('x.pt'); os._exit(7)"
    )
    assert run([*RUN, "program.py"], tmp_path).returncode == 7
    assert torch.load(tmp_path / "x.pt") == [1]


# --------------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit(3)",
        "sys.exit('a message')",
        "os.kill(os.getpid(), 9)",
        "raise BrokenPipeError",
        "1 +",
        "def f():\n    raise ValueError('deep') from LookupError('deeper')\nf()",
        "sys.excepthook = lambda *words: print('hook', words[0], words[2].tb_frame.f_code.co_name)\n1 / 0",
        "import atexit\n@atexit.register\ndef _(): raise LookupError('late')\nprint('é\\udc80')",
    ],
)
def test_program_ends_as_with_python(ending: str, tmp_path: Path, run_script: RunScript) -> None:
    write(tmp_path / "program.py", "import os, sys, threading\n" + ending)
    stock = run([sys.executable, "program.py"], tmp_path)
    ours = run_warm(run_script, "program.py", directory=tmp_path)
    assert (ours.returncode, ours.stdout) == (stock.returncode, stock.stdout)
    addresses = re.compile("0x[0-9a-f]+")
    assert addresses.sub("0x", ours.stderr) == addresses.sub("0x", stock.stderr)


@pytest.mark.parametrize(
    ("program", "code"),
    [("import fastpersist as fp\nfp.load('missing.pt')\n", 1), ("raise KeyboardInterrupt", -signal.SIGINT)],
)
def test_error_of_fastpersist_and_an_interrupt_keep_their_traceback_too(
    program: str, code: int, tmp_path: Path
) -> None:
    write(tmp_path / "program.py", program)
    stock, ours = (run([*start, "program.py"], tmp_path) for start in ([sys.executable], RUN))
    assert (ours.returncode, ours.stdout, ours.stderr) == (code, "", stock.stderr)
    assert stock.returncode == code
    assert ours.stderr.startswith("Traceback")


def test_interrupt_ends_it_as_python(tmp_path: Path) -> None:
    write(tmp_path / "program.py", "import time; print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen(
        [*RUN, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT
    assert errors.startswith("Traceback")
    assert errors.endswith("KeyboardInterrupt\n")
    assert "fastpersist" not in errors


FULL = """
    import errno, sys, torch
    import fastpersist as fp
    from fastpersist.commit import filesystem

    class Full(filesystem.Filesystem):
        def allocate(self, fd, size_bytes, path):
            raise fp.NoSpaceError(errno.ENOSPC, "disk full", path)

    filesystem._current = Full()
    torch.save([1], "x.pt")
"""


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(0)", 1), ("sys.exit(5)", 5), ("1 / 0", 1)])
def test_save_that_failed_behind_the_program_fails_it(
    ending: str, code: int, tmp_path: Path, run_script: RunScript
) -> None:
    write(tmp_path / "program.py", textwrap.dedent(FULL) + ending)
    ended = run_warm(run_script, "--async", "program.py", directory=tmp_path)
    assert ended.returncode == code
    lines = [line for line in ended.stderr.splitlines() if line.startswith("fastpersist: error: ")]
    assert len(lines) == 1
    assert "x.pt" in lines[0]
    assert ": disk full; " in lines[0]  # and how much is free
    assert ("Traceback" in ended.stderr) == (ending == "1 / 0")


# --------------------------------------------------------------------------------------------- what cannot be run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "cannot run {}/missing.py: No such file or directory"),
        (["empty"], "there is no __main__.py in {}/empty"),
        (["-m", "missing_module"], "there is no module missing_module"),
        (["-m", "missing_package.module"], "there is no module missing_package.module"),
        (["-m", "json.missing"], "there is no module json.missing"),
        (["-m", "xml"], "xml is a package without __main__.py; it cannot be run"),
        (["-m", "math"], "cannot run math: it has no Python code"),
        ([], "name a script, or a module behind -m; see fastpersist run --help"),
        (["-m"], "name a script, or a module behind -m; see fastpersist run --help"),
    ],
)
def test_what_is_not_there_is_one_line_and_exit_code_2(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run_here(words, tmp_path) == (2, "", f"fastpersist: error: {message.format(tmp_path)}\n")


def test_package_that_imports_what_is_not_there_is_an_error_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "package" / "__init__.py", "import missing_module")
    write(tmp_path / "package" / "module.py", "")
    ended = run([*RUN, "-m", "package.module"], tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.endswith("ModuleNotFoundError: No module named 'missing_module'\n")


def test_nothing_is_put_on_the_path_where_python_is_told_so(tmp_path: Path) -> None:
    write(tmp_path / "program.py", "import sys; print(sys.path)")
    isolated = [sys.executable, "-I", "-m", "fastpersist", "run", "program.py"]
    ended = run(isolated, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert str(tmp_path) not in ended.stdout
    assert str(tmp_path) in run([*RUN, "program.py"], tmp_path).stdout


def test_help_says_what_it_does_and_how_it_ends(tmp_path: Path) -> None:
    ended = run([*RUN, "--help"], tmp_path)
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: fastpersist run [-h] [--async] [--not-durable] (SCRIPT | -m MODULE) ARGS…\n")
    assert "torchrun --nproc-per-node 2 --no-python fastpersist run" in ended.stdout
    assert "Exit codes" in ended.stdout
