"""install, uninstall, installed and routed: who gets which torch.save, when, in which thread, and for how long."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.forking import run_in_child
from support.torch_save_calls import STOCK_LOAD, STOCK_SAVE, is_ours

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using
from fastpersist.integrations import torch_save as integration
from fastpersist.integrations.torch_save import routed


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    yield
    fp.uninstall()
    assert is_stock()
    assert integration._installations == ()


def is_stock() -> bool:
    functions = (torch.save, torch.serialization.save, torch.load, torch.serialization.load)
    return functions == (STOCK_SAVE, STOCK_SAVE, STOCK_LOAD, STOCK_LOAD)


def saved_by_us(directory: Path) -> bool:
    """Save something as a program does, and tell whether it was done by us."""
    path = directory / "probe.pt"
    path.unlink(missing_ok=True)
    torch.save([1], path)
    return is_ours(path)


class SyncCounter(Filesystem):
    """Counts what makes files durable."""

    def __init__(self) -> None:
        self.count = 0

    def sync(self, fd: int, path: str) -> None:
        self.count += 1
        super().sync(fd, path)


def is_durable(directory: Path) -> bool:
    with using(counter := SyncCounter()):
        assert saved_by_us(directory)
    return counter.count > 0


# --------------------------------------------------------------------------------------------- install, uninstall


def test_install_lasts_until_uninstall(tmp_path: Path) -> None:
    assert not saved_by_us(tmp_path)
    fp.install()
    assert saved_by_us(tmp_path)
    fp.uninstall()
    assert is_stock()
    assert not saved_by_us(tmp_path)


def test_each_may_be_called_again(tmp_path: Path) -> None:
    fp.uninstall()
    fp.install()
    fp.install()
    assert saved_by_us(tmp_path)
    fp.uninstall()
    assert is_stock()
    fp.uninstall()
    fp.install()
    assert saved_by_us(tmp_path)


def test_options_of_the_latest_install_count(tmp_path: Path) -> None:
    fp.install()
    assert is_durable(tmp_path)
    fp.install(durable=False)
    assert not is_durable(tmp_path)


def test_block_ends_with_what_was_there(tmp_path: Path) -> None:
    with fp.installed():
        assert saved_by_us(tmp_path)
    assert is_stock()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_block_ends_with_what_was_there_when_it_raises(error: type[BaseException]) -> None:
    with pytest.raises(error), fp.installed():
        raise error
    assert is_stock()


def test_blocks_nest_and_the_latest_counts(tmp_path: Path) -> None:
    with fp.installed(durable=False):
        with fp.installed():
            assert is_durable(tmp_path)
            fp.install(durable=False)
            assert not is_durable(tmp_path)
            with fp.installed():
                assert is_durable(tmp_path)
            assert not is_durable(tmp_path)
            fp.uninstall()
            assert is_durable(tmp_path)
        assert not is_durable(tmp_path)
    assert is_stock()


def test_block_inside_an_installation_leaves_it_alone(tmp_path: Path) -> None:
    fp.install(durable=False)
    with fp.installed():
        pass
    assert saved_by_us(tmp_path)
    assert not is_durable(tmp_path)


def test_block_may_be_a_decorator(tmp_path: Path) -> None:
    @fp.installed()
    def work() -> bool:
        return saved_by_us(tmp_path)

    assert work()
    assert work()
    assert is_stock()


# --------------------------------------------------------------------------------------------- what it looks like


def test_functions_look_like_torchs_own() -> None:
    with fp.installed():
        assert torch.save is torch.serialization.save
        assert torch.load is torch.serialization.load
        for ours, stock in ((torch.save, STOCK_SAVE), (torch.load, STOCK_LOAD)):
            assert ours is not stock
            assert inspect.signature(ours) == inspect.signature(stock)
            assert inspect.getsource(ours) == inspect.getsource(stock)
            assert (ours.__doc__, ours.__module__, ours.__qualname__) == (
                stock.__doc__,
                stock.__module__,
                stock.__qualname__,
            )


def test_functions_are_pickled_by_name(tmp_path: Path) -> None:
    with fp.installed():
        data = pickle.dumps([torch.save, torch.load])
        assert pickle.loads(data) == [torch.save, torch.load]
        torch.save({"with": torch.save}, tmp_path / "x.pt")
    assert pickle.loads(data) == [STOCK_SAVE, STOCK_LOAD]
    assert torch.load(tmp_path / "x.pt", weights_only=False) == {"with": STOCK_SAVE}


def test_names_taken_before_keep_torchs_own(tmp_path: Path) -> None:
    save = torch.save
    with fp.installed():
        save([1], tmp_path / "x.pt")
    assert not is_ours(tmp_path / "x.pt")


def test_names_taken_inside_go_on_with_torchs_own_when_it_is_over(tmp_path: Path) -> None:
    with fp.installed():
        save, load = torch.save, torch.load
    save([1], tmp_path / "x.pt")
    assert not is_ours(tmp_path / "x.pt")
    assert load(tmp_path / "x.pt") == [1]


@pytest.mark.parametrize("is_async", [False, True])
def test_compiled_code_may_save_and_load(is_async: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "x.pt")

    @torch.compile(backend="eager")
    def step(weights: torch.Tensor) -> torch.Tensor:
        weights = weights + 1
        torch.save(weights, path)
        return weights * torch.load(path)

    with fp.installed(async_=is_async):
        assert step(torch.ones(3)).tolist() == [4, 4, 4]
        assert step(torch.zeros(3)).tolist() == [1, 1, 1]
    assert is_ours(path)


# --------------------------------------------------------------------------------------------- others who replace


def test_what_was_patched_before_us_gets_what_we_pass_on(tmp_path: Path) -> None:
    with mock.patch("torch.save") as theirs:
        with fp.installed():
            with open(tmp_path / "file", "wb") as file:
                torch.save([1], file)
            assert saved_by_us(tmp_path)
        assert torch.save is theirs
    assert theirs.call_count == 1
    assert is_stock()


def test_what_is_patched_after_us_stays_until_they_take_it_away(tmp_path: Path) -> None:
    block = fp.installed()
    with block:
        patch = mock.patch("torch.save", side_effect=torch.save)
        theirs = patch.start()
        assert saved_by_us(tmp_path)
    assert torch.save is theirs
    assert not saved_by_us(tmp_path)
    patch.stop()  # puts our wrapper back, which has nothing to do any more
    assert not saved_by_us(tmp_path)
    with fp.installed():
        assert saved_by_us(tmp_path)
    assert is_stock()


def test_our_own_functions_do_not_come_back_to_us(tmp_path: Path) -> None:
    with fp.installed():
        fp.save([1], tmp_path / "one.pt")
        (tmp_path / "two.pt").hardlink_to(tmp_path / "one.pt")
        fp.save([2], tmp_path / "one.pt")  # by stock torch.save, since a rename would split them
        assert fp.load(tmp_path / "two.pt") == [2]


# --------------------------------------------------------------------------------------------- threads, re-entrance


def test_other_threads_get_it_too(tmp_path: Path) -> None:
    found = []
    with fp.installed():
        thread = threading.Thread(target=lambda: found.append(saved_by_us(tmp_path)))
        thread.start()
        thread.join()
    assert found == [True]


def test_threads_that_save_load_and_install_do_not_disturb_each_other(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(15):
                with fp.installed(async_=turn % 2 == 0, durable=False):
                    torch.save({"number": number, "turn": torch.tensor(turn)}, tmp_path / f"{number}.pt")
                    assert torch.load(tmp_path / f"{number}.pt") == {"number": number, "turn": torch.tensor(turn)}
        except BaseException as error:  # noqa: BLE001 - the test raises it
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert is_stock()


class SavesItself:
    """Saves and loads another file while it is saved and loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        torch.save({"inside": torch.ones(3)}, self.path)
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self.loaded = torch.load(self.path)


