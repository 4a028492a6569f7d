"""Fuzz the parser of manifests: mutated as bytes and as JSON, deep, long and full of names that want out.

    python tests/fuzz/fuzz_manifest.py --seconds 5 --seed 1

parse_manifest may raise FormatError only. What it lets pass names files below its directory, all of which one directory
can hold, is JSON to the stock parser too, and comes back the same when it is encoded again.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from typing import Any

from fuzzing import EDGES, main, mutated

from fastpersist.errors import FormatError
from fastpersist.formats.manifest import MANIFEST_NAME, CheckpointManifest, FileEntry, encode_manifest, parse_manifest

outcomes: Counter[str] = Counter()

MANIFESTS = [
    CheckpointManifest((), None, 0.0, {}, {}, {}, {}),
    CheckpointManifest(
        (FileEntry("state.pt", 1_650_000_000, 0x0A1B2C3D), FileEntry("rank-00001.pt", 77)),
        100,
        1760000000.25,
        {"loss": 2.5, "worst": float("nan"), "up": float("inf")},
        {"fastpersist": "0.1.0", "torch": "2.13.0"},
        {"name": "node-1", "cpu_count": 2},
        {"stall_s": 0.004, "bytes": 1_650_000_000, "engine": "uring"},
    ),
    CheckpointManifest(
        tuple(FileEntry(f"shards/[{i}]/a\"b {i}.pt", i, i) for i in range(20)), 1 << 62, 1.0, {}, {"é": "\\"}, {}, {}
    ),
]  # fmt: skip
SEEDS = [encode_manifest(manifest) for manifest in MANIFESTS]
PARTS = ["a", "a.", "..", ".", "", "C:", "\\", "\0", "\ud800", "\x1b[2J", MANIFEST_NAME, "x" * 255, "x" * 256, "é", "~"]
KEYS = ["", "format", "step", "files", "name", "size_bytes", "crc32", "metrics", "é", "\udc80"]
WILD = [
    *EDGES, -1, 1.5, 1.0, 1e300, True, False, None, "x", "nan", "-inf", "0000000a", "\ud800", [], {}, [[]], 1 << 70,
    10**45, float("nan"), float("inf"), "y" * 5000,
]  # fmt: skip
TOKENS = [
    b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b'\\"', b"\\\\", b"\\ud800", b"\\u0000", b"NaN", b"-Infinity",
    b"1e999", b"-0", b"9" * 50, b"0", b"null", b"true", b'"a":', b'"name":"a"', b'"format":1', b"\xff", b" ", b"\n",
]  # fmt: skip


def wild_name(rng: random.Random) -> str:
    return "/".join(rng.choice(PARTS) for _ in range(rng.choice([1, 1, 2, 3, 70])))


def wild(rng: random.Random, value: Any) -> Any:
    """Change one thing somewhere in a JSON value: replace it, drop it, or put it there twice."""
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return wild_name(rng) if isinstance(value, str) and rng.random() < 0.5 else rng.choice(WILD)
    copy: Any = value.copy()
    key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    chance = rng.random()
    if chance < 0.1:
        del copy[key]
    elif chance < 0.2:
        if isinstance(copy, dict):
            copy[rng.choice(KEYS)] = copy[key]
        else:
            copy.append(copy[key])
    else:
        copy[key] = wild(rng, value[key])
    return copy


def make_input(rng: random.Random) -> bytes:
    chance = rng.random()
    if chance < 0.5:
        content = json.loads(rng.choice(SEEDS))
        for _ in range(rng.choice([1, 1, 2, 3])):
            content = wild(rng, content)
        return json.dumps(content, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
    if chance < 0.8:
        return mutated(rng, rng.choice(SEEDS), SEEDS)
    if chance < 0.9:  # tokens at random places, once or many times
        data = bytearray(rng.choice(SEEDS))
        for _ in range(rng.choice([1, 2, 4])):
            at = rng.randrange(len(data) + 1)
            data[at:at] = rng.choice(TOKENS) * rng.choice([1, 1, 2, 31, 33, 10_000])
        return bytes(data)
    pattern = b"".join(rng.choice(TOKENS) for _ in range(rng.randint(1, 4)))
    return b"".join(rng.choice(TOKENS) for _ in range(rng.randint(0, 4))) + pattern * rng.choice([1, 50, 20_000])


def try_input(data: bytes) -> None:
    try:
        manifest = parse_manifest(data, "input")
    except FormatError as error:
        message = str(error)
        message.encode()
        if not message.startswith("input: ") or len(message) > 400 or "\n" in message:
            raise AssertionError(f"a message nobody wants to read: {message[:1000]!r}") from error
        outcomes["refused"] += 1
        return
    outcomes["parsed"] += 1
    if json.loads(data)["format"] != 1:
        raise AssertionError("the stock parser finds another format")
    taken = {MANIFEST_NAME}
    for entry in manifest.files:
        if os.path.normpath(os.path.join("/root/step", entry.name)) != "/root/step/" + entry.name or "\0" in entry.name:
            raise AssertionError(f"the name {entry.name!r} means another place")
        if entry.name in taken:
            raise AssertionError(f"{entry.name!r} is there already")
        taken.add(entry.name)
    for name in taken:
        while "/" in name:
            name = name.rpartition("/")[0]
            if name in taken:
                raise AssertionError(f"{name!r} is a file and a directory")
    again = parse_manifest(encode_manifest(manifest), "again")
    if repr(again) != repr(manifest):  # NaN is not equal to itself
        raise AssertionError(f"{again} came back for {manifest}")


if __name__ == "__main__":
    # Linear: a Python object of some tens of bytes for every two bytes of text, and the pieces between quotes.
    main(make_input, try_input, memory_bytes_max=lambda length: (4 << 20) + 100 * length)
    print(dict(outcomes), file=sys.stderr)
