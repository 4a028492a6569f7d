"""Runs a model whose weights stay on disk: `fastpersist.stream`, its hooks, and its statistics.

The hook before a unit's forward waits for the unit's bytes and binds its weights; the hook after it unbinds them, gives
their place back, and has the next units read. The other modules of this package do the single tasks.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from fastpersist.arguments import byte_count, local_path
from fastpersist.errors import ConfigError, StorageError, UnsupportedError
from fastpersist.streaming.backward import BackwardReads, SavedTensorHooks
from fastpersist.streaming.binding import bind, is_bound, is_changed, keep, plainly, unbind
from fastpersist.streaming.guards import put_guards, take_guards_away
from fastpersist.streaming.matching import Names, match, put_in_place
from fastpersist.streaming.prefetch import Prefetch
from fastpersist.streaming.reading import (
    Filling,
    check_values,
    has_rows,
    new_memory,
    read_rows,
    start_filling,
    values_in,
)
from fastpersist.streaming.residency import Residency, choose_residents
from fastpersist.streaming.source import WeightSource
from fastpersist.streaming.units import ROUTING_ARGUMENT, Block, Unit, Weight, blocks_of, cut, expert_count_of
from fastpersist.transfer.arena import available_bytes_per_rank
from fastpersist.transfer.engine_selection import require_engine
from fastpersist.transfer.torch_boundary import untraced

__all__ = ["StreamStats", "WeightStream", "stream"]

_log = logging.getLogger("fastpersist")

_SMALL_BYTES = 1 << 20  # buffers below it are in memory, and embeddings below it are read whole
_STATISTICS = ("running_mean", "running_var")  # in memory, too: batch_norm changes them, and torch does not count it
_UNIT_BYTES_MIN = 8 << 20
_UNIT_BYTES_MAX = 64 << 20  # the first pass computes one unit while it reads the next ones
_RANKED_PASS = 7  # by then an encoder was used less often than a decoder


@dataclass(frozen=True, slots=True)
class StreamStats:
    """What a stream has done so far.

    Attributes:
        budget_bytes: Bytes that ring and residents may have together.
        ring_bytes: Bytes of the ring; 0 if all weights stay in memory.
        resident_bytes: Memory of the units that stay.
        streamed_bytes: Bytes that a pass reads from the disk, without the rows of embeddings.
        weight_bytes: Bytes of all weights in the source that the model has.
        unit_count: The number of units.
        resident_unit_count: The number of units that stay in memory.
        pass_count: Forwards of the whole model that have begun.
        read_count: Units that were read.
        read_bytes: Bytes that were read, rows of embeddings included.
        stall_s: Seconds for which forwards have waited for the disk.
        on_demand_count: Weights that were read when they were used outside of their unit.
        wrong_guess_count: Units that were not being read yet when they were needed.
        outside_count: Units for which the ring had no room, so that they had memory of their own for a while.
        engine: The engine that reads.
    """

    budget_bytes: int
    ring_bytes: int
    resident_bytes: int
    streamed_bytes: int
    weight_bytes: int
    unit_count: int
    resident_unit_count: int
    pass_count: int
    read_count: int
    read_bytes: int
    stall_s: float
    on_demand_count: int
    wrong_guess_count: int
    outside_count: int
    engine: str


def stream(
    model: torch.nn.Module,
    source: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    budget_bytes: int | str = "auto",
    dtype: torch.dtype | str | None = None,
    prefix: str = "",
    names: Names | None = None,
    verify: bool = False,
    engine: str = "auto",
) -> WeightStream:
    """Run a model with its weights on disk: each is read shortly before it is used, and none is ever written.

    The logits are those of the model loaded whole (mapped from the same file), bit for bit. The parameters stay the
    same objects; between the forwards of their modules they have no values, and whoever uses one then waits for the
    disk.

    Args:
        model: Any module, on the meta device or a real one; memory of its parameters is given back. It may be used at
            once. Buffers that no file has must have been computed.
        source: A directory of safetensors (with an index, or all files in it), a safetensors file, a file of
            torch.save, or the directory of a step of a Checkpointer. It is read in place.
        device: Where the model runs: "cpu", or a CUDA device such as "cuda:0". Buffers that no file has move there.
        budget_bytes: Memory for weights: those that stay, and the ring for the others. A number, a text such as
            "4GiB", or "auto": 60 % of a device's free memory, or of this rank's share of what the machine has left.
        dtype: None: the dtypes of source and model must be the same. "auto": the source's. "model": that of each
            parameter. A floating-point dtype: all floating-point weights get it. Conversions are of floating-point
            weights only, each time that they are read.
        prefix: Text in front of the model's names in the source, such as "model." for a checkpoint {"model": …}.
        names: Other names in the source, by name of the model; a sequence of names for a parameter whose bytes are
            those tensors, end to end. Without the prefix.
        verify: Compare the recorded checksum of each weight when it is read for the first time. Not of rows of
            embeddings, since a checksum is of the whole weight. What a backward pass reads was compared by its forward.
        engine: "auto", or an engine's name, as in `load`.

    Returns:
        The stream; a context manager. `close()` ends it, and leaves a model without values.

    Raises:
        ConfigError: Model and source do not fit (all that is wrong is listed, and nothing has changed), or the budget
            is too small (the message says what is needed).
        UnsupportedError: A format or a kind of parameter that cannot be streamed; the message says what to do.
        CheckpointNotFoundError, FormatError, StorageError: The source cannot be read.

    Thread safety: any thread may call the model, or modules that are units; one call at a time runs. A weight that is
    used outside of such a call needs a lock of yours while other threads call.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model is a torch.nn.Module, not a {type(model).__name__}")
    place = _device_of(device)
    if dtype not in (None, "auto", "model") and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f'dtype is None, "auto", "model", or a floating-point torch.dtype, not {dtype!r}')
    path = local_path(source, "source")
    require_engine(engine)
    if budget_bytes == "auto":
        free_bytes = available_bytes_per_rank() if place.type == "cpu" else torch.cuda.mem_get_info(place)[0]
        budget = free_bytes * 3 // 5
    else:
        budget = byte_count(budget_bytes, "budget_bytes", auto_allowed=True)
    opened = WeightSource(path, engine=engine)
    try:
        made = WeightStream(opened, budget, place, verify=verify)
        made._begin(model, match(model, opened, made, prefix=prefix, names=names or {}, dtype=dtype, device=place))
    except BaseException:
        opened.close()
        raise
    if budget_bytes != "auto":
        made._tell_of_room()
    return made


