"""A signal leads to a last checkpoint where the state is whole, and then to what it would have done before."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.filesystems import FullFor
from support.forking import Child, Report, run_in_child
from support.runs import Replay, Run, held_writers

import fastpersist as fp
from fastpersist.checkpointer.signal_save import SignalSave
from fastpersist.commit.filesystem import using


class Previous:
    """What handled the signal before: takes note, and of what was committed at that moment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.steps: list[list[int]] = []

    def __call__(self, number: int, frame: object) -> None:
        self.steps.append(fp.Checkpointer(self.root).steps())


@pytest.fixture
def previous(tmp_path: Path) -> Iterator[Previous]:
    handler = Previous(tmp_path)
    before = signal.signal(signal.SIGUSR1, handler)
    yield handler
    assert signal.signal(signal.SIGUSR1, before) is handler, "the handler that was there before was not put back"


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


SIGNALS: Any = (signal.SIGUSR1,)


def test_signal_saves_after_the_next_step_and_then_goes_on(
    tmp_path: Path, previous: Previous, leak_check: None
) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        run.advance(3)
        assert checkpointer.steps() == []
        send()
        assert checkpointer.steps() == []  # a handler runs anywhere, in the middle of a step as well
        assert previous.steps == []
        run.advance(4)
        assert previous.steps == [[4]]
        run.advance(6)
        assert checkpointer.steps() == [4]
    assert Replay().check_newest(tmp_path) == 4


def test_poll_is_the_place_without_an_optimizer(tmp_path: Path, previous: Previous) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        checkpointer.poll()
        send()
        run.advance(2)
        assert checkpointer.steps() == []
        checkpointer.poll()
        assert previous.steps == [[2]]
        checkpointer.poll()
        assert previous.steps == [[2]]
    assert Replay().check_newest(tmp_path) == 2


def test_only_the_last_of_several_optimizers_makes_the_state_whole(tmp_path: Path, previous: Previous) -> None:
    first, second = Run(), Run()
    with fp.Checkpointer(tmp_path, optimizer=[first.optimizer, second.optimizer]) as checkpointer:
        checkpointer.save_on_signal(lambda: (second.step, second.state()), SIGNALS)
        send()
        first.advance()
        assert checkpointer.steps() == []
        second.advance()
        assert previous.steps == [[1]]


def test_loop_may_save_the_step_that_the_signal_has_saved(tmp_path: Path, previous: Previous) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        send()
        run.advance()
        assert checkpointer.steps() == [1]
        checkpointer.save(1, run.state())
    assert Replay().check_newest(tmp_path) == 1


def test_signal_comes_before_the_saves_that_wait(tmp_path: Path, previous: Previous) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer, held_writers() as writers:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        run.advance(1)
        checkpointer.save(1, run.state())
        run.advance(2)
        checkpointer.save(2, run.state())
        send()
        threading.Timer(0.05, writers.release).start()
        run.advance(3)
        assert previous.steps == [[1, 2, 3]]
    assert Replay().check_all(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("busy", ["wait", "latest", "skip"])
def test_signal_is_heeded_however_busy_we_are(tmp_path: Path, previous: Previous, busy: Any) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer, busy=busy) as checkpointer, held_writers() as writers:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        run.advance(1)
        checkpointer.save(1, run.state())
        send()
        threading.Timer(0.05, writers.release).start()
        run.advance(2)
        assert previous.steps == [[1, 2]]
    assert Replay().check_newest(tmp_path) == 2


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.filterwarnings("ignore:a checkpoint was not saved")
def test_failure_of_an_earlier_save_does_not_cost_the_last_one(
    tmp_path: Path, previous: Previous, on_error: Any
) -> None:
    run = Run().advance(1)
    checkpointer = fp.Checkpointer(tmp_path, optimizer=run.optimizer, on_error=on_error)
    checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
    with using(FullFor()):
        failed = checkpointer.save(1, run.state())
        failed.join()
    send()
    run.advance(2)
    assert previous.steps == [[2]]
    if on_error == "raise":
        with pytest.raises(fp.NoSpaceError):
            checkpointer.close()
    checkpointer.close()


def test_save_that_fails_goes_on_with_the_signal_all_the_same(tmp_path: Path, previous: Previous) -> None:
    run = Run()
    checkpointer = fp.Checkpointer(tmp_path, optimizer=run.optimizer)
    checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
    send()
    with using(FullFor()), pytest.raises(fp.NoSpaceError):
        run.advance()
    assert previous.steps == [[]]
    checkpointer.close()


