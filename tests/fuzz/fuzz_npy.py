"""Fuzz the reader of .npy headers: mutated headers, against numpy's own.

    python tests/fuzz/fuzz_npy.py --seconds 5 --seed 1

read_header may raise FormatError and UnsupportedError only, and must not ask for a byte outside the file. What it
takes, numpy takes too, and finds the same array.
"""

from __future__ import annotations

import io
import random
import warnings
from collections import Counter

import numpy as np
from fuzzing import main, mutated, reading
from numpy.lib import format as numpy_format

from fastpersist.errors import FormatError, UnsupportedError
from fastpersist.formats import npy

outcomes: Counter[str] = Counter()
DTYPES = ["'<f4'", "'>f4'", "'|u1'", "'<c16'", "'|O'", "'<U3'", "'|V2'", "'<f0'", "'<M8[ns]'", "[('a', '<f4')]", "None"]
SHAPES = ["(2, 3)", "(6,)", "()", "(0, 3)", "(6)", "(-1,)", "(1, 99999999999999999999)", "[2, 3]", "(2,,3)", "(2, 3,)"]
PARTS = [
    ["{", "{ ", "", "[", "{{"],
    ["'descr': ", "'descr':", '"descr": ', "'shape': ", "descr: "],
    DTYPES,
    [", ", ",", "", " "],
    ["'fortran_order': ", "'fortran_order':", "'fortran': "],
    ["False", "True", "0", "None"],
    [", ", ",", ""],
    ["'shape': ", "'shape':", "'descr': "],
    SHAPES,
    [", ", "", ",", " "],
    ["}", "", "}}", "} "],
]


def file_of(rng: random.Random, text: bytes) -> bytes:
    version = rng.choice([1, 1, 1, 2, 3, 0, 4])
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + (len(text) & 0xFFFF).to_bytes(width, "little") + text


SEEDS = [npy.encode_header("float32", (2, 3)) + bytes(24), npy.encode_header("int8", (5,)) + bytes(5)]
for _array in (np.ones((2, 3)), np.ones(4, ">i4"), np.asfortranarray(np.ones((2, 3))), np.zeros(2, "U4")):
    _buffer = io.BytesIO()
    np.save(_buffer, _array)
    SEEDS.append(_buffer.getvalue())


def make_input(rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return mutated(rng, rng.choice(SEEDS), SEEDS)
    first = [0.9, 0.97][rng.random() < 0.7]
    text = "".join(part[0] if rng.random() < first else rng.choice(part) for part in PARTS).encode()
    if rng.random() < 0.3:
        text = mutated(rng, text, SEEDS)
    return file_of(rng, text.ljust(rng.choice([0, 117]), b" ") + b"\n") + bytes(rng.choice([0, 23, 24, 24, 24, 96]))


def numpys(data: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    file = io.BytesIO(data)
    version = numpy_format.read_magic(file)
    reader = numpy_format.read_array_header_1_0 if version == (1, 0) else numpy_format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a header is of Python 2
        shape, _, dtype = reader(file, max_header_size=1 << 20)
    return dtype, shape, file.tell()


def try_input(data: bytes) -> None:
    try:
        header = npy.read_header(reading(data), len(data), path="input")
    except (FormatError, UnsupportedError) as error:
        str(error)
        outcomes[type(error).__name__] += 1
        return
    outcomes["header"] += 1
    try:
        dtype, shape, offset_bytes = numpys(data)
    except ValueError as error:
        raise AssertionError(f"numpy refuses what ours takes: {error}") from error
    if (dtype.itemsize, shape, offset_bytes) != (header.item_bytes, header.shape, header.offset_bytes):
        raise AssertionError(f"numpy finds {dtype} {shape} at {offset_bytes}, we find {header}")
    if header.dtype and np.dtype(npy.DTYPE_NAMES[header.dtype]) != dtype:
        raise AssertionError(f"numpy finds {dtype}, we find {header.dtype}")


if __name__ == "__main__":
    # Linear, in text of at most 64 KiB.
    main(make_input, try_input, memory_bytes_max=lambda length: (4 << 20) + 500 * length)
    print(dict(outcomes))
