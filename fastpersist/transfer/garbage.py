"""Pause Python's garbage collector while a state of many tensors is saved or loaded.

The collector runs whenever some hundred more objects were made than freed, and walks through the objects of the
process. While tens of thousands of objects are made, none of which is garbage, this takes longer than making them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_garbage_collection"]

_collector_holders = 0  # how many have turned it off, and will turn it on again


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn the garbage collector off while tens of thousands of objects are made, none of which is garbage.

    It would walk all objects of the process again and again, which takes longer than making these.
    """
    global _collector_holders
    was_enabled = gc.isenabled()
    gc.disable()
    _collector_holders += was_enabled
    try:
        yield
    finally:
        if was_enabled:
            _collector_holders -= 1
            gc.enable()


def _turn_on_again() -> None:
    """Turn it on in a forked child: the threads that turned it off are the parent's."""
    global _collector_holders
    if _collector_holders:
        _collector_holders = 0
        gc.enable()


os.register_at_fork(after_in_child=_turn_on_again)