def test_make_state_that_fails_goes_on_with_the_signal_all_the_same(tmp_path: Path, previous: Previous) -> None:
    def make_state() -> Any:
        raise KeyError("mine")

    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_on_signal(make_state, SIGNALS)
        send()
        with pytest.raises(KeyError, match="mine"):
            checkpointer.poll()
        assert previous.steps == [[]]


def test_signal_that_came_before_close_is_not_swallowed(tmp_path: Path, previous: Previous) -> None:
    run = Run().advance(1)
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        checkpointer.save(1, run.state())
        send()
    assert len(previous.steps) == 1
    assert Replay().check_newest(tmp_path) == 1


def test_handler_that_somebody_set_after_us_stays(tmp_path: Path, previous: Previous) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
        mine = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert mine is not previous
    assert signal.signal(signal.SIGUSR1, previous) is signal.SIG_IGN


def test_only_the_main_thread_may_ask_for_it(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            fp.Checkpointer(tmp_path).save_on_signal(lambda: (1, {}))
        except fp.ConfigError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(failed[0])


def test_signal_ends_the_process_by_default_and_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run = Run()
        checkpointer = fp.Checkpointer(tmp_path, optimizer=run.optimizer, keep=2)
        checkpointer.save_on_signal(lambda: (run.step, run.state()))
        while True:
            run.advance()
            if run.step % 10 == 0:
                checkpointer.save(run.step, run.state())
            report(run.step)
            if run.step == 14:
                os.kill(os.getpid(), signal.SIGTERM)
            assert run.step < 16

    with Child(work) as child:
        ending = child.wait()
    assert ending.signal == signal.SIGTERM, ending.message
    assert Replay().check_newest(tmp_path) == 15
    assert fp.Checkpointer(tmp_path).steps() == [10, 15]


def test_forked_child_does_what_the_signal_did_before(tmp_path: Path, previous: Previous) -> None:
    run = Run().advance()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        checkpointer.save(1, run.state()).result()

        def work(report: Report) -> None:
            send()
            assert previous.steps == [[1]]

        run_in_child(work)
        assert checkpointer.steps() == [1]


def test_signal_that_came_before_a_fork_is_the_parents(tmp_path: Path, previous: Previous) -> None:
    run = Run().advance()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        send()

        def work(report: Report) -> None:
            run.advance(2)
            checkpointer.poll()
            assert previous.steps == []

        run_in_child(work)
        run.advance(2)
        assert previous.steps == [[2]]


# --- steps that are there already


def test_step_that_the_loop_has_saved_is_not_replaced_by_the_next_ones_state(
    tmp_path: Path, previous: Previous, caplog: pytest.LogCaptureFixture
) -> None:
    """Inside the optimizer's step, a loop that counts behind it has the number of the step before."""
    run, step = Run(), 0
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (step, run.state()), SIGNALS)
        for _ in range(4):
            run.advance()
            step = run.step
            checkpointer.save(step, run.state()).result()
            if step == 2:
                send()
            assert previous.steps == ([] if step < 3 else [[1, 2, 3]])
    assert Replay().check_all(tmp_path) == [1, 2, 3, 4]
    assert "SIGUSR1 waits for the next step, or for the loop's own save(): step 2 is saved already" in caplog.text
    assert "step 3 is saved, and SIGUSR1 goes to its earlier handler" in caplog.text


def test_step_that_is_being_saved_is_not_saved_again(tmp_path: Path, previous: Previous) -> None:
    run, step = Run().advance(1), 1
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer, held_writers() as writers:
        checkpointer.save_on_signal(lambda: (step, run.state()), SIGNALS)
        pending = checkpointer.save(1, run.state())
        send()
        run.advance(2)
        assert not pending.done()
        assert previous.steps == []
        step = 3
        threading.Timer(0.05, writers.release).start()
        run.advance(3)
        assert previous.steps == [[1, 3]]
    assert Replay().check_all(tmp_path) == [1, 3]


def test_damaged_step_is_saved_again(tmp_path: Path, previous: Previous) -> None:
    run = Run().advance(1)
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
        checkpointer.save(1, {}).result()
        (tmp_path / "step-00000001" / "state.pt").unlink()
        send()
        checkpointer.poll()
        assert previous.steps == [[1]]
    assert Replay().check_newest(tmp_path) == 1


