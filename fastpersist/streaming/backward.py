"""Weights in a backward pass: the forward saves references to them, and the backward pass reads them again.

Streamed weights need no gradient, but gradients of trained parameters in front of them, such as adapters, pass through
them. autograd would keep the weights' memory, which the ring overwrites. So it keeps a reference to the weight instead.
A backward pass has memory of its own: a view keeps this memory alive, whichever thread computes with it.

Source: https://pytorch.org/docs/stable/notes/autograd.html, "Hooks for saved tensors".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, starmap
from typing import Any, NamedTuple

import torch

from fastpersist.errors import ConfigError, InternalError, UnsupportedError
from fastpersist.streaming.binding import is_changed
from fastpersist.streaming.order import UseOrder
from fastpersist.streaming.reading import Filling, new_memory, start_filling, values_in
from fastpersist.streaming.source import WeightSource
from fastpersist.streaming.units import Unit, Weight
from fastpersist.transfer.tensor_memory import byte_view

__all__ = ["BackwardReads", "SavedTensorHooks"]

BoundWeights = Callable[[], Iterable[tuple[Unit, Weight]]]


class _Used(NamedTuple):
    """The reference that autograd keeps in place of the values of a weight, or of a view of them."""

    unit: Unit
    weight: Weight
    from_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool


class SavedTensorHooks:
    """Hooks on the tensors that autograd saves, as `torch.autograd.graph.saved_tensors_hooks` sets them.

    Ctrl-C may come anywhere, but Python runs a signal's handler only between two steps of its own. So torch is called,
    and the call is noted, in one step.

    Args:
        pack: The function that autograd calls with a tensor; it keeps the result.
        unpack: The function that makes a tensor of such a result.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._hooks = (pack, unpack)
        self._entered: list[None] = []  # as long as the number of calls
        self._left: list[None] = []

    def enter(self) -> None:
        """Have autograd call the hooks in this thread.

        Raises:
            UnsupportedError: A transform of torch.func forbids hooks, and gradients are on.
        """
        try:
            self._entered.extend(starmap(torch._C._autograd._push_saved_tensors_default_hooks, [self._hooks]))
        except RuntimeError as error:
            if not torch.is_grad_enabled():
                return
            raise UnsupportedError(
                f"the gradients of streamed weights' inputs need hooks on saved tensors, and none can be set here "
                f"({error}): use torch.autograd.grad in place of torch.func.grad, vjp and jacrev"
            ) from error

    def leave(self) -> None:
        """Have autograd call what it called before; does nothing if it does so already."""
        more = len(self._entered) - len(self._left)
        self._left.extend(starmap(torch._C._autograd._pop_saved_tensors_default_hooks, [()] * more))


class BackwardReads:
    """The units that a backward pass needs; each is read while the unit before it in the pass computes.

    Args:
        source: The source that the units are read from.
        units: All units, by number.
        residents: The numbers of the units whose memory stays.
        device: The device of their memory.

    Attributes:
        residents: The numbers of the units whose memory stays.
        read_bytes: The number of bytes that were read.

    Thread safety: any thread.
    """

    def __init__(
        self, source: WeightSource, units: Sequence[Unit], residents: frozenset[int], device: torch.device
    ) -> None:
        self.read_bytes = 0
        self._source = source
        self._units = units
        self.residents = residents
        self._device = device
        self._lock = threading.Lock()
        self._order = UseOrder(len(units))  # of numbers from the end: a backward begins there
        self._current: tuple[Unit, Filling] | None = None
        self._next: tuple[Unit, Filling] | None = None

    def saving(self, bound: BoundWeights) -> SavedTensorHooks:
        """Return the hooks by which autograd keeps no values of weights.

        Args:
            bound: Yields the streamed weights that have values at the moment.
        """

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Used:
            if tensor.layout != torch.strided or tensor.device != self._device or not tensor.numel():
                return tensor
            address = tensor.data_ptr()
            for unit, weight in bound():
                from_bytes = address - weight.tensor.data_ptr()
                if 0 <= from_bytes < weight.tensor.nbytes:
                    if is_changed(weight):  # its values are nowhere else
                        return tensor.detach().clone()
                    layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
                    return _Used(unit, weight, from_bytes, *layout)
            # A weight that is read on demand has memory of its own, but loses it when it is unbound.
            return tensor.detach() if isinstance(getattr(tensor, "_weight", None), Weight) else tensor

        def unpack(kept: torch.Tensor | _Used) -> torch.Tensor:
            return kept if isinstance(kept, torch.Tensor) else self._values(kept)

        return SavedTensorHooks(pack, unpack)

    def forget(self) -> None:
        """Free the memory of the last backward pass; called when another forward begins."""
        with self._lock:
            for each in (self._current, self._next):
                if each is not None:
                    each[1].land()
            self._current = self._next = None

    def _values(self, used: _Used) -> torch.Tensor:
        if used.weight.owner.closed:
            raise ConfigError(f"the backward pass needs {used.weight.name}, and its stream is closed")
        with self._lock:
            filling = self._filling_of(used.unit)
        for block, memory in zip(filling.blocks, filling.memory, strict=True):
            for weight, at_bytes in block.weights:
                if weight is used.weight:
                    rest = byte_view(values_in(memory, weight, at_bytes))[used.from_bytes :]
                    whole = rest[: rest.numel() // used.dtype.itemsize * used.dtype.itemsize].view(used.dtype)
                    view = whole.as_strided(used.shape, used.stride)
                    view = view.conj() if used.is_conj else view
                    return torch._neg_view(view) if used.is_neg else view
        raise InternalError(f"the weight {used.weight.name} was bound for {used.unit.name}, which does not have it")

    def _filling_of(self, unit: Unit) -> Filling:
        if self._current is not None and self._current[0] is unit:
            return self._current[1]
        count = len(self._units)
        self._order.note(count - 1 - unit.number)
        found = self._next[1] if self._next is not None and self._next[0] is unit else self._start(unit)
        self._current = self._next = None
        for number in islice(self._order.foretell(), count):
            following = self._units[count - 1 - number]
            if following.number not in self.residents and following.blocks and following is not unit:
                self._next = (following, self._start(following))
                break
        found.wait()
        self._current = (unit, found)
        return found

    def _start(self, unit: Unit) -> Filling:
        memory = [new_memory(block.size_bytes, self._device) for block in unit.blocks]
        filling = start_filling(self._source, unit.blocks, memory, None)
        self.read_bytes += filling.size_bytes
        return filling
