"""Fuzz the reader of torch zips: mutated archives, and sound archives around mutated pickles.

    python tests/fuzz/fuzz_torch_zip.py --seconds 5 --seed 1

read_directory may raise FormatError and UnsupportedError only, and must not ask for a byte outside the file. What
it lets pass goes through every reader; whole_files.py says what those may raise. Bounded time and memory always.
"""

from __future__ import annotations

import io
import random
import sys
import zipfile
import zlib
from pathlib import Path

import torch
from fuzzing import main, mutated, reading
from whole_files import outcomes, try_file

from fastpersist.errors import FormatError, UnsupportedError
from fastpersist.formats import torch_zip
from fastpersist.saving.skeleton import pickle_skeleton

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "format-v1"


def states() -> list[object]:
    base = torch.arange(12.0)
    return [
        {"a": torch.ones(4), "b": base.view(2, 6)[:, ::2], "step": 3},
        {"a": base[3:7], "b": base[:6].view(2, 3), "m": torch.empty(3, device="meta"), "empty": [torch.empty(0)] * 2},
        [torch.nn.Parameter(torch.ones(2)), torch.ones(3, dtype=torch.float8_e5m2), torch.ones(2).conj(), {1, 2}],
        {"a": torch.ones(4), "text": "x" * 300, "nested": [[[(base,)]]]},
    ]


def archive(pickled: bytes, storages: list[bytes], alignment: int) -> bytes:
    """Compose a sound archive, checksums included."""
    plan = torch_zip.plan_archive("m", len(pickled), [len(storage) for storage in storages], alignment)
    contents = {0: pickled, **plan.small_records, len(plan.records) - 1: b"1" * 40}
    contents |= {plan.first_storage + key: storage for key, storage in enumerate(storages)}
    crcs = [zlib.crc32(contents[index]) for index in range(len(plan.records))]
    body = b"".join(
        torch_zip.local_header(record) + contents[index] + torch_zip.descriptor(record, crcs[index])
        for index, record in enumerate(plan.records)
    )
    return body + torch_zip.central_directory(plan.records, crcs)


def parts() -> list[tuple[bytes, list[bytes]]]:
    """Return pickle and storages of each state."""
    found = []
    for state in states():
        skeleton = pickle_skeleton(state)
        found.append((skeleton.pickle, [bytes(storage.tolist()) for storage in skeleton.storages]))
    return found


PARTS = parts()
PICKLES = [pickled for pickled, _ in PARTS]


def seeds() -> list[bytes]:
    found = [archive(pickled, storages, alignment) for pickled, storages in PARTS for alignment in (1, 64)]
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", compression) as foreign:
            for name, data in (("m/data.pkl", PICKLES[0]), ("m/data/0", bytes(48)), ("m/version", b"3\n")):
                foreign.writestr(name, data)
        found.append(file.getvalue())
    return found


SEEDS = seeds()
GOLDEN_FILES = [path.read_bytes() for path in sorted(GOLDEN.glob("*.pt"))]


def make_input(rng: random.Random) -> bytes:
    chance = rng.random()
    if chance < 0.30:  # the zip is sound, what is in it is not
        pickled, storages = rng.choice(PARTS)
        return archive(mutated(rng, pickled, PICKLES), storages, rng.choice([1, 64]))
    if chance < 0.35:  # most of a golden file is padding: aim at its directory or its pickle
        data = rng.choice(GOLDEN_FILES)
        start = data.find(b"PK\x01\x02") if rng.random() < 0.5 else 4096
        end = len(data) if start != 4096 else start + 800
        return data[:start] + mutated(rng, data[start:end], SEEDS) + data[end:]
    data = rng.choice(SEEDS)
    if chance < 0.80:  # the directory decides most
        start = data.find(b"PK\x01\x02")
        return data[:start] + mutated(rng, data[start:], SEEDS)
    return mutated(rng, data, SEEDS)


def try_input(data: bytes) -> None:
    try:
        directory = torch_zip.read_directory(reading(data), len(data), path="input")
    except (FormatError, UnsupportedError) as error:
        str(error)
        outcomes["no directory"] += 1
        if len(data) % 8:  # the other readers must come to the same answer; some of them are enough
            return
    else:
        end = 0
        for entry in sorted(directory.entries.values(), key=lambda entry: entry.header_offset_bytes):
            if not end <= entry.header_offset_bytes < entry.data_offset_bytes:
                raise AssertionError(f"record {entry.name} overlaps the one before it")
            end = entry.data_offset_bytes + entry.size_bytes
        if end > len(data):
            raise AssertionError("a record lies outside the file")
    try_file(data)


if __name__ == "__main__":
    # 30 MiB for torch's own modules on first use; the rest is linear: the pickle's symbolic tree, see fuzz_pickle_scan.
    main(make_input, try_input, memory_bytes_max=lambda length: (30 << 20) + 500 * length)
    print(dict(outcomes), file=sys.stderr)