def test_none_leaves_it_to_the_loop(tmp_path: Path, previous: Previous) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer, busy="skip") as checkpointer:
        checkpointer.save_on_signal(lambda: None, SIGNALS)
        send()
        run.advance(3)
        checkpointer.poll()
        assert previous.steps == []
        checkpointer.save(3, run.state())
        assert previous.steps == [[3]]
        run.advance(4)
        checkpointer.save(4, run.state())
        assert previous.steps == [[3]]
    assert Replay().check_newest(tmp_path) == 4


def test_save_for_a_signal_is_not_left_out_because_of_others(tmp_path: Path, previous: Previous) -> None:
    run = Run().advance(1)
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer, busy="skip") as checkpointer, held_writers() as writers:
        checkpointer.save_on_signal(lambda: None, SIGNALS)
        checkpointer.save(1, run.state())
        send()
        run.advance(2)
        threading.Timer(0.05, writers.release).start()
        checkpointer.save(2, run.state())
        assert previous.steps == [[1, 2]]
    assert Replay().check_all(tmp_path) == [1, 2]


def test_signal_goes_on_behind_what_is_being_saved_when_the_block_fails(tmp_path: Path, previous: Previous) -> None:
    run = Run().advance(1)
    with held_writers() as writers:
        with pytest.raises(KeyError), fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
            checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS)
            checkpointer.save(1, run.state())
            send()
            threading.Timer(0.05, writers.release).start()
            raise KeyError
        assert previous.steps == [[1]]


def test_each_of_two_signals_goes_on(tmp_path: Path, previous: Previous) -> None:
    other: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: other.append(number))
    try:
        with fp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_on_signal(lambda: (1, {}), (signal.SIGUSR1, signal.SIGUSR2))
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            checkpointer.poll()
            assert previous.steps == [[1]]
            assert other == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_signal_that_is_named_twice_goes_on_once(tmp_path: Path, previous: Previous) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_on_signal(lambda: (1, {}), [signal.SIGUSR1, int(signal.SIGUSR1)])
        send()
        checkpointer.poll()
        assert previous.steps == [[1]]


def test_checkpointers_that_close_in_the_order_in_which_they_began_put_the_handler_back(
    tmp_path: Path, previous: Previous
) -> None:
    first, second = (fp.Checkpointer(tmp_path / name) for name in "ab")
    for checkpointer in (first, second):
        checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
    first.close()
    second.close()
    send()
    assert len(previous.steps) == 1


def test_signal_goes_on_past_a_checkpointer_that_is_closed(tmp_path: Path, previous: Previous) -> None:
    first, second = (fp.Checkpointer(tmp_path / name) for name in "ab")
    for checkpointer in (first, second):
        checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
    first.close()
    send()
    second.poll()
    assert second.steps() == [1]
    assert len(previous.steps) == 1
    second.close()


def test_handler_that_somebody_put_between_two_requests_runs_once(tmp_path: Path, previous: Previous) -> None:
    runs = []
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
        ours: Any = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda number, frame: (runs.append(number), ours(number, frame)))
        checkpointer.save_on_signal(lambda: (2, {}), SIGNALS)
        send()
        checkpointer.poll()
        assert checkpointer.steps() == [2]
        assert len(runs) == len(previous.steps) == 1
    signal.signal(signal.SIGUSR1, previous)


def test_checkpointers_that_ask_in_turn_pass_a_signal_on_once(tmp_path: Path, previous: Previous) -> None:
    first, second = (fp.Checkpointer(tmp_path / name) for name in "ab")
    for checkpointer in (first, second, first):
        checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
    send()
    for checkpointer in (first, second, first, second):
        checkpointer.poll()
    assert first.steps() == second.steps() == [1]
    assert len(previous.steps) == 1
    second.close()
    first.close()


# --- signals at awkward moments


def test_second_signal_while_the_earlier_handler_runs_has_no_effect(tmp_path: Path) -> None:
    runs: list[str] = []

    def earlier(number: int, frame: object) -> None:
        runs.append("begins")
        send()
        runs.append("ends")

    def work(report: Report) -> None:
        signal.signal(signal.SIGUSR1, earlier)
        with fp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
            send()
            checkpointer.poll()
            checkpointer.poll()
            assert runs == ["begins", "ends"]

    run_in_child(work)


