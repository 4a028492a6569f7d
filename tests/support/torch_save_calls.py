"""Says how a call ended, so that one with torch's own functions can be compared with one with ours."""

from __future__ import annotations

import contextlib
import marshal
import pickle
import re
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.sameness import portrait

STOCK_SAVE = torch.save
STOCK_LOAD = torch.load


@dataclass(frozen=True)
class Outcome:
    """What a call returned or raised, and what it warned of."""

    value: Any
    error: BaseException | None
    warned: list[tuple[type, str]]

    def assert_like(self, stock: Outcome) -> None:
        """Fail unless whoever expects torch's own outcome is content with this one."""
        assert self.warned == stock.warned
        assert portrait(self.value) == portrait(stock.value)
        if stock.error is None:
            assert self.error is None, repr(self.error)
        else:
            assert isinstance(self.error, type(stock.error)), f"{self.error!r}, where torch raises {stock.error!r}"
            assert _said(self.error) == _said(stock.error)


def _said(error: BaseException | None) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", str(error))


def outcome(call: Callable[[], Any]) -> Outcome:
    """Call, and say how it ended."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value, error = None, None
        try:
            value = call()
        except Exception as raised:  # noqa: BLE001 - whatever it is, it is compared
            error = raised
    return Outcome(value, error, [(warning.category, str(warning.message)) for warning in caught])


def is_ours(path: Path | str) -> bool:
    """Tell whether fastpersist has written a torch zip, and not torch.save with its usual settings."""
    with open(path, "rb") as file:
        return bool(torch._C.PyTorchFileReader(file).get_record(".storage_alignment") == b"4096")


@contextlib.contextmanager
def registered_device() -> Iterator[None]:
    """Restore storages of the location "own", of the user; those that it is asked about are tagged with it, too."""

    def restore(storage: Any, location: str) -> Any:
        return storage if location == "own" else None

    torch.serialization.register_package(5, lambda storage: "own", restore)
    try:
        yield
    finally:
        registry = torch.serialization._package_registry
        registry[:] = [entry for entry in registry if entry[2] is not restore]


def function_of(code: bytes) -> types.FunctionType:
    return types.FunctionType(marshal.loads(code), {})


class FunctionPickler(pickle.Pickler):
    """Pickles lambdas too, as the picklers do for which torch.save has its pickle_module."""

    def reducer_override(self, obj: Any) -> Any:
        is_lambda = isinstance(obj, types.FunctionType) and obj.__name__ == "<lambda>"
        return (function_of, (marshal.dumps(obj.__code__),)) if is_lambda else NotImplemented


FUNCTION_PICKLE = types.ModuleType("function_pickle")
vars(FUNCTION_PICKLE).update(Pickler=FunctionPickler, Unpickler=pickle.Unpickler, load=pickle.load)
