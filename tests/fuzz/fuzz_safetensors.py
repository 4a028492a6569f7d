"""Fuzz the reader of safetensors: mutated headers as bytes and as JSON, against the official parser.

    python tests/fuzz/fuzz_safetensors.py --seconds 5 --seed 1

read_header may raise FormatError only, must not ask for a byte outside the file, and must refuse what the official
parser refuses. What it lets pass goes through every reader; whole_files.py says what those may raise.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from fuzzing import EDGES, main, mutated, reading
from safetensors import SafetensorError, deserialize
from whole_files import outcomes, try_file

from fastpersist.errors import FormatError
from fastpersist.formats import safetensors

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "format-v1"


def file_of(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def headers() -> list[dict[str, Any]]:
    a = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    b = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [16, 28]}
    empty = {"dtype": "I64", "shape": [0, 3], "data_offsets": [28, 28]}
    return [
        {"a": a, "b": b},
        {"__metadata__": {"k": "v", safetensors.CRC_KEY: "0123456789abcdef" + "00000000"}, "a": a, "b": b, "e": empty},
        {"e": {**empty, "data_offsets": [0, 0]}},
    ]


HEADERS = headers()
SEEDS = [file_of(json.dumps(header).encode(), bytes(28 if "a" in header else 0)) for header in HEADERS]
GOLDEN_FILES = [path.read_bytes() for path in sorted(GOLDEN.glob("*.safetensors"))]
WILD = [*EDGES, -1, 1.5, True, None, "x", [], {}, [0, 16], "F32", "F4", "BOOL", "C64", 1 << 70]


def wild(rng: random.Random, value: Any) -> Any:
    """Change one thing somewhere in a JSON value: replace it, drop it, or put it there twice."""
    if rng.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return rng.choice(WILD)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        copy = dict(value)
        choice = rng.random()
        if choice < 0.1:
            del copy[key]
        elif choice < 0.2:
            copy[rng.choice(["", "a", "dtype", "__metadata__", "é"])] = copy[key]
        else:
            copy[key] = wild(rng, value[key])
        return copy
    index = rng.randrange(len(value))
    return [*value[:index], wild(rng, value[index]), *value[index + 1 :]]


def make_input(rng: random.Random) -> bytes:
    chance = rng.random()
    if chance < 0.4:
        header = rng.choice(HEADERS)
        for _ in range(rng.choice([1, 1, 2, 3])):
            header = wild(rng, header)
        return file_of(json.dumps(header).encode(), bytes(rng.choice([0, 16, 28, 28, 28, 29])))
    if chance < 0.8:
        data = rng.choice(SEEDS)
        length = int.from_bytes(data[:8], "little")
        return file_of(mutated(rng, data[8 : 8 + length], SEEDS), data[8 + length :])
    if chance < 0.9:
        return mutated(rng, rng.choice(SEEDS), SEEDS)
    data = rng.choice(GOLDEN_FILES)
    return data[:8] + mutated(rng, data[8:400], SEEDS)[:392].ljust(392) + data[400:]


def try_input(data: bytes) -> None:
    try:
        header = safetensors.read_header(reading(data), len(data), path="input")
    except FormatError as error:
        str(error)
        outcomes["no header"] += 1
        if len(data) % 8:  # the other readers must come to the same answer; some of them are enough
            return
    else:
        try:
            official = {name for name, _ in deserialize(data)}
        except SafetensorError as error:
            raise AssertionError(f"the official parser refuses what ours takes: {error}") from error
        if official != {entry.name for entry in header.entries}:
            raise AssertionError("the official parser finds other tensors")
        if sum(entry.size_bytes for entry in header.entries) != len(data) - header.size_bytes:
            raise AssertionError("the tensors do not make up the file")
    try_file(data)


if __name__ == "__main__":
    # 30 MiB for torch's own modules on first use; the rest is linear: JSON objects for a few bytes of text each.
    main(make_input, try_input, memory_bytes_max=lambda length: (30 << 20) + 500 * length)
    print(dict(outcomes), file=sys.stderr)