def test_second_signal_in_a_handler_that_calls_ours_does_not_pass_it_on_again(tmp_path: Path) -> None:
    runs: list[str] = []

    def work(report: Report) -> None:
        signal.signal(signal.SIGUSR1, lambda number, frame: runs.append("earlier"))
        with fp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
            ours: Any = signal.getsignal(signal.SIGUSR1)

            def between(number: int, frame: object) -> None:
                send()
                runs.append("between")
                ours(number, frame)

            signal.signal(signal.SIGUSR1, between)
            checkpointer.save_on_signal(lambda: (2, {}), SIGNALS)
            send()
            checkpointer.poll()
            assert runs == ["between", "earlier"]

    run_in_child(work)


def test_child_that_the_earlier_handler_forks_still_heeds_the_signal(tmp_path: Path) -> None:
    runs: list[int] = []

    def in_child(report: Report) -> None:
        send()
        assert len(runs) == 2

    def earlier(number: int, frame: object) -> None:
        runs.append(number)
        if len(runs) == 1:
            run_in_child(in_child)

    def work(report: Report) -> None:
        signal.signal(signal.SIGUSR1, earlier)
        with fp.Checkpointer(tmp_path) as checkpointer:
            checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
            send()
            checkpointer.poll()
            assert len(runs) == 1

    run_in_child(work)


def test_signal_ends_the_process_when_another_thread_trains(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        checkpointer = fp.Checkpointer(tmp_path)
        checkpointer.save_on_signal(lambda: (1, {}))
        os.kill(os.getpid(), signal.SIGTERM)
        thread = threading.Thread(target=checkpointer.poll)
        thread.start()
        thread.join()

    with Child(work) as child:
        ending = child.wait()
    assert ending.signal == signal.SIGTERM, ending.message
    assert fp.Checkpointer(tmp_path).steps() == [1]


def call_with_a_signal_at(line: int, code: Any, call: Callable[[], None]) -> bool:
    """Call, and send a signal before the line of that count runs in this code; tell whether there is such a line."""
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code is not code:
            return None
        if event == "line":
            count += 1
            if count == line:
                send()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count >= line


@pytest.mark.parametrize("is_ours_replaced", [False, True])
@pytest.mark.parametrize("method", ["install", "uninstall"])
def test_signal_at_any_line_reaches_the_earlier_handler_once(
    tmp_path: Path, method: str, is_ours_replaced: bool
) -> None:
    runs: list[int] = []

    def try_line(line: int) -> bool:
        runs.clear()
        signal.signal(signal.SIGUSR1, lambda number, frame: runs.append(number))
        checkpointer = fp.Checkpointer(tmp_path)

        def install() -> None:
            checkpointer.save_on_signal(lambda: None, SIGNALS)

        def replace() -> None:
            ours: Any = signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda number, frame: ours(number, frame))

        code = getattr(SignalSave, method).__code__
        if method == "install":
            if is_ours_replaced:
                install()
                replace()
            is_there = call_with_a_signal_at(line, code, install)
            checkpointer.close()
        else:
            install()
            if is_ours_replaced:
                replace()
            is_there = call_with_a_signal_at(line, code, checkpointer.close)
        assert runs == [signal.SIGUSR1] * is_there, f"line {line}"
        return is_there

    def work(report: Report) -> None:
        line = 1
        while try_line(line):
            line += 1
        assert line > 10

    run_in_child(work)


# --- what goes wrong is told


def fail_in_make_state() -> Any:
    raise KeyError("mine")


def fail_in_the_loops_save(checkpointer: fp.Checkpointer, run: Run) -> None:
    with using(FullFor()):
        checkpointer.save(run.step, run.state())


