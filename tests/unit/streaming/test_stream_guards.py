"""What must not happen: a forward that fails leaves a model that works, threads take turns, nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.forking import Report, run_in_child
from support.leaks import no_leaks
from support.streamed_models import (
    Blocks,
    budgets,
    expect_same,
    least_budget,
    loaded_whole,
    on_meta,
    save_weights,
    weights_of,
)
from torch import nn

import fastpersist as fp
from fastpersist.errors import ChecksumError, ConfigError, StorageError

pytestmark = pytest.mark.usefixtures("small_units")

IDS = torch.tensor([[1, 5, 99], [7, 5, 0]])


@pytest.fixture
def expected(path: Path) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = loaded_whole(Blocks(), path)(IDS)
    return result


@pytest.fixture
def budget(path: Path) -> int:
    return least_budget(lambda: on_meta(Blocks()), path)


def run_once(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IDS)
    return result


class Trap:
    """Raises once, in the forward of a module, or in a hook before or behind it."""

    def __init__(self, module: nn.Module, where: str, error: type[BaseException]) -> None:
        self.armed = False
        self._error = error
        if where == "forward":
            inside = module.forward
            module.forward = lambda *args, **named: self.spring(inside(*args, **named))
        elif where == "before":
            module.register_forward_pre_hook(lambda module, arguments: self.spring(None))
        else:
            module.register_forward_hook(lambda module, arguments, output: self.spring(None))

    def spring(self, result: Any) -> Any:
        if self.armed:
            self.armed = False
            raise self._error("sprung")
        return result


# ------------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["before", "forward", "behind"])
@pytest.mark.parametrize("name", ["", "blocks.2", "blocks.2.1", "embed", "head"])
@pytest.mark.parametrize("early", [False, True], ids=["hooks behind ours", "hooks before ours"])
def test_after_an_exception_the_next_call_works(
    name: str, where: str, error: type[BaseException], early: bool, path: Path, expected: torch.Tensor, budget: int
) -> None:
    model = on_meta(Blocks())
    trap = Trap(model.get_submodule(name), where, error) if early else None
    with fp.stream(model, path, budget_bytes=budget) as stream:
        trap = trap or Trap(model.get_submodule(name), where, error)
        for _ in range(3):
            trap.armed = True
            with pytest.raises(error, match="sprung"):
                run_once(model)
            expect_same(run_once(model), expected)
            expect_same(run_once(model), expected)
        assert stream.stats().outside_count == 0


@pytest.mark.parametrize("name", ["blocks.2", "blocks.2.1", ""])
def test_after_ctrl_c_another_thread_works_too(name: str, path: Path, expected: torch.Tensor, budget: int) -> None:
    model = on_meta(Blocks())
    with fp.stream(model, path, budget_bytes=budget), ThreadPoolExecutor(1) as pool:
        trap = Trap(model.get_submodule(name), "forward", KeyboardInterrupt)
        trap.armed = True
        with pytest.raises(KeyboardInterrupt):
            run_once(model)
        expect_same(pool.submit(run_once, model).result(60), expected)
        expect_same(run_once(model), expected)


def interrupt(
    model: nn.Module,
    moment: int,
    run: Callable[[nn.Module], object] = run_once,
    inside: str = "/fastpersist/streaming/",
) -> int:
    """Run a model, with Ctrl-C at one of the moments at which Python looks for signals in the stream's own code.

    Args:
        model: The model.
        moment: The number of the moment; 0 for none.
        run: The function that runs the model.
        inside: The functions in which moments count, as a regular expression that is searched in "path:name".

    Returns:
        How many such moments there were.
    """
    count = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        # At these moments Python itself skips with statements: in 3.10 those of a generator that goes on, if a profile
        # function raises the error, and in 3.14 one whose __enter__ has just returned (python/cpython#148874).
        goes_on = event == "call" and sys.version_info < (3, 11) and frame.f_lasti >= 0
        has_entered = sys.version_info >= (3, 14) and getattr(argument, "__name__", "") == "__enter__"
        if goes_on or has_entered:
            return
        code = frame.f_code
        if event in ("call", "c_return") and re.search(inside, f"{code.co_filename}:{code.co_name}"):
            count += 1
            if count == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        sys.setprofile(look)
        try:
            run(model)
        finally:
            sys.setprofile(None)
    return count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C where a generator is closed
def test_wherever_ctrl_c_comes_the_next_call_works(tmp_path: Path) -> None:
    path = save_weights(Blocks(4), tmp_path / "model.safetensors")
    model = on_meta(Blocks(4))
    with fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Blocks(4)), path)) as stream:
        assert stream.stats().streamed_bytes
        expected = run_once(model)
        count = interrupt(model, 0)
        assert count > 100
        for moment in range(1, count + 1, 29):
            interrupt(model, moment)
            expect_same(run_once(model), expected)


def test_wherever_ctrl_c_comes_the_hooks_of_the_caller_are_as_they_were(tmp_path: Path) -> None:
    path = save_weights(Blocks(1), tmp_path / "model.safetensors")
    model = on_meta(Blocks(1))
    kept: list[torch.Tensor] = []
    places = r"/streaming/.*:(_enter|_finish_last|enter|leave)$|/torch/autograd/graph.py:__(enter|exit)__$"

    def run(model: nn.Module) -> None:
        model(IDS)

    with (
        fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Blocks(1)), path)),
        torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each),
    ):
        run(model)
        count = interrupt(model, 0, run, places)
        assert count > 20
        for moment in range(1, count + 1):
            interrupt(model, moment, run, places)
            kept.clear()
            torch.ones(2, requires_grad=True).square()
            assert len(kept) == 1, moment


def test_after_ctrl_c_a_part_of_the_unit_computes_with_its_own_weights(tmp_path: Path) -> None:
    """The part is no unit, so no hook runs before it looks at its weight; what it calls then fills the ring anew."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))
            self.others: list[nn.Module] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            transposed = self.weight.t()
            for other in self.others:
                x = torch.tanh(other(x))
            return x @ transposed

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
            self.unit = nn.Sequential(Part(), nn.Tanh())
            self.unit[0].others = list(self.layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.unit(x)
            return result

    whole, model, x = Whole(), on_meta(Whole()), torch.randn(3, 32)
    path = save_weights(whole, tmp_path / "model.safetensors")
    loaded_whole(whole, path)
    budget = least_budget(lambda: on_meta(Whole()), path)
    with torch.inference_mode(), fp.stream(model, path, budget_bytes=budget):
        trap = Trap(model.unit[1], "forward", KeyboardInterrupt)
        for _ in range(3):
            trap.armed = True
            with pytest.raises(KeyboardInterrupt):
                model(x)
            assert all("on disk" in repr(each) for each in model.parameters())
            expect_same(model.unit[0](x), whole.unit[0](x))


@pytest.mark.parametrize("extra_bytes", [0, 30_000], ids=["all streamed", "some resident"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_compiled_code_calls_units_and_may_be_interrupted(
    error: type[BaseException], extra_bytes: int, path: Path, budget: int
) -> None:
    whole = loaded_whole(Blocks(), path)
    model = on_meta(Blocks())
    x = torch.randn(2, 48)
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        fp.stream(model, path, budget_bytes=budget + extra_bytes),
    ):
        warnings.filterwarnings("error", "Dynamo does not know how to trace")
        trap = Trap(model.blocks[2][1], "forward", error)
        run = torch.compile(lambda x: model.blocks[2](torch.tanh(model.blocks[1](x))), backend="eager")
        for _ in range(3):
            trap.armed = True
            with pytest.raises(error, match="sprung"):
                run(x)
            assert extra_bytes or all("on disk" in repr(each) for each in model.parameters())
            expect_same(run(x), whole.blocks[2](torch.tanh(whole.blocks[1](x))))


def test_compiled_code_reads_rows_of_an_embedding_whose_weight_stays_on_disk(
    path: Path, expected: torch.Tensor, budget: int
) -> None:
    model = on_meta(Blocks())
    with torch.no_grad(), fp.stream(model, path, budget_bytes=budget) as stream:
        run = torch.compile(lambda ids: model.embed(ids) + model.blocks[0][1].bias, backend="eager")
        whole = loaded_whole(Blocks(), path)
        for _ in range(2):
            expect_same(run(IDS), whole.embed(IDS) + whole.blocks[0][1].bias)
        assert stream.stats().on_demand_count  # the bias; of the embedding only rows were read
        expect_same(model(IDS), expected)


def test_an_exception_that_a_module_catches_takes_nothing_away_from_it(tmp_path: Path) -> None:
    class Falls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.other: list[nn.Module] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            transposed = self.weight.t()
            for other in self.other:
                for _ in range(3):
                    try:
                        other(x[..., :-1])
                    except RuntimeError:
                        x = x + 1
                    try:
                        other(None)
                    except (TypeError, KeyboardInterrupt):
                        x = x + other(x)
            return x @ transposed

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.falls = Falls()
            self.falls.other = [self.layers[1]]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            result: torch.Tensor = self.falls(x)
            return result

    whole, model, x = Calls(), on_meta(Calls()), torch.randn(3, 64)
    path = save_weights(whole, tmp_path / "model.safetensors")
    loaded_whole(whole, path)
    with (
        torch.no_grad(),
        fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Calls()), path)) as stream,
    ):
        for _ in range(3):
            expect_same(model(x), whole(x))
        assert stream.stats().outside_count == 0


