"""Programs that come to their end as those of any interpreter do, without an import of torch for each.

An interpreter that has imported torch, and does nothing else, forks once for each program. The child has one thread,
runs the program as its main module, and falls off the end of it: threads, atexit and signals are as if it had been
started.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

RunScript = Callable[..., subprocess.CompletedProcess[str]]

_SERVER = """
import gc, json, os, sys
import torch
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)  # the first optimizer of a process imports for seconds
gc.freeze()  # what is there by now is not for each child to walk through
for line in sys.stdin:
    program, sys.argv, directory, files = json.loads(line)
    child = os.fork()
    if child == 0:
        for fd, path in enumerate([os.devnull, *files]):
            os.dup2(os.open(path, os.O_RDWR), fd)
        os.chdir(directory)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
exec(program)
"""


@contextmanager
def warm_interpreter() -> Iterator[RunScript]:
    """Give a function that runs a program with words as `python -c PROGRAM WORDS…` would, in a directory."""
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run_script(program: str, *words: object, directory: object = "/") -> subprocess.CompletedProcess[str]:
            assert server.stdin is not None
            assert server.stdout is not None
            with tempfile.TemporaryDirectory(prefix="fastpersist-program-") as name:
                files = [Path(name, what) for what in ("output", "errors")]
                for file in files:
                    file.touch()
                request = [textwrap.dedent(program), ["-c", *map(str, words)], str(directory), [*map(str, files)]]
                print(json.dumps(request), file=server.stdin, flush=True)
                code = int(server.stdout.readline())
                said = [file.read_text(errors="surrogateescape") for file in files]
                return subprocess.CompletedProcess(program, code, *said)

        yield run_script