class _Entered(NamedTuple):
    """A unit whose forward runs, and what autograd was told for that time."""

    unit: Unit
    saving: SavedTensorHooks


class WeightStream:
    """The weights of a model, on their way from the disk. `stream` makes it.

    Thread safety: any thread.
    """

    def __init__(self, source: WeightSource, budget_bytes: int, device: torch.device, *, verify: bool) -> None:
        self._source = source
        weakref.finalize(self, source.close)  # if a model is dropped with its stream, no code closes the stream
        self._device = device
        self._budget_bytes = budget_bytes
        self._verify = verify
        self._process_id = os.getpid()
        self._closed = False
        self._closing = False
        self._weights: list[Weight] = []
        self._units: list[Unit] = []
        self._prefetch = Prefetch(source, (), Residency(frozenset(), 0, 0), device)
        self._backward = BackwardReads(source, (), frozenset(), device)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._model: torch.nn.Module | None = None
        self._bound: dict[int, list[Weight]] = {}  # by unit
        self._stack: list[_Entered] = []  # units whose forward runs, the innermost last
        self._entered: set[int] = set()
        self._entered_since: set[int] = set()  # the last choice of residents
        self._on_demand: list[Weight] = []
        self._joining: dict[tuple[Weight, Unit], bool] = {}  # whether that is still to be decided
        self._is_ranked = False
        self._checked: set[int] = set()  # ids of weights whose checksum was compared
        self._changed: list[str] = []  # parameters whose change by a forward was lost
        self._turn = threading.Condition()
        self._holder: int | None = None  # the thread whose turn it is
        self._call_depth = 0  # inside how many calls of the model and of units it is
        self._chosen = Residency(frozenset(), 0, 0)
        self._pass_count = self._on_demand_count = self._on_demand_bytes = 0
        self._stall_s = 0.0

    # --- for the user

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def stats(self) -> StreamStats:
        """Return what it has done so far."""
        prefetch = self._prefetch
        streamed = [unit for unit in self._units if unit.number not in prefetch.residents]
        return StreamStats(
            budget_bytes=self._budget_bytes,
            ring_bytes=self._chosen.ring_bytes,
            resident_bytes=self._chosen.resident_bytes,
            streamed_bytes=sum(each.size_bytes for unit in streamed for block in unit.blocks for each in block.ranges),
            weight_bytes=sum(weight.file_bytes for weight in self._weights),
            unit_count=len(self._units),
            resident_unit_count=len(prefetch.residents),
            pass_count=self._pass_count,
            read_count=prefetch.read_count,
            read_bytes=prefetch.read_bytes + self._on_demand_bytes + self._backward.read_bytes,
            stall_s=self._stall_s,
            on_demand_count=self._on_demand_count,
            wrong_guess_count=prefetch.wrong_guess_count,
            outside_count=prefetch.outside_count,
            engine=self._source.engine,
        )

    def close(self) -> None:
        """Wait for a forward of another thread and for reads, give the memory back, and leave the model without values.

        Closing again is fine.
        """
        if self._closed:
            return
        if os.getpid() != self._process_id:  # this process has neither the threads nor the reads of the other one
            self._end()
            return
        self._closing = True  # or forwards of other threads would take turn after turn
        self._take_turn()
        if not self._closed:
            while self._stack:  # it is called inside of a forward
                self._finish_last()
            self._prefetch.land()
            self._backward.forget()
            self._end()
        self._end_turn()

    def _end(self) -> None:
        self._closed = True
        for handle in self._hooks:
            handle.remove()
        for unit in self._units:
            unit.module.__dict__.pop("_call_impl", None)
        if self._model is not None:
            self._model.__dict__.pop("_call_impl", None)
            take_guards_away(self._model)
        for weight in self._weights:
            if is_bound(weight) and weight.name not in self._small:
                unbind(weight)
        self._bound.clear()
        self._stack.clear()
        self._on_demand.clear()
        self._source.close()

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<WeightStream of {self._source.path!r}{' closed' if self._closed else ''}>"

    # --- beginning

    def _begin(self, model: torch.nn.Module, weights: Sequence[Weight]) -> None:
        """Choose units, residents and ring, and put the hooks in their places."""
        self._weights = list(weights)
        buffers = [each for each in weights if each.bound_class is torch.Tensor]
        small = [each for each in buffers if each.file_bytes < _SMALL_BYTES or each.places[0][1] in _STATISTICS]
        self._small = {weight.name for weight in small}
        of_units = {id(each.found): each for each in weights if each.name not in self._small}
        limit_bytes = min(max(_UNIT_BYTES_MIN, self._budget_bytes // 16), _UNIT_BYTES_MAX)
        units, chosen = self._choose(model, of_units, limit_bytes)
        if chosen.missing_bytes:  # large units may be what is too much
            units, chosen = self._choose(model, of_units, _UNIT_BYTES_MIN)
        if chosen.missing_bytes:
            largest = sorted(units, key=lambda unit: unit.size_bytes * (not unit.must_stay), reverse=True)[:2]
            named = " and ".join(f"{unit.name or 'the model'} with {unit.size_bytes}" for unit in largest)
            kept_bytes = sum(unit.size_bytes for unit in units if unit.must_stay)
            raise ConfigError(
                f"budget_bytes is {self._budget_bytes}; this model needs at least "
                f"{self._budget_bytes + chosen.missing_bytes} for its two largest units ({named}), the largest piece "
                f"of a unit once more, and what must stay in memory ({kept_bytes})"
            )
        values_of_small = self._read_small(small)
        # From here on nothing fails, and the model changes.
        self._model = model
        self._units = units
        self._prefetch = Prefetch(self._source, units, chosen, self._device)
        self._backward = BackwardReads(self._source, units, chosen.residents, self._device)
        self._chosen = chosen
        put_in_place(weights)
        if self._device.type != "cpu":
            self._move_buffers(model)
        for weight in weights:
            if weight.name in self._small:
                bind(weight, values_of_small[weight.name])
            else:
                unbind(weight)
        self._put_hooks(model)
        with suppress(StorageError):  # whoever needs the unit meets it again
            self._prefetch.read_ahead()
        _log.info(
            "streaming %s: %d units, %d of them resident (%d MB), a ring of %d MB, %d MB of weights",
            self._source.path,
            len(units),
            len(chosen.residents),
            self._chosen.resident_bytes // 1_000_000,
            self._chosen.ring_bytes // 1_000_000,
            sum(weight.file_bytes for weight in weights) // 1_000_000,
        )

    def _blocks_of(self, weights: Iterable[Weight]) -> list[Block]:
        return blocks_of(weights, self._source.file_sizes, apart=self._device.type != "cpu")

    def _choose(
        self, model: torch.nn.Module, weights: Mapping[int, Weight], limit_bytes: int
    ) -> tuple[list[Unit], Residency]:
        """Cut a model into units, and choose which of them stay; if not all can, rows of embeddings are read."""
        units, chosen = self._choose_of(cut(model, weights, limit_bytes))
        if not chosen.ring_bytes and not chosen.missing_bytes:
            return units, chosen
        embedded, used_otherwise = _embedding_weights(model)
        by_rows = frozenset(key for key in embedded if key in weights and has_rows(weights[key]))
        others = {key: each for key, each in weights.items() if key not in by_rows - used_otherwise}
        return self._choose_of(cut(model, others, limit_bytes, by_rows))

    def _choose_of(self, units: list[Unit]) -> tuple[list[Unit], Residency]:
        for unit in units:
            self._lay_out(unit)
        return units, self._residency_of(units)

    def _lay_out(self, unit: Unit) -> None:
        unit.blocks = self._blocks_of(unit.weights)
        # Where memory is not the host's, what is not read would have to be filled with zeros.
        unit.expert_count = 0 if self._verify or self._device.type != "cpu" else expert_count_of(unit)

    def _residency_of(self, units: Sequence[Unit], uses: Sequence[int] | None = None) -> Residency:
        converted = [sum(weight.converted_bytes for weight in unit.weights) for unit in units]
        sizes = [
            [*(block.size_bytes for block in unit.blocks), *([extra] if extra else [])]
            for unit, extra in zip(units, converted, strict=True)
        ]
        routed_bytes = [unit.size_bytes // 2 for unit in units if unit.expert_count]  # see Prefetch.use
        reserve_bytes = max(converted, default=0) + max(routed_bytes, default=0)
        return choose_residents(sizes, [unit.must_stay for unit in units], self._budget_bytes - reserve_bytes, uses)

    def _read_small(self, weights: Sequence[Weight]) -> dict[str, torch.Tensor]:
        """Read small buffers and statistics, which stay in memory; return their values by name."""
        blocks = self._blocks_of(weights)
        memory = [new_memory(block.size_bytes, self._device) for block in blocks]
        start_filling(self._source, blocks, memory, None).wait()
        values = {}
        for block, there in zip(blocks, memory, strict=True):
            for weight, at_bytes in block.weights:
                self._check(weight, there, at_bytes)
                values[weight.name] = values_in(there, weight, at_bytes)
        return values

    def _move_buffers(self, model: torch.nn.Module) -> None:
        """Move the buffers that no file has to the device."""
        streamed = {id(weight.tensor) for weight in self._weights}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in streamed:
                    module._buffers[name] = buffer.to(self._device)

    def _put_hooks(self, model: torch.nn.Module) -> None:
        @untraced
        def begin_pass(module: torch.nn.Module, arguments: object) -> None:
            self._pass_count += 1
            self._backward.forget()

        self._hooks.append(model.register_forward_pre_hook(begin_pass))
        for unit in self._units:
            self._hooks += _hooks_of(self, unit)
        for module in (model, *(unit.module for unit in self._units)):
            _guard_calls(self, module)
        without_values = [weight for weight in self._weights if weight.name not in self._small]
        self._hooks += put_guards(model, without_values, self._source.path)

    def _tell_of_room(self) -> None:
        """Say where a larger budget would do better than this one can."""
        total_bytes = sum(weight.file_bytes for weight in self._weights)
        if self._chosen.ring_bytes and available_bytes_per_rank() > total_bytes + total_bytes // 2:
            _log.info(
                "streaming %s with a budget of %d MB, though its %d MB of weights would fit into memory: a larger "
                'budget_bytes, or "auto", makes later passes faster',
                self._source.path,
                self._budget_bytes // 1_000_000,
                total_bytes // 1_000_000,
            )

    # --- between two passes

    def _look_for_a_better_choice(self, unit: Unit) -> None:
        """Choose residents anew when passes have shown which weights a unit uses, or how often each is used."""
        is_known = self._pass_count == _RANKED_PASS and not self._is_ranked
        self._is_ranked |= is_known
        if is_known or (unit.number in self._entered_since and any(self._joining.values())):
            self._choose_anew()

    def _choose_anew(self) -> None:
        """Give weights that were read on demand to the units that used them, and let those stay that are used most.

        No unit is at work, so no weights are bound but those of residents.
        """
        uses = self._prefetch.uses if self._is_ranked else None
        units = self._units
        for weight, user in [pair for pair, is_open in self._joining.items() if is_open]:
            self._joining[weight, user] = False
            joined = [self._after_joining(unit, weight, user) for unit in units]
            if not self._residency_of(joined, uses).missing_bytes:
                units = joined
        chosen = self._residency_of(units, uses)
        changed = [(old, new) for old, new in zip(self._units, units, strict=True) if old is not new]
        self._entered_since.clear()
        if not changed and chosen == self._chosen:
            return
        for old, new in changed:
            self._take_away(old)
            old.weights, old.blocks, old.expert_count = new.weights, new.blocks, new.expert_count
        for number in self._chosen.residents - chosen.residents:
            self._take_away(self._units[number])
        self._chosen = chosen
        self._backward.residents = chosen.residents
        self._prefetch.choose(chosen)

    def _after_joining(self, unit: Unit, weight: Weight, user: Unit) -> Unit:
        """Return a unit as it is when a weight has joined its user; one that is never entered does not need it."""
        weights = [each for each in unit.weights if each is not weight]
        if unit.number == user.number:
            weights.append(weight)
        if len(weights) == len(unit.weights) or (unit.number != user.number and unit.number in self._entered):
            return unit
        made = replace(unit, weights=weights)
        self._lay_out(made)
        return made

    # --- around the forward of a unit

    def _enter(self, unit: Unit, experts: Sequence[int] | None) -> None:
        """Bind the weights of a unit, or those of some of its experts, and have the next ones read."""
        self._refuse_fork()
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call] # torch has no types for it
            raise ConfigError(f"torch.jit.trace would record the memory of weights that {self!r} binds for a moment")
        self._take_turn()
        try:
            if self._closing:
                raise ConfigError(f"{unit.name or 'the model'} has no values: {self!r} is closed")
            if not self._stack:
                self._look_for_a_better_choice(unit)
                _refuse_changed(self._changed)
            self._entered.add(unit.number)
            self._entered_since.add(unit.number)
            if unit.blocks:
                with plainly():
                    filling = self._prefetch.use(unit, experts)
                    self._wait(filling)
                    if unit.number not in self._bound:
                        self._bind(unit, filling)
            # In residents and without gradients, too: they may use weights on demand, and turn gradients on.
            saving = self._backward.saving(self._streamed_and_bound)
            self._stack.append(_Entered(unit, saving))  # from here on `_unwind` finishes the unit
            saving.enter()
        except BaseException as error:
            if not self._is_entered(unit):
                self._take_away(unit)
            if isinstance(error, StorageError):
                self._prefetch.forget(self._bound)
            self._end_turn()
            raise

    def _leave(self, unit: Unit, output: Any) -> Any:
        """Unbind weights that do not stay, and have their place refilled. Returns the output without views of the ring.

        Raises:
            ConfigError: Parameters were changed in place. They have the values of the source again.
        """
        if self._closed:
            return output
        try:
            if unit.number not in self._prefetch.residents:
                output = self._outside_of_ring(output)
        finally:
            self._finish_last()
            try:
                with plainly():
                    self._prefetch.read_ahead()
            finally:
                changed = self._end_turn()
        _refuse_changed(changed)
        return output

    def _depths(self) -> tuple[int, int]:
        """Return inside how many units this thread is, and inside how many calls of the model and of units."""
        return (len(self._stack), self._call_depth) if self._holder == threading.get_ident() else (0, 0)

    def _begin_call(self) -> None:
        """Take the turn for a whole call: the model may use weights between the forwards of its units, too."""
        self._refuse_fork()
        self._take_turn()
        self._call_depth += 1

    def _unwind(self, depth: int, call_depth: int) -> None:
        """Finish units and calls, perhaps after an error or Ctrl-C, until this thread is inside only so many."""
        if self._holder == threading.get_ident():
            try:
                while len(self._stack) > depth:
                    self._finish_last()
            finally:
                self._call_depth = call_depth
                self._end_turn()

    def _finish_last(self) -> None:
        """Take the last unit from the stack, and its weights away, unless they stay."""
        unit, saving = self._stack[-1]
        if self._holder == threading.get_ident():  # the hooks are that thread's alone
            saving.leave()
        self._stack.pop()
        if self._is_entered(unit):  # it calls itself
            return
        if unit.number not in self._prefetch.residents or self._has_changed_parameters(unit):
            self._take_away(unit)

    def _has_changed_parameters(self, unit: Unit) -> bool:
        bound = self._bound.get(unit.number, ())
        return any(weight.bound_class is not torch.Tensor and is_changed(weight) for weight in bound)

    def _is_entered(self, unit: Unit) -> bool:
        return any(entered.unit is unit for entered in self._stack)

    def _streamed_and_bound(self) -> Iterator[tuple[Unit, Weight]]:
        for unit, _ in self._stack:
            if unit.number not in self._prefetch.residents:
                for weight in self._bound.get(unit.number, ()):
                    yield unit, weight

    def _take_away(self, unit: Unit) -> None:
        for weight in self._bound.get(unit.number, ()):
            self._unbind(weight)
        self._bound.pop(unit.number, None)  # only now, so that an interruption leaves no bound weight forgotten
        self._prefetch.give_back(unit)

    def _unbind(self, weight: Weight) -> None:
        """Take the values of a weight away, unless it is a buffer that was changed: that stays from now on."""
        if is_changed(weight):
            if weight.bound_class is torch.Tensor:
                keep(weight)
                self._small.add(weight.name)
                return
            self._changed.append(weight.name)
        unbind(weight)

    def _wait(self, filling: Filling) -> None:
        started = perf_counter()
        try:
            filling.wait()
        finally:
            self._stall_s += perf_counter() - started

    def _bind(self, unit: Unit, filling: Filling) -> None:
        bound = self._bound[unit.number] = []
        for block, memory in zip(filling.blocks, filling.memory, strict=True):
            for weight, at_bytes in block.weights:
                self._check(weight, memory, at_bytes)
                if not is_bound(weight):
                    bound.append(weight)  # first: Ctrl-C may come in between
                    bind(weight, values_in(memory, weight, at_bytes), stays=unit.number in self._prefetch.residents)
        if unit.number in self._prefetch.residents and all(weight.converted_bytes for weight in unit.weights):
            filling.memory = ()  # the bytes of the file are not needed beside the converted ones

    def _check(self, weight: Weight, memory: torch.Tensor, at_bytes: int) -> None:
        """Compare the checksum of a weight, at its first read."""
        if self._verify and id(weight) not in self._checked:
            check_values(self._source, memory, weight, at_bytes)
            self._checked.add(id(weight))

    # --- weights that are used outside of their unit

    def read_on_demand(self, weight: Weight) -> torch.Tensor:
        """Read a weight. Inside a forward, it is bound until that ends; else only the caller has the values."""
        self._refuse_use(weight)
        is_inside = self.is_inside()
        if is_inside and is_bound(weight):
            return weight.tensor
        if not self._on_demand_count:
            _log.warning(
                "%s was used outside of the forward of its module, so it is read on demand (said once); stats() "
                "counts such reads",
                weight.name,
            )
        (block,) = self._blocks_of([weight])
        at_bytes = block.weights[0][1]
        with plainly():
            memory = new_memory(block.size_bytes, self._device)
            self._wait(start_filling(self._source, [block], [memory], None))
            self._check(weight, memory, at_bytes)
            values = values_in(memory, weight, at_bytes)
        self._on_demand_count += 1
        self._on_demand_bytes += weight.file_bytes
        if not is_inside:  # other threads may run forwards meanwhile, which bind and unbind
            return values
        self._on_demand.append(weight)
        bind(weight, values)
        self._joining.setdefault((weight, self._stack[-1].unit), True)
        return weight.tensor

    def is_inside(self) -> bool:
        """Tell whether this thread runs the forward of a unit."""
        return self._depths()[0] > 0

    def read_rows(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids, of shape ids.shape + weight.shape[1:]."""
        self._refuse_use(weight)
        if not has_rows(weight):
            return torch.nn.functional.embedding(ids, self.read_on_demand(weight))
        started = perf_counter()
        with plainly():
            rows, read_bytes = read_rows(self._source, weight, ids)
        self._stall_s += perf_counter() - started
        self._on_demand_bytes += read_bytes
        return rows

    def _refuse_use(self, weight: Weight) -> None:
        if self._closed:
            raise ConfigError(f"{weight.name} has no values: its stream from {self._source.path} is closed")
        self._refuse_fork()

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process_id:
            raise ConfigError(f"{self!r} belongs to the process that forked this one; stream the model anew here")

    # --- turns

    def _take_turn(self) -> None:
        """Wait until no other thread is inside a call of the model or of a unit."""
        with self._turn:
            self._turn.wait_for(lambda: self._holder in (None, threading.get_ident()))
            self._holder = threading.get_ident()

    def _end_turn(self) -> list[str]:
        """Let another thread have its turn, unless this one is inside a call. Returns what has lost a change."""
        if not self._stack:
            for weight in self._on_demand:
                self._unbind(weight)
            self._on_demand.clear()
        changed, self._changed = self._changed, []
        if not self._stack and not self._call_depth:
            with self._turn:
                self._turn.notify_all()  # Ctrl-C may end the wait of one of them, or come here
                self._holder = None
        return changed

    # --- outputs

    def _outside_of_ring(self, output: Any) -> Any:
        def own(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self._own(value)
            if is_dataclass(value) and not isinstance(value, type):  # pytree knows few of them
                self._own_inside(value, set())
            return value

        return own(output) if isinstance(output, torch.Tensor) else tree_map(own, output)

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor, cloned if it may be a view of the ring."""
        if value.device.type != self._device.type:
            return value
        # Sparse and jagged tensors have several storages, none of which can be asked for here.
        return value.clone() if value.layout != torch.strided or self._prefetch.is_in_ring(value) else value

    def _own_inside(self, value: Any, seen: set[int]) -> None:
        """Clone the views of the ring in a dataclass, and in dataclasses, lists and dicts in it, in their places."""
        if id(value) in seen:
            return
        seen.add(id(value))
        put: Callable[[Any, Any], object]
        if is_dataclass(value) and not isinstance(value, type):
            held: list[Any] = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
            put = partial(object.__setattr__, value)
        elif isinstance(value, dict):
            held, put = list(value.items()), value.__setitem__
        elif isinstance(value, list):
            held, put = list(enumerate(value)), value.__setitem__
        else:
            return
        for key, each in held:
            if not isinstance(each, torch.Tensor):
                self._own_inside(each, seen)
            elif (own := self._own(each)) is not each:
                put(key, own)


# --------------------------------------------------------------------------------------------------- of a device


def _device_of(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}, which torch does not know: {error}") from None
    if place.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"weights are streamed to CPUs and CUDA devices, not to {place}")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but this torch sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place


# --------------------------------------------------------------------------------------------------- of a model


def _hooks_of(owner: WeightStream, unit: Unit) -> list[torch.utils.hooks.RemovableHandle]:
    signature = inspect.signature(unit.module.forward)

    @untraced
    def enter(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        experts = None
        if unit.expert_count:
            chosen = signature.bind(*arguments, **keywords).arguments[ROUTING_ARGUMENT]
            experts = [one for one in torch.unique(chosen).tolist() if 0 <= one < unit.expert_count]
        owner._enter(unit, experts)

    @untraced
    def leave(module: torch.nn.Module, arguments: object, output: Any) -> Any:
        return owner._leave(unit, output)

    # Our pre-hook comes first, so other pre-hooks see the weights. Hooks that run after our forward hook do not.
    return [
        unit.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(leave),
    ]


def _guard_calls(owner: WeightStream, module: torch.nn.Module) -> None:
    """Let the thread that calls a module have its turn until the call ends, in whatever way."""
    depths, begin, unwind = untraced(owner._depths), untraced(owner._begin_call), untraced(owner._unwind)

    def call(*arguments: Any, **keywords: Any) -> Any:
        before = depths()
        try:
            begin()
            output = type(module)._call_impl(module, *arguments, **keywords)
            unwind(*before)
        except BaseException:  # no hook behind the forward runs; or Ctrl-C came behind it
            unwind(*before)
            raise
        return output

    module.__dict__["_call_impl"] = call  # others wrap `forward`, and look at its signature


def _refuse_changed(names: Sequence[str]) -> None:
    if names:
        raise ConfigError(
            f"{', '.join(names)} changed in place by a forward: streamed parameters are read again for each one, so "
            "the change is lost, and the results of this forward are not to be used; let it change a copy, or load the "
            "model instead"
        )


def _embedding_weights(model: torch.nn.Module) -> tuple[set[int], set[int]]:
    """Return the ids of the large weights that embeddings have, and of those that other modules have."""
    embedded: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        for local, parameter in module._parameters.items():
            if parameter is not None and parameter.nbytes >= _SMALL_BYTES:
                is_embedding = isinstance(module, torch.nn.Embedding) and local == "weight"
                (embedded if is_embedding else others).add(id(parameter))
    return embedded, others
