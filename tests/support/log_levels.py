"""Keeps the log of FastPersist out of a test that provokes what it would say again and again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out warnings that a step cannot be removed and the like."""
    logger = logging.getLogger("fastpersist")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