# ---------------------------------------------------------------------------------------------------------- threads


def test_threads_take_turns(path: Path, expected: torch.Tensor) -> None:
    for budget in budgets(lambda: on_meta(Blocks()), path, count=3):
        model = on_meta(Blocks())
        with fp.stream(model, path, budget_bytes=budget) as stream, ThreadPoolExecutor(3) as pool:
            for future in [pool.submit(run_once, model) for _ in range(40)]:
                expect_same(future.result(60), expected)
            assert stream.stats().pass_count == 40


def test_threads_take_turns_with_weights_that_are_used_elsewhere(tmp_path: Path) -> None:
    whole, model = Blocks(24, words=400, tied=True), on_meta(Blocks(24, words=400, tied=True))
    path = save_weights(whole, tmp_path / "model.safetensors")
    expected, total = run_once(loaded_whole(whole, path)), whole.head.weight.sum()

    def look() -> torch.Tensor:
        with torch.inference_mode():
            return model.head.weight.sum() + model.embed.weight.sum() - model.blocks[1][1].weight.t().sum()

    total = 2 * total - whole.blocks[1][1].weight.t().sum()
    budget = least_budget(lambda: on_meta(Blocks(24, words=400, tied=True)), path)
    with fp.stream(model, path, budget_bytes=budget), ThreadPoolExecutor(3) as pool:
        for number, future in enumerate([pool.submit((run_once, look)[n % 2], *[model][n % 2 :]) for n in range(60)]):
            if number % 2:
                assert torch.allclose(future.result(60), total)
            else:
                expect_same(future.result(60), expected)


