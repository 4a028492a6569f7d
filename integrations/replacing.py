"""Functions of other packages, replaced for as long as somebody wants it, and put back as they were.

Others replace functions too, before us or after us. What was there before us is what our wrapper passes on to. If
somebody has replaced our wrapper when we are done, theirs stays, and ours, below it, only passes on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

__all__ = ["Replacement"]

Function: TypeAlias = Callable[..., Any]
Place: TypeAlias = tuple[ModuleType, str]


class Replacement:
    """Wrappers around functions, in place while the replacement is held. Thread-safe.

    Args:
        places: Where the functions are, as module and name; asked when the first holder comes.
        wrap: Makes the wrapper of a function; it decides at each call whether to pass on.
    """

    def __init__(self, places: Callable[[], Iterable[Place]], wrap: Callable[[Function], Function]) -> None:
        self._places = places
        self._wrap = wrap
        self._lock = threading.RLock()  # re-entrant, like all locks here: a signal handler may save
        self._holder_count = 0
        self._put: list[tuple[Place, Function, Function]] = []  # where, what was there, and what is there now

    def hold(self) -> None:
        """Put the wrappers in place, unless they are there."""
        with self._lock:
            self._holder_count += 1
            if self._holder_count > 1:
                return
            for module, name in self._places():
                before = getattr(module, name)
                wrapper = functools.wraps(before)(self._wrap(before))
                setattr(module, name, wrapper)
                self._put.append(((module, name), before, wrapper))

    def release(self) -> None:
        """One holder less; without any, put back what was there."""
        with self._lock:
            self._holder_count -= 1
            if self._holder_count > 0:
                return
            for (module, name), before, wrapper in self._put:
                if getattr(module, name) is wrapper:
                    setattr(module, name, before)
            self._put.clear()
