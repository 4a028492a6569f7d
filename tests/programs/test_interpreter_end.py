"""The end of a program: what it has begun to write is finished, and a failure that nobody asked about is printed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.interpreters import RunScript, warm_interpreter
from support.runs import Replay, hidden_names
from support.states import pending_files

import fastpersist as fp


@pytest.fixture(scope="module")
def run_script() -> Iterator[RunScript]:
    with warm_interpreter() as run:
        yield run


PROGRAM = """
    import sys, threading
    import torch
    import fastpersist as fp
    from fastpersist.commit.filesystem import Filesystem, using

    class AfterMain(Filesystem):
        def allocate(self, fd, size_bytes, path):
            threading.main_thread().join()
            super().allocate(fd, size_bytes, path)

    filesystem = using(AfterMain())
    filesystem.__enter__()
    model = torch.nn.Linear(100, 100)
    torch.nn.init.constant_(model.weight, 7.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def save():
        fp.save_async(model.state_dict(), sys.argv[1], optimizer=optimizer)
"""


SAVE_ENDINGS = {
    "falls off its end": ("save()", 0),
    "sys.exit": ("save(); sys.exit(3)", 3),
    "an exception": ("save(); raise ValueError('on purpose')", 1),
    "a step and del": ("save(); model(torch.ones(1, 100)).sum().backward(); optimizer.step(); del model, optimizer", 0),
    "a thread": ("thread = threading.Thread(target=save); thread.start()", 0),
    "atexit": ("import atexit; filesystem.__exit__(None, None, None); atexit.register(save)", 0),
}


@pytest.mark.parametrize("ending", SAVE_ENDINGS)
def test_the_end_of_the_program_finishes_the_save(tmp_path: Path, ending: str, run_script: RunScript) -> None:
    path = tmp_path / "state.pt"
    last_line, status = SAVE_ENDINGS[ending]
    result = run_script(textwrap.dedent(PROGRAM) + last_line, path)
    assert result.returncode == status, result.stderr
    assert torch.equal(fp.load(path, verify=True)["weight"], torch.full((100, 100), 7.0))
    assert not pending_files(tmp_path)


CHECKPOINTER_ENDINGS = {
    "end of the script": "",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(10)",
    "exit in atexit": "atexit.register(lambda: checkpointer.save(4, state))",
}


@pytest.mark.parametrize("ending", CHECKPOINTER_ENDINGS)
def test_end_of_the_program_finishes_what_was_begun(tmp_path: Path, ending: str, run_script: RunScript) -> None:
    program = f"""
        import atexit, os, signal, sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import fastpersist as fp
        from fastpersist.commit import filesystem
        from support.runs import Run
        from support.training import HeldFilesystem

        filesystem._current = writers = HeldFilesystem()
        run = Run().advance(3)
        state = run.state()
        checkpointer = fp.Checkpointer({str(tmp_path)!r}, optimizer=run.optimizer)
        checkpointer.save(2, state)
        checkpointer.save(3, state)
        main = threading.main_thread()
        threading.Thread(target=lambda: (time.sleep(0.2), writers.release())).start()
        {CHECKPOINTER_ENDINGS[ending]}
    """
    ended = run_script(program)
    assert (ended.returncode == 0) == (ending != "interrupt"), ended.stderr
    steps = [2, 3, 4] if ending == "exit in atexit" else [2, 3]
    checkpointer = fp.Checkpointer(tmp_path)
    assert checkpointer.steps() == steps
    for step in steps:
        assert Replay().check(checkpointer.load(step)) == 3
    assert hidden_names(tmp_path) == []


def test_failure_that_nobody_asked_about_is_printed_at_the_end(tmp_path: Path, run_script: RunScript) -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import fastpersist as fp
        from fastpersist.commit import filesystem
        from support.filesystems import FailingFilesystem

        checkpointer = fp.Checkpointer({str(tmp_path)!r})
        checkpointer.save(1, {{"a": 1}}).result()
        filesystem._current = FailingFilesystem(1, 28, lasting=True)
        checkpointer.save(2, {{"a": 2}})
    """
    ended = run_script(program)
    assert "step-00000002" in ended.stderr
    assert "No space left" in ended.stderr
    assert fp.Checkpointer(tmp_path).load() == {"a": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


START = """
    import sys, threading, torch, fastpersist as fp
    from fastpersist import _native
    def slow(ms): _native.set_fault_plan(_native.FaultPlan(kind="delay", count=2**64 - 1, delay_ms=ms))
    file = fp.TensorFile(sys.argv[1], "w", engine="fault:threads-buffered")
"""


@pytest.mark.parametrize(
    "ending",
    [
        "file.write_async(torch.ones(1000, dtype=torch.uint8))",
        "pending = file.write_async(torch.ones(1000, dtype=torch.uint8)); sys.exit(0)",
        "pending = []; submitted = threading.Event(); "
        "threading.Thread(target=lambda: (pending.append(file.write_async(torch.ones(1000, dtype=torch.uint8))), "
        "submitted.set(), pending[0].wait()), daemon=True).start(); submitted.wait()",
        "cycle = [file]; cycle.append(cycle); file.write_async(torch.ones(1000, dtype=torch.uint8)); del file",
    ],
    ids=["dropped", "held", "daemon thread", "cycle"],
)
def test_the_interpreter_ends_when_the_requests_have(ending: str, path: Path, run_script: RunScript) -> None:
    result = run_script(START + "    slow(400)\n    " + ending, path)
    assert result.returncode == 0, result.stderr
    assert path.read_bytes() == b"\1" * 1000


def test_a_write_that_failed_at_the_end_of_the_interpreter_is_told(path: Path, run_script: RunScript) -> None:
    result = run_script(
        START
        + '    _native.set_fault_plan(_native.FaultPlan(op="write"))\n'
        + "    file.write_async(torch.ones(1000, dtype=torch.uint8))",
        path,
    )
    assert "write to" in result.stderr
    assert str(path) in result.stderr


LATE = """
    import atexit, sys, threading, time, torch, fastpersist as fp
    from fastpersist import _native
    from fastpersist.transfer import tensor_file
    class Slow:
        def __del__(self, sleep=time.sleep):
            sleep(2)  # in which others may ask for the GIL
    sys.slow = Slow()  # goes after Python has begun to end threads
    _native.set_fault_plan(_native.FaultPlan(op="write", kind="delay", count=2**64 - 1, delay_ms=1000))
    def start(work):
        begun = threading.Event()
        threading.Thread(target=lambda: (begun.set(), work()), daemon=True).start()
        begun.wait()
    data = torch.ones(1000, dtype=torch.uint8)
"""


@pytest.mark.parametrize(
    "ending",
    [
        'start(lambda: fp.save(data, sys.argv[1], engine="fault:threads-buffered")); '
        "exec('while _native.ring_free_count() == _native.ring_buffer_count(): time.sleep(0.001)')",
        # Nobody waits for its requests at exit.
        "atexit.unregister(tensor_file._close_all); "
        'file = fp.TensorFile(sys.argv[1], "w", engine="fault:threads-buffered"); '
        "pending = file.write_async(data); start(pending.wait)",
        # Its wait ends before that of the main thread, so it would be the one that frees the tensor.
        'file = fp.TensorFile(sys.argv[1], "w", engine="fault:threads-buffered"); close = fp.TensorFile.close; '
        "fp.TensorFile.close = lambda file: (time.sleep(1.5), close(file)); "
        "data.slow = Slow(); pending = file.write_async(data); del data; start(pending.wait)",
    ],
    ids=["a save asks while it is polled", "a wait asks at its end", "a wait ends before the last of the main thread"],
)
def test_a_daemon_thread_that_asks_for_the_interpreter_too_late_ends_with_the_process(ending: str, path: Path) -> None:
    """In an interpreter of its own: when objects go depends on what was there before."""
    command = [sys.executable, "-c", textwrap.dedent(LATE) + ending, path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
