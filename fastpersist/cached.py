"""Attributes that are computed at their first use.

In place of `functools.cached_property`, which before Python 3.12 holds one lock for all objects of a class while it
computes: threads would read one file after the other, and a child that is forked meanwhile would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

__all__ = ["cached_property"]

Value = TypeVar("Value")


class cached_property(Generic[Value]):
    """A method whose result becomes an attribute of the object. Threads that come at once may each compute it."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Value: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> cached_property[Value] | Value:
        if instance is None:
            return self
        value = self._compute(instance)
        instance.__dict__[self._name] = value
        return value

    if TYPE_CHECKING:  # with it, the attribute would not hide this one

        def __set__(self, instance: object, value: Value) -> None: ...