def blocked_in(model: nn.Module, name: str) -> tuple[threading.Event, threading.Event]:
    """Let the next forward of a module, in its middle, say so, and wait; returns both events."""
    inside, may_go_on = threading.Event(), threading.Event()
    module = model.get_submodule(name)
    forward = module.forward

    def stop(*arguments: Any) -> Any:
        module.__dict__.pop("forward")
        result = forward(*arguments)
        inside.set()
        assert may_go_on.wait(60)
        return result

    module.__dict__["forward"] = stop
    return inside, may_go_on


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whatever it was, the test looks at it
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def expect_waiting(future: Future[Any]) -> None:
    """Fail if something is done at once that has to wait."""
    wait([future], 0.2)
    assert not future.done()


class Functional(nn.Module):
    """It has no weights of its own, and uses those of its children outside of their forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        self.pause: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor, again: int = 0) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        pause, self.pause = self.pause, lambda: None
        pause()
        if again:
            x = self(x, again - 1)
        for layer in self.layers:
            x = torch.tanh(nn.functional.linear(x, layer.weight.t()))
        return x


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("again", [0, 2])
def test_a_thread_waits_until_the_call_of_the_model_ends(
    again: int, error: type[BaseException] | None, tmp_path: Path
) -> None:
    """Also between the forwards of units: the model uses their weights there."""
    path = save_weights(Functional(), tmp_path / "model.safetensors")
    model, whole, x = on_meta(Functional()), loaded_whole(Functional(), path), torch.randn(3, 64)
    inside, may_go_on = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert may_go_on.wait(60)
        if error:
            raise error("sprung")

    with fp.stream(model, path, budget_bytes=least_budget(lambda: on_meta(Functional()), path)):
        model.pause = pause
        first = in_thread(lambda: model(x, again).detach())
        assert inside.wait(60)
        others = [in_thread(lambda: model(x, again).detach()) for _ in range(2)]
        for other in others:
            expect_waiting(other)
        may_go_on.set()
        expected = whole(x, again).detach()
        if error:
            with pytest.raises(error, match="sprung"):
                first.result(60)
        else:
            expect_same(first.result(60), expected)
        for other in others:
            expect_same(other.result(60), expected)


def test_close_waits_for_the_module_that_runs_and_ends_the_forward_at_the_next(
    path: Path, expected: torch.Tensor, budget: int
) -> None:
    model = on_meta(Blocks())
    stream = fp.stream(model, path, budget_bytes=budget)
    inside, may_go_on = blocked_in(model, "blocks.3.1")
    forward = in_thread(lambda: run_once(model))
    assert inside.wait(60)
    closing = in_thread(stream.close)
    expect_waiting(closing)
    may_go_on.set()
    closing.result(60)
    with pytest.raises(ConfigError, match="is closed"):
        forward.result(60)
    with fp.stream(model, path, budget_bytes=budget):
        expect_same(run_once(model), expected)


def test_close_inside_of_a_forward_ends_it(path: Path, expected: torch.Tensor, budget: int) -> None:
    model = on_meta(Blocks())
    stream = fp.stream(model, path, budget_bytes=budget)
    handle = model.blocks[2][1].register_forward_hook(lambda *arguments: stream.close())
    with pytest.raises(ConfigError, match="is closed"):
        run_once(model)
    handle.remove()
    with fp.stream(model, path, budget_bytes=budget):
        expect_same(run_once(model), expected)


def test_rows_of_a_tied_embedding_wait_for_the_head(tmp_path: Path) -> None:
    """The embedding would use the head's memory, which goes when the head is done."""

    def build() -> nn.Module:
        return on_meta(Blocks(24, words=400, tied=True))

    path = save_weights(Blocks(24, words=400, tied=True), tmp_path / "model.safetensors")
    model, whole = build(), loaded_whole(Blocks(24, words=400, tied=True), path)
    with fp.stream(model, path, budget_bytes=least_budget(build, path)):
        inside, may_go_on = blocked_in(model, "head")
        forward = in_thread(lambda: run_once(model))
        assert inside.wait(60)
        embedding = in_thread(lambda: model.embed(IDS))
        expect_waiting(embedding)
        may_go_on.set()
        expect_same(embedding.result(60), whole.embed(IDS).detach())
        expect_same(forward.result(60), run_once(whole))


