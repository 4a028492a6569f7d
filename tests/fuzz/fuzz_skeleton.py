"""Fuzz the pickler of skeletons: random objects, changed between saves, must give the pickles that torch.save writes.

    python tests/fuzz/fuzz_skeleton.py --seconds 5 --seed 1

An input is the seed of an object (support/random_states.py) and how often it is changed and pickled again.
"""

from __future__ import annotations

import io
import random
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzzing import main
from support.random_states import RandomState

from fastpersist.saving.skeleton import pickle_skeleton


def make_input(rng: random.Random) -> bytes:
    return rng.randbytes(4) + bytes([rng.randrange(6)])


def try_input(data: bytes) -> None:
    state = RandomState(int.from_bytes(data[:4], "little"))
    for _ in range(data[4] + 1):
        compare(state.value)
        state.change()
    state.forget()
    compare(state.value)


def compare(obj: object) -> None:
    """Compare with torch.save: the same pickle and storages of the same bytes, or the same error."""
    expected, found = outcome(lambda: stock_parts(obj)), outcome(lambda: our_parts(obj))
    if isinstance(expected, RecursionError):  # its message says where it happened to be
        expected, found = type(expected), type(found)
    if isinstance(expected, Exception):
        expected, found = repr(expected), repr(found)
    if found != expected:
        raise AssertionError(f"{found!r}, and torch.save: {expected!r}")


def outcome(call: Callable[[], object]) -> object:
    """Return what a call returns or raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return error


def stock_parts(obj: object) -> list[bytes]:
    file = io.BytesIO()
    torch.save(obj, file)
    with zipfile.ZipFile(file) as archive:
        count = sum(name.startswith("archive/data/") for name in archive.namelist())
        return [archive.read("archive/data.pkl"), *(archive.read(f"archive/data/{key}") for key in range(count))]


def our_parts(obj: object) -> list[bytes]:
    skeleton = pickle_skeleton(obj)
    return [skeleton.pickle, *(bytes(storage.tolist()) for storage in skeleton.storages)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(make_input, try_input)