@pytest.mark.parametrize("is_async", [False, True])
def test_objects_may_save_and_load_while_they_are_saved_and_loaded(is_async: bool, tmp_path: Path) -> None:
    with fp.installed(async_=is_async):
        torch.save([SavesItself(tmp_path / "inside.pt"), torch.zeros(2)], tmp_path / "x.pt")
        obj, zeros = torch.load(tmp_path / "x.pt", weights_only=False)
    assert torch.equal(obj.loaded["inside"], torch.ones(3))
    assert torch.equal(zeros, torch.zeros(2))
    assert is_ours(tmp_path / "inside.pt")


def test_forked_child_has_what_its_parent_had(tmp_path: Path) -> None:
    def work(report: Callable[[int], None]) -> None:
        assert saved_by_us(tmp_path)
        fp.uninstall()
        assert is_stock()

    fp.install()
    run_in_child(work)
    assert torch.load(tmp_path / "probe.pt") == [1]
    assert not is_stock()


# --------------------------------------------------------------------------------------------- routed


def test_route_is_offered_what_is_saved_to_a_path(tmp_path: Path) -> None:
    taken: list[Any] = []

    def take(obj: object, path: str) -> bool:
        taken.append((obj, path))
        return path.endswith("mine.pt")

    with routed(take):
        torch.save([1], tmp_path / "mine.pt")
        torch.save([2], tmp_path / "other.pt")
    assert taken == [([1], str(tmp_path / "mine.pt")), ([2], str(tmp_path / "other.pt"))]
    assert not (tmp_path / "mine.pt").exists()
    assert STOCK_LOAD(tmp_path / "other.pt") == [2]
    assert not is_ours(tmp_path / "other.pt")
    assert is_stock()


def test_what_a_route_declines_is_ours_where_installed(tmp_path: Path) -> None:
    with fp.installed(), routed(lambda obj, path: False):
        assert saved_by_us(tmp_path)


def test_innermost_route_is_asked_first() -> None:
    asked = []

    def route(name: str, takes: bool) -> Callable[[object, str], bool]:
        return lambda obj, path: bool(asked.append(name)) or takes

    with routed(route("outer", True)), routed(route("middle", True)), routed(route("inner", False)):
        torch.save([1], "x.pt")
    assert asked == ["inner", "middle"]


def test_route_is_for_its_thread_only(tmp_path: Path) -> None:
    found = []
    with routed(lambda obj, path: True):
        thread = threading.Thread(target=lambda: found.append(saved_by_us(tmp_path)))
        thread.start()
        thread.join()
    assert found == [False]


def test_unusual_calls_pass_by_a_route(tmp_path: Path) -> None:
    with routed(lambda obj, path: True):
        torch.save([1], tmp_path / "x.pt", _disable_byteorder_record=True)
        with torch.serialization.skip_data():
            torch.save(torch.ones(3), tmp_path / "no_data.pt")
        with open(tmp_path / "y.pt", "wb") as file:
            torch.save([2], file)
    assert (torch.load(tmp_path / "x.pt"), torch.load(tmp_path / "y.pt")) == ([1], [2])
    assert (tmp_path / "no_data.pt").exists()


def test_route_that_raises_ends_the_call(tmp_path: Path) -> None:
    def refuse(obj: object, path: str) -> bool:
        raise LookupError("on purpose")

    with pytest.raises(LookupError), routed(refuse):
        torch.save([1], tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()
    assert is_stock()
