"""Fuzz successive saves: the file of each Checkpointer.save has the bytes that fp.save writes of the same state.

    python tests/fuzz/fuzz_successive_saves.py --seconds 5 --seed 1

An input is the seed of an object (support/random_states.py) and how often it is changed and saved again.
"""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzzing import main
from support.successive_saves import save_and_compare


def make_input(rng: random.Random) -> bytes:
    return rng.randbytes(4) + bytes([rng.randrange(6)])


def try_input(data: bytes) -> None:
    save_and_compare(int.from_bytes(data[:4], "little"), change_count=data[4])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(make_input, try_input)
