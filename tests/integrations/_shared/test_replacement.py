"""`Replacement`: functions of others are wrapped while it is held, and afterwards are what they were."""

from __future__ import annotations

import inspect
import pickle
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support.forking import run_in_child

from fastpersist.integrations._shared.replacement import Function, Replacement


def speak(word: str = "stock") -> str:
    """Say a word."""
    return word


def wrap(before: Function) -> Function:
    def wrapper(word: str = "stock") -> Any:
        return f"[{before(word)}]"

    return wrapper


@pytest.fixture
def module() -> Iterator[Any]:
    module = ModuleType("a_package_of_somebody_else")
    module.speak = module.speak_too = speak  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture
def replacement(module: Any) -> Replacement:
    return Replacement(lambda: [(module, "speak"), (module, "speak_too")], wrap)


def test_functions_are_wrapped_while_held(module: Any, replacement: Replacement) -> None:
    replacement.hold()
    assert (module.speak("a"), module.speak_too("b")) == ("[a]", "[b]")
    replacement.release()
    assert module.speak is module.speak_too is speak


def test_the_last_of_several_holders_puts_back_what_was_there(module: Any, replacement: Replacement) -> None:
    replacement.hold()
    replacement.hold()
    replacement.release()
    assert module.speak() == "[stock]"
    replacement.release()
    assert module.speak is speak


def test_names_of_one_function_get_one_wrapper(module: Any, replacement: Replacement) -> None:
    replacement.hold()
    assert module.speak is module.speak_too
    replacement.release()


def test_wrapper_looks_like_the_function(module: Any, replacement: Replacement) -> None:
    replacement.hold()
    assert (module.speak.__name__, module.speak.__doc__) == ("speak", "Say a word.")
    assert inspect.signature(module.speak) == inspect.signature(speak)
    replacement.release()


def test_wrapper_is_pickled_by_the_name_of_the_function(module: Any, replacement: Replacement) -> None:
    def named(word: str) -> str:
        return word

    named.__module__, named.__qualname__ = module.__name__, "speak"
    module.speak = named
    replacement.hold()
    data = pickle.dumps(module.speak)
    assert pickle.loads(data) is module.speak
    replacement.release()
    assert pickle.loads(data) is named


def test_what_was_replaced_before_us_is_passed_on_to_and_put_back(module: Any, replacement: Replacement) -> None:
    def theirs(word: str) -> str:
        return f"theirs {word}"

    module.speak = theirs
    replacement.hold()
    assert (module.speak("a"), module.speak_too("a")) == ("[theirs a]", "[a]")
    replacement.release()
    assert module.speak is theirs


def test_what_replaces_us_stays(module: Any, replacement: Replacement) -> None:
    replacement.hold()
    ours = module.speak

    def theirs(word: str) -> Any:
        return f"theirs {ours(word)}"

    module.speak = theirs
    replacement.release()
    assert module.speak is theirs
    assert module.speak_too is speak


def test_what_replaces_us_is_not_wrapped_by_a_further_holder(module: Any, replacement: Replacement) -> None:
    replacement.hold()
    ours, module.speak = module.speak, lambda: "theirs"
    replacement.hold()
    assert module.speak() == "theirs"
    module.speak = ours
    replacement.release()
    replacement.release()
    assert module.speak is speak


def test_wrapper_that_comes_back_after_our_end_is_not_wrapped_again(module: Any, replacement: Replacement) -> None:
    replacement.hold()
    ours, module.speak = module.speak, speak  # somebody replaces us for a while …
    replacement.release()
    module.speak = ours  # … and puts back what was there
    replacement.hold()
    assert module.speak("a") == "[a]"
    replacement.release()
    assert module.speak is speak


def test_names_that_vanish_meanwhile_are_left_alone(module: Any, replacement: Replacement) -> None:
    replacement.hold()
    del module.speak
    replacement.release()
    assert not hasattr(module, "speak")
    assert module.speak_too is speak


def test_places_are_looked_for_each_time_somebody_comes(module: Any) -> None:
    places: list[tuple[ModuleType, str]] = []
    replacement = Replacement(lambda: places, wrap)
    replacement.hold()
    assert module.speak is speak
    replacement.release()
    places.append((module, "speak"))
    replacement.hold()
    assert module.speak() == "[stock]"
    replacement.release()


def test_threads_that_come_and_go_leave_nothing_behind(module: Any, replacement: Replacement) -> None:
    wrong: list[str] = []

    def work() -> None:
        for _ in range(300):
            replacement.hold()
            if module.speak("a") != "[a]":
                wrong.append(module.speak("a"))
            replacement.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert module.speak is module.speak_too is speak


def test_forked_child_does_not_wait_for_a_thread_that_stayed_behind(module: Any) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow_places() -> Iterator[tuple[ModuleType, str]]:
        if not inside.is_set():
            inside.set()
            leave.wait()
        yield module, "speak"

    replacement = Replacement(slow_places, wrap)
    thread = threading.Thread(target=replacement.hold)
    thread.start()
    inside.wait()
    try:
        run_in_child(lambda report: replacement.hold())
    finally:
        leave.set()
        thread.join()
        replacement.release()