# ------------------------------------------------------------------------------------------------------------ forks


def test_a_forked_child_is_refused_and_the_parent_goes_on(path: Path, expected: torch.Tensor, budget: int) -> None:
    model = on_meta(Blocks())
    with fp.stream(model, path, budget_bytes=budget) as stream:
        expect_same(run_once(model), expected)

        def child(report: Report) -> None:
            for use in (
                lambda: run_once(model),
                lambda: model.head.weight.sum(),
                lambda: model.embed(IDS),
            ):
                with pytest.raises(ConfigError, match="the process that forked this one"):
                    use()
            assert "on disk" in repr(model.head.weight)
            stream.close()
            with fp.stream(model, path, budget_bytes=budget):
                expect_same(run_once(model), expected)

        run_in_child(child)
        expect_same(run_once(model), expected)
        run_in_child(lambda report: stream.close())
        expect_same(run_once(model), expected)


# --------------------------------------------------------------------------------------------- files that are changed


def test_a_file_that_is_replaced_goes_on_being_read(path: Path, expected: torch.Tensor, budget: int) -> None:
    model = on_meta(Blocks())
    with fp.stream(model, path, budget_bytes=budget):
        expect_same(run_once(model), expected)
        other = save_weights(Blocks(), path.with_name("other.safetensors"))
        other.rename(path)
        expect_same(run_once(model), expected)
        path.unlink()
        expect_same(run_once(model), expected)