WAYS_TO_FAIL: dict[str, tuple[Any, Any, str]] = {
    "make_state": (
        fail_in_make_state,
        lambda checkpointer, run: run.advance(),
        "SIGTERM asked for a save, which failed: KeyError: 'mine'",
    ),
    "its result": (
        lambda: 5,
        lambda checkpointer, run: checkpointer.poll(),
        "SIGTERM asked for a save, which failed: ConfigError: make_st",
    ),
    "its step": (
        lambda: ("a", {}),
        lambda checkpointer, run: checkpointer.poll(),
        "SIGTERM asked for a save, which failed: ",
    ),
    "its state": (
        lambda: (1, lambda: 1),
        lambda checkpointer, run: checkpointer.poll(),
        "SIGTERM asked for a save, which failed: ",
    ),
    "the loop's save": (
        lambda: None,
        fail_in_the_loops_save,
        "was not saved, and SIGTERM goes to its earlier handler: NoSpaceError",
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_what_fails_is_in_the_log_before_the_process_ends(way: str, tmp_path: Path) -> None:
    make_state, go, told = WAYS_TO_FAIL[way]
    log = tmp_path / "log"

    def work(report: Report) -> None:
        logging.getLogger("fastpersist").addHandler(logging.FileHandler(log))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run = Run().advance()
        checkpointer = fp.Checkpointer(tmp_path / "root", optimizer=run.optimizer)
        checkpointer.save_on_signal(make_state)
        os.kill(os.getpid(), signal.SIGTERM)
        go(checkpointer, run)

    with Child(work) as child:
        assert child.wait().signal == signal.SIGTERM, child.wait().message
    assert told in log.read_text()


def test_what_cannot_be_called_or_handled_is_refused(tmp_path: Path, previous: Previous) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        for bad in ((1, {}), None, {"step": 1}):
            with pytest.raises(fp.ConfigError, match=r"make_state is a function .* cannot be called"):
                checkpointer.save_on_signal(bad, SIGNALS)  # type: ignore[arg-type]
        for signals in (
            signal.SIGUSR1,
            (signal.SIGUSR1, signal.SIGKILL),
            (signal.SIGUSR1, "SIGTERM"),
            (10.0,),
            (0,),
            (),
        ):
            with pytest.raises(fp.ConfigError, match="signals are those that can be handled"):
                checkpointer.save_on_signal(lambda: (1, {}), signals)  # type: ignore[arg-type]
            assert signal.getsignal(signal.SIGUSR1) is previous


def test_request_that_is_refused_leaves_the_earlier_one_in_force(tmp_path: Path, previous: Previous) -> None:
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_on_signal(lambda: (1, {}), SIGNALS)
        send()
        with pytest.raises(fp.ConfigError, match=r"signals are those that can be handled.*not SIGKILL"):
            checkpointer.save_on_signal(lambda: (2, {}), (signal.SIGUSR1, signal.SIGKILL))
        assert previous.steps == []
        checkpointer.poll()
        assert previous.steps == [[1]]


# --- a limited time


@pytest.mark.parametrize("grace_s", [0, -1.0, float("inf"), float("nan"), "30"])
def test_grace_period_that_is_no_time_is_refused(tmp_path: Path, grace_s: Any) -> None:
    with pytest.raises(fp.ConfigError, match="grace_s"):
        fp.Checkpointer(tmp_path).save_on_signal(lambda: (1, {}), SIGNALS, grace_s=grace_s)


def test_save_within_the_grace_period_is_as_without_one(tmp_path: Path, previous: Previous, leak_check: None) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state(), {"own": 7}), SIGNALS, grace_s=1000)
        send()
        run.advance()
        assert previous.steps == [[1]]
    assert fp.Checkpointer(tmp_path).load()["rank_state"] == {"own": 7}


@pytest.mark.parametrize("by", ["make_state", "loop"])
def test_save_that_takes_longer_is_not_waited_for(
    tmp_path: Path, previous: Previous, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    with held_writers() as writers, fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        state = (lambda: (run.step, run.state())) if by == "make_state" else (lambda: None)
        checkpointer.save_on_signal(state, SIGNALS, grace_s=0.2)
        send()
        run.advance()
        if by == "loop":
            checkpointer.save(1, run.state())
        assert previous.steps == [[]]
        writers.release()
    assert "SIGUSR1: the grace period is over, and the step was not saved in time" in caplog.text


def test_occasion_that_comes_too_late_saves_nothing(
    tmp_path: Path, previous: Previous, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    with fp.Checkpointer(tmp_path, optimizer=run.optimizer) as checkpointer:
        checkpointer.save_on_signal(lambda: (run.step, run.state()), SIGNALS, grace_s=0.05)
        send()
        time.sleep(0.1)
        assert previous.steps == []
        run.advance()
        assert previous.steps == [[]]
    assert "SIGUSR1: the grace period is over, and the step was not saved in time" in caplog.text


def test_process_that_never_comes_to_an_occasion_ends_by_the_signal(tmp_path: Path) -> None:
    def work(report: Report) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        checkpointer = fp.Checkpointer(tmp_path)
        checkpointer.save_on_signal(lambda: (1, {}), grace_s=0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with Child(work) as child:
        ending = child.wait()
    assert ending.signal == signal.SIGTERM, ending.message
    assert fp.Checkpointer(tmp_path).steps() == []
