"""Finds the tensors of a DeepSpeed engine that change only in its optimizer's step, and passes the gate before it.

Most of DeepSpeed's optimizers are no torch.optim.Optimizer: they keep fp32 masters, or this rank's part of them, let an
inner optimizer step these, and copy the result into the model's parameters. `EngineTensors` finds parameters, masters
and states, and makes proxy optimizers that own them. Whenever DeepSpeed is about to step, the proxies step first, which
passes the gate: at DeepSpeed's call of the checkpoint engine, and in a hook of the inner optimizer. A tensor in doubt
is not owned, so a save copies it before it returns, which is always correct.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

__all__ = ["EngineTensors"]

# DeepSpeed's optimizers that change tensors in step() alone: the attribute with the masters, and whether they differ
# between ranks. Subclasses (ZenFlow, SuperOffload) are not listed: they also step during the backward pass.
_MASTERS = {
    "DeepSpeedZeroOptimizer": ("single_partition_of_fp32_groups", True),
    "DeepSpeedZeroOptimizer_Stage3": ("fp32_partitioned_groups_flat", True),
    "BF16_Optimizer": ("fp32_groups_flat_partition", True),
    "FP16_Optimizer": ("fp32_groups_flat", False),
    "FP16_UnfusedOptimizer": ("fp32_groups", False),
}
# Inner optimizers whose states differ between ranks, because they store compression errors.
_UNEQUAL_MODULE = "deepspeed.runtime.fp16.onebit"


class _Gate(Optimizer):
    """An optimizer without a step of its own: calling it only passes the gate."""

    def __init__(self) -> None:
        super().__init__([torch.empty(0)], {})
        self.own([])

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace the owned tensors."""
        self.param_groups = [{"params": list(tensors)}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; torch's hooks before a step pass the gate."""


class EngineTensors:
    """The tensors that only an engine's step changes, owned by optimizers that step just before it.

    Args:
        deepspeed_engine: The engine of deepspeed.initialize.

    Attributes:
        owner: The owner of all these tensors, for `optimizer=`.
        replicas_owner: The owner of the tensors that are the same on all data-parallel ranks.
        why_volatile: Why no tensor is owned; "" if some are.
    """

    def __init__(self, deepspeed_engine: Any) -> None:
        self._engine = deepspeed_engine
        self._gates = _Gate(), _Gate()
        self.owner, self.replicas_owner = self._gates
        self._inner = _inner_of(deepspeed_engine.optimizer)
        self.why_volatile = self._why_volatile()
        self._hook: Any = None
        if self._inner is not None:
            myself = weakref.ref(self)  # the optimizer may outlive this object

            def before_step(*_: object) -> None:
                found = myself()
                if found is not None:
                    found.pass_gate()

            self._hook = self._inner.register_step_pre_hook(before_step)

    def look(self) -> None:
        """Find the current tensors; called before each save."""
        self.why_volatile = self._why_volatile()
        own, replicas = ([], []) if self.why_volatile else self._found()
        self.owner.own([*own, *replicas])
        self.replicas_owner.own(replicas)

    def forget(self) -> None:
        """Own nothing until the next `look`; saves under way keep their tensors."""
        for gate in self._gates:
            gate.own([])

    def pass_gate(self) -> None:
        """Wait, before the engine steps, until all tensors that it changes are captured."""
        for gate in self._gates:
            gate.step()

    def let_go(self) -> None:
        """Remove the hook of the inner optimizer."""
        if self._hook is not None:
            self._hook.remove()

    def _found(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's own tensors, and those that all data-parallel ranks hold."""
        # Parameters of stage 3 have memory only while they are used; a save reads the masters instead.
        parameters = [
            one for one in self._engine.module.parameters() if one.requires_grad and not hasattr(one, "ds_id")
        ]
        states = list(_tensors_in([group["params"] for group in self._inner.param_groups])) if self._inner else []
        states += _tensors_in(list(self._inner.state.values())) if self._inner else []
        outer = self._engine.optimizer
        is_partitioned = type(self._inner).__module__.startswith(_UNEQUAL_MODULE)
        if outer is not self._inner:
            name, differs = _MASTERS[type(outer).__name__]
            states += _tensors_in(getattr(outer, name))
            is_partitioned = is_partitioned or differs
        return (states, parameters) if is_partitioned else ([], [*parameters, *states])

    def _why_volatile(self) -> str:
        engine, outer, inner = self._engine, self._engine.optimizer, self._inner
        name = type(outer).__name__
        if inner is None:
            return f"{name} has no torch.optim.Optimizer inside"
        if not getattr(type(inner).step, "hooked", False):
            return f"{type(inner).__name__}.step() runs no hooks"
        if callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None)):
            return f"{type(inner).__name__} changes parameters in train() and eval(), outside its step"
        is_known = type(outer).__module__.startswith("deepspeed.") and name in _MASTERS
        if outer is not inner and not (is_known and hasattr(outer, _MASTERS[name][0])):
            return f"{name} is not known to change tensors in its step alone"
        if getattr(engine, "zenflow", False):
            return "ZenFlow steps beside the backward pass"
        if "DeepSpeedHybridEngine" in {base.__name__ for base in type(engine).__mro__}:
            return "DeepSpeedHybridEngine changes parameters to generate"
        if callable(getattr(engine, "is_deepcompile_active", None)) and engine.is_deepcompile_active():
            return "DeepCompile moves optimizer states during forward and backward"
        return ""


def _inner_of(optimizer: Any) -> Optimizer | None:
    """Return the torch optimizer inside; its step changes the masters."""
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        optimizer = getattr(optimizer, "optimizer", optimizer)
    return optimizer if isinstance(optimizer, Optimizer) else None


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors_in(inner)
