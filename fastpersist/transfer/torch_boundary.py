"""Functions that torch.compile leaves alone, as it does torch.save: what they do is no part of a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["untraced"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def untraced(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let a function run as it is where compiled code calls it.

    torch's own decorator imports the compiler, which takes a second; so it is applied once compiled code calls.
    """
    disabled: Callable[Parameters, Result] | None = None

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        nonlocal disabled
        if disabled is None:
            if not torch.compiler.is_compiling():
                return function(*arguments, **keywords)
            disabled = torch.compiler.disable(function)
        return disabled(*arguments, **keywords)

    return call
