"""Records of progress: a torn page leaves the one before, and nothing else passes for a record."""

from __future__ import annotations

import random

import pytest

from fastpersist.errors import ConfigError
from fastpersist.rows.progress import PAGE_BYTES, Progress, encode_page, newest_of, records_of

OLD = Progress(".npy torch.float32 (128,)", 1 << 30, 0x12345678)
NEW = Progress(".npy torch.float32 (128,)", 2 << 30, 0xFFFFFFFF)
NEWER = Progress(".npy torch.float32 (128,)", 3 << 30, 0)


@pytest.mark.parametrize("records", [[None, None], [OLD, None], [None, NEW], [NEW, OLD]])
def test_records_come_back_in_their_places(records: list[Progress | None]) -> None:
    page = encode_page(records)
    assert len(page) == PAGE_BYTES
    assert records_of(page) == records


def test_the_newest_counts_the_most() -> None:
    assert newest_of([NEW, OLD]) == newest_of([OLD, NEW]) == NEW
    assert newest_of([None, OLD]) == OLD
    assert newest_of([None, None]) is None


def test_a_torn_page_leaves_the_record_before() -> None:
    before, after = encode_page([OLD, NEW]), encode_page([NEWER, NEW])
    rng = random.Random(0)
    for _ in range(200):
        torn = bytearray(before)
        for start in rng.sample(range(0, PAGE_BYTES, 512), rng.randint(0, 8)):
            torn[start : start + 512] = after[start : start + 512]
        assert newest_of(records_of(bytes(torn))) in (NEW, NEWER)


def test_damage_is_no_record() -> None:
    page = encode_page([OLD, None])
    used = page.index(b"\0")
    for at in range(used):
        damaged = bytearray(page)
        damaged[at] ^= 1
        assert newest_of(records_of(bytes(damaged))) is None
    for data in (b"", bytes(10), page[:100], b"\x93NUMPY" + bytes(4000)):
        assert records_of(data) == [None, None]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="dimensions"):
        encode_page([Progress("x" * 3000, 0, 0), None])