@pytest.mark.parametrize("how", ["touched", "shorter", "longer"])
def test_a_file_that_is_changed_in_place_is_an_error(how: str, path: Path, budget: int) -> None:
    model = on_meta(Blocks())
    with no_leaks(), fp.stream(model, path, budget_bytes=budget):
        run_once(model)
        if how == "touched":
            with path.open("r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(b"changed")
            os.utime(path, ns=(1, 1))  # the clock of the file system may be too coarse to tell
        else:
            os.truncate(path, path.stat().st_size + (100 if how == "longer" else -100))
        for use in (
            lambda: run_once(model),
            lambda: run_once(model),
            lambda: model.head.weight.sum(),
            lambda: model.embed(IDS),
        ):
            with pytest.raises(StorageError, match=r"model\.safetensors was changed in place.*stream the model anew"):
                use()


def test_a_file_that_is_changed_between_the_read_and_its_use_is_an_error(path: Path, budget: int) -> None:
    """What was read ahead may have been read before the change or after it."""
    model = on_meta(Blocks())
    with fp.stream(model, path, budget_bytes=budget):
        run_once(model)  # its last hook starts to read the first block
        os.utime(path, ns=(1, 1))
        with pytest.raises(StorageError, match="was changed in place"):
            model.blocks[0](torch.ones(1, 48))


def test_damaged_bytes_are_found_at_the_first_read_and_nothing_is_bound(tmp_path: Path, budget: int) -> None:
    path = tmp_path / "model.safetensors"
    whole = Blocks()
    fp.save(weights_of(whole), path)
    with torch.inference_mode():
        expected = whole(IDS)
    model = on_meta(Blocks())
    with fp.stream(model, path, budget_bytes=budget, verify=True) as stream:
        expect_same(run_once(model), expected)
        assert stream.stats().on_demand_count == 0
    data = bytearray(path.read_bytes())
    needle = bytes(whole.blocks[3][1].weight.detach().view(torch.uint8).numpy())[:64]
    data[data.index(needle) + 3] ^= 1
    path.write_bytes(data)
    with fp.stream(model, path, budget_bytes=budget, verify=True):
        for use in (lambda: run_once(model), lambda: run_once(model), lambda: model.blocks[3][1].weight.sum()):
            with pytest.raises(ChecksumError, match=r"blocks\.3\.1\.weight") as caught:
                use()
            assert caught.value.path == str(path)
            assert all("on disk" in repr(each) for each in model.blocks.parameters())
    with fp.stream(model, path, budget_bytes=budget):
        assert not torch.equal(run_once(model), expected)


# ------------------------------------------------------------------------------------------------- nothing is left


@pytest.fixture
def no_garbage() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


@pytest.mark.parametrize("passes", [0, 2])
def test_a_model_that_is_dropped_takes_its_stream_along(passes: int, path: Path, budget: int, no_garbage: None) -> None:
    with no_leaks(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = on_meta(Blocks())
        stream = fp.stream(model, path, budget_bytes=budget)
        for _ in range(passes):
            run_once(model)
        gone = weakref.ref(stream)
        del model, stream
        gc.collect()
        assert gone() is None


def test_a_stream_that_is_dropped_stays_with_its_model(path: Path, expected: torch.Tensor, budget: int) -> None:
    model = on_meta(Blocks())
    fp.stream(model, path, budget_bytes=budget)
    gc.collect()
    expect_same(run_once(model), expected)


@pytest.mark.parametrize("size", ["least", "10MiB"])
def test_close_gives_everything_back(size: str, path: Path, budget: int) -> None:
    with no_leaks():
        model = on_meta(Blocks())
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), set(m.__dict__)) for m in model.modules()]
        stream = fp.stream(model, path, budget_bytes=budget if size == "least" else size)
        run_once(model)
        mapped = [weakref.ref(memory) for memory in _memory_of(stream)]
        assert mapped
        stream.close()
        gc.collect()
        assert not [each() for each in mapped if each() is not None]
        after = [(len(m._forward_hooks), len(m._forward_pre_hooks), set(m.__dict__)) for m in model.modules()]
        assert after == hooks


def _memory_of(stream: fp.WeightStream) -> Iterator[torch.UntypedStorage | torch.Tensor]:
    if stream._prefetch._memory._ring_memory is not None:
        yield stream._prefetch._memory._ring_memory
    for filling in stream._prefetch._fillings.values():
        yield from filling.memory


def test_ctrl_c_and_close_leave_no_hooks_of_autograd_behind(path: Path, budget: int) -> None:
    def expect_no_hooks() -> None:
        x = torch.ones(3, requires_grad=True)
        saved: Any = (x * x).grad_fn
        saved._raw_saved_self.register_hooks(lambda kept: kept, lambda kept: kept)  # refused where there are others

    model = on_meta(Blocks())
    stream = fp.stream(model, path, budget_bytes=budget)
    trap = Trap(model.blocks[2][1], "forward", KeyboardInterrupt)
    for end in (lambda: model(IDS), stream.close):
        trap.armed = True
        with pytest.raises(KeyboardInterrupt):
            model(IDS)
        end()
        expect_no_hooks()
