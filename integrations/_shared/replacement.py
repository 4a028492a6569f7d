"""Replaces functions of other packages while the replacement is held, and then restores them.

Other libraries replace functions too, before us or after us. Our wrapper calls the function that it found. If another
library has replaced our wrapper by the time of `release`, its function stays, and our wrapper below it only passes on.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

__all__ = ["Function", "Place", "Replacement"]

Function: TypeAlias = Callable[..., Any]
Place: TypeAlias = tuple[ModuleType, str]


class Replacement:
    """Wrappers around functions, in place while the replacement is held. Thread-safe.

    A function that is bound to several names gets one wrapper, so that the names stay identical.

    Args:
        places: Returns module and name of each function; called by the first `hold`.
        wrap: Makes the wrapper of a function; the wrapper decides at each call whether to pass on.
    """

    def __init__(self, places: Callable[[], Iterable[Place]], wrap: Callable[[Function], Function]) -> None:
        self._places = places
        self._wrap = wrap
        self._holder_count = 0
        self._wrappers: list[tuple[Function, Function]] = []  # function and wrapper
        self._replaced: list[tuple[Place, Function, Function]] = []  # place, function and wrapper
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # a thread of the parent may hold the lock

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save

    def hold(self) -> None:
        """Count one holder more; put the wrappers in place for the first."""
        with self._lock:
            self._holder_count += 1
            if self._holder_count > 1:
                return
            for module, name in self._places():
                before, wrapper = self._wrapped(getattr(module, name))
                setattr(module, name, wrapper)
                self._replaced.append(((module, name), before, wrapper))

    def release(self) -> None:
        """Count one holder less; restore the functions after the last."""
        with self._lock:
            self._holder_count -= 1
            if self._holder_count > 0:
                return
            for (module, name), before, wrapper in self._replaced:
                if getattr(module, name, None) is wrapper:
                    setattr(module, name, before)
            self._replaced.clear()

    def _wrapped(self, found: Function) -> tuple[Function, Function]:
        """Return a function and its wrapper, given either: another library may have restored our wrapper."""
        for function, wrapper in self._wrappers:
            if found in (function, wrapper):
                return function, wrapper
        self._wrappers.append((found, functools.wraps(found)(self._wrap(found))))
        return self._wrappers[-1]
