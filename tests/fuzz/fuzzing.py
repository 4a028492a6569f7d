"""What every fuzzer shares: seeds, mutations, limits, and a report that lets one input be tried again.

A fuzzer is a file `fuzz_<room>.py` that calls `main` with a function that makes an input and one that tries
it. Input n of a seed is always the same, whatever came before it, so `--only n` repeats a failure alone.
"""

from __future__ import annotations

import argparse
import base64
import random
import resource
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence

# Above what the process needs before the first input. A parser that believes a length of gigabytes hits this.
ADDRESS_SPACE_BYTES = 1 << 30

# Inputs are at most some hundred KiB, so this is quadratic time or an endless loop, not a slow machine.
CPU_SECONDS_MAX = 10.0

# Every so many inputs are tried under tracemalloc, which is exact but takes several times as long.
TRACED_EVERY = 64

EDGES = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
]


def reading(data: bytes) -> Callable[[int, int], bytes]:
    """Return what reads from an input as from a file, and lets nobody ask for bytes that are not there."""

    def read_at(offset_bytes: int, size_bytes: int) -> bytes:
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= len(data):
            raise AssertionError(f"{size_bytes} bytes at {offset_bytes} of {len(data)} were asked for")
        return data[offset_bytes : offset_bytes + size_bytes]

    return read_at


def mutated(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change one to eight things in `data`: bytes, numbers, ranges, or parts taken from other inputs."""
    result = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 8])):
        at = rng.randrange(len(result) + 1)
        length = min(rng.choice([1, 2, 4, 8, rng.randint(1, 64)]), len(result) - at)
        choice = rng.randrange(8)
        if choice == 0 and length:
            result[at] ^= 1 << rng.randrange(8)
        elif choice == 1 and length:
            result[at] = rng.randrange(256)
        elif choice == 2:
            width = rng.choice([1, 2, 4, 8])
            edge = rng.choice(EDGES) & ((1 << 8 * width) - 1)
            result[at : at + width] = edge.to_bytes(width, rng.choice(["little", "big"]))
        elif choice == 3:
            del result[at : at + length]
        elif choice == 4:
            result[at:at] = result[at : at + length] * rng.choice([1, 2, rng.randint(1, 100)])
        elif choice == 5:
            result[at:at] = rng.randbytes(length)
        elif choice == 6:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            result[at : at + length] = other[start : start + rng.randint(1, 64)]
        else:
            del result[at:]
    return bytes(result)


def tried(data: bytes, try_input: Callable[[bytes], None], memory_bytes_max: int | None) -> None:
    """Try one input; raise what it raises, and AssertionError if it takes too much time or memory."""
    start_s = time.process_time()
    if memory_bytes_max is None:
        try_input(data)
    else:
        tracemalloc.start()
        try:
            try_input(data)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak_bytes > memory_bytes_max:
            raise AssertionError(f"{peak_bytes} bytes of memory for an input of {len(data)} bytes")
    spent_s = time.process_time() - start_s
    if spent_s > CPU_SECONDS_MAX:
        raise AssertionError(f"{spent_s:.1f} s of CPU time for an input of {len(data)} bytes")


def main(
    make_input: Callable[[random.Random], bytes],
    try_input: Callable[[bytes], None],
    memory_bytes_max: Callable[[int], int] | None = None,
) -> None:
    """Run a fuzzer from the command line; exit with 1 at the first input that fails.

    Args:
        make_input: Makes an input from a source of chance, and from nothing else.
        try_input: Returns if the input was handled, well or with one of the errors that are documented for it.
        memory_bytes_max: Takes the length of an input; returns the memory that trying it may take. None: no limit.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to run (default: 5)")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run (default: by chance)")
    parser.add_argument("--only", type=int, metavar="N", help="try input N of the seed, alone")
    parser.add_argument("--canary", action="store_true", help="fail on purpose, to test the fuzzer itself")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)

    if memory_bytes_max is not None:
        used_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ADDRESS_SPACE_BYTES,) * 2)

    deadline_s = time.monotonic() + options.seconds
    count = options.only or 0
    while True:
        data = make_input(random.Random(f"{seed}/{count}"))
        is_traced = memory_bytes_max is not None and (count % TRACED_EVERY == 0 or options.only is not None)
        limit = memory_bytes_max(len(data)) if memory_bytes_max is not None and is_traced else None
        try:
            tried(data, try_input, limit)
            if options.canary:
                raise AssertionError("the canary sings")
        except Exception:  # noqa: BLE001 - whatever it is, it is the find
            traceback.print_exc(limit=-10)
            print(f"input {count} of seed {seed} failed; repeat it with --seed {seed} --only {count}. Base64:")
            print(base64.b64encode(data).decode())
            sys.exit(1)
        count += 1
        if options.only is not None:
            print(f"input {options.only} was handled")
            return
        if time.monotonic() >= deadline_s:
            print(f"{count} inputs, all handled")
            return
