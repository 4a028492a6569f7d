"""How commands end, and what of a stranger's text reaches the terminal."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading

import pytest

from fastpersist import (
    CheckpointNotFoundError,
    ChecksumError,
    ConfigError,
    FastPersistError,
    FormatError,
    InternalError,
    StorageError,
    UnsupportedError,
)
from fastpersist.cli.terminal import (
    bytes_bar,
    print_table,
    printable,
    run_command,
    shape_text,
    size_text,
    stopped_by_signals,
)


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FormatError("it ends too early", path="model.pt"), 1),
        (ChecksumError("changed", path="model.pt", offset_bytes=4096), 1),
        (CheckpointNotFoundError(errno.ENOENT, "there is no checkpoint at model.pt", "model.pt"), 2),
        (StorageError(errno.EIO, "reading model.pt: Input/output error", "model.pt"), 2),
        (UnsupportedError("no io_uring here"), 2),
        (ConfigError("FASTPERSIST_RING_BYTES must be …"), 2),
        (InternalError("an invariant broke"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_our_errors_become_a_line_and_a_code(
    error: FastPersistError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: raising(error)) == code
    assert capsys.readouterr().err == f"fastpersist: error: {error}\n"


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: raising(ZeroDivisionError()))


def test_interrupt_ends_as_the_shell_expects(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")], ids="+".join)
def test_closed_stream_takes_what_is_printed(
    closed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        print("a result")
        raise UnsupportedError("no io_uring here")

    for name in closed:
        monkeypatch.setattr(sys, name, None)  # as Python has it after `>&-`
    assert run_command(command) == 2
    for name in closed:
        stream = getattr(sys, name)
        assert stream.name == os.devnull
        stream.close()
    monkeypatch.undo()
    shown = capsys.readouterr()
    assert shown.out == ("" if "stdout" in closed else "a result\n")
    assert shown.err == ("" if "stderr" in closed else "fastpersist: error: no io_uring here\n")


def test_error_line_stays_one_line_whatever_a_path_holds(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(lambda: raising(StorageError(None, "reading a\nb\x1b[2J", "a\nb\x1b[2J")))
    assert capsys.readouterr().err == "fastpersist: error: reading a\\nb\\x1b[2J\n"


def test_printable_escapes_only_what_a_terminal_cannot_show() -> None:
    assert printable("blöcke.0 重み") == "blöcke.0 重み"
    assert printable("\x1b]0;\x07\r\u202e\udc80") == "\\x1b]0;\\x07\\r\\u202e\\udc80"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (38_400_000, "38.4 MB"), (5 << 40, "5497.56 GB")],
)
def test_size_text(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


# --- told to end ---


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_told_to_end_is_an_exception_in_the_block(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, stopped_by_signals():
            os.kill(os.getpid(), number)
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_nohup_and_other_threads_keep_what_they_have() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    ran: list[bool] = []

    def work() -> None:
        with stopped_by_signals():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]


def test_shapes_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert (shape_text((2, 3)), shape_text(()), shape_text((0,))) == ("2×3", "scalar", "0")
    print_table(("name", "bytes"), ("left", "right"), [("1e5", "7"), ("w", "1000")])
    assert capsys.readouterr().out.splitlines() == [
        "",
        "name      bytes",
        "------  -------",
        "1e5           7",
        "w          1000",
    ]


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_appears_only_where_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    with bytes_bar("reading", 100, quiet=False) as bar:
        bar.update(50)
        assert not shown.getvalue(), "less than two seconds have passed"
        bar.start_t -= 3
        bar.refresh()
        bar.update(50)
        assert "reading" in shown.getvalue()
    with bytes_bar("reading", 100, quiet=True) as bar:
        assert bar.disable
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with bytes_bar("reading", 100, quiet=False) as bar:
        assert bar.disable
