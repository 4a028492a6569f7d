"""Functions of other packages, replaced for as long as somebody wants it, and put back as they were.

Others replace functions too, before us or after us. What was there before us is what our wrapper passes on to. If
somebody has replaced our wrapper when we are done, theirs stays, and ours, below it, only passes on.
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

    A function has one wrapper, however many names it has: what was the same stays the same.

    Args:
        places: Where the functions are, as module and name; asked when the first holder comes.
        wrap: Makes the wrapper of a function; it decides at each call whether to pass on.
    """

    def __init__(self, places: Callable[[], Iterable[Place]], wrap: Callable[[Function], Function]) -> None:
        self._places = places
        self._wrap = wrap
        self._holder_count = 0
        self._wrappers: list[tuple[Function, Function]] = []  # a function, and what wraps it
        self._replaced: list[tuple[Place, Function, Function]] = []  # where, what was there, and what is there now
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # its holder may be a thread that stayed behind

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save

    def hold(self) -> None:
        """Put the wrappers in place, unless they are there."""
        with self._lock:
            self._holder_count += 1
            if self._holder_count > 1:
                return
            for module, name in self._places():
                before, wrapper = self._wrapped(getattr(module, name))
                setattr(module, name, wrapper)
                self._replaced.append(((module, name), before, wrapper))

    def release(self) -> None:
        """One holder less; without any, put back what was there."""
        with self._lock:
            self._holder_count -= 1
            if self._holder_count > 0:
                return
            for (module, name), before, wrapper in self._replaced:
                if getattr(module, name, None) is wrapper:
                    setattr(module, name, before)
            self._replaced.clear()

    def _wrapped(self, found: Function) -> tuple[Function, Function]:
        """Return a function and its wrapper, given either: ours comes back when a replacement of it is taken away."""
        for function, wrapper in self._wrappers:
            if found in (function, wrapper):
                return function, wrapper
        self._wrappers.append((found, functools.wraps(found)(self._wrap(found))))
        return self._wrappers[-1]
