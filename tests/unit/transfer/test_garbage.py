"""The garbage collector is off while a state is saved or loaded, and on again when the last one has ended."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fastpersist.transfer.garbage import no_garbage_collection


@pytest.fixture(autouse=True)
def collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_collector_is_off_inside_and_on_afterwards() -> None:
    with no_garbage_collection():
        assert not gc.isenabled()
        with no_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_error_turns_it_on_again() -> None:
    with pytest.raises(RuntimeError, match="of the caller"), no_garbage_collection():
        raise RuntimeError("of the caller")
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with no_garbage_collection():
        pass
    assert not gc.isenabled()
