"""Records are placed as torch's writer places them: one behind the other, data aligned, zip64 where needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpersist.formats.layout import (
    LOCAL_HEADER_BYTES,
    ZIP32_LIMIT,
    Record,
    align_up,
    place_record,
    place_records,
    zip64_extra_bytes,
)

ALIGNMENTS = st.sampled_from([1, 2, 64, 512, 4096, 32768]) | st.integers(1, 32768)
SIZES = st.sampled_from([0, 1, ZIP32_LIMIT - 1, ZIP32_LIMIT, ZIP32_LIMIT + 1]) | st.integers(0, 1 << 40)


@pytest.mark.parametrize(
    ("size_bytes", "header_offset_bytes", "extra_bytes"),
    [
        (0, 0, 0),
        (ZIP32_LIMIT - 1, ZIP32_LIMIT - 1, 0),
        (ZIP32_LIMIT, 0, 20),
        (0, ZIP32_LIMIT, 12),
        (ZIP32_LIMIT, ZIP32_LIMIT, 28),
        (5 << 30, 6 << 30, 28),
    ],
)
def test_sixty_four_bit_fields_are_there_when_needed(
    size_bytes: int, header_offset_bytes: int, extra_bytes: int
) -> None:
    assert zip64_extra_bytes(size_bytes, header_offset_bytes) == extra_bytes


@pytest.mark.parametrize(
    ("size_bytes", "header_offset_bytes", "descriptor_bytes"),
    [(0, 0, 0), (0, 1 << 33, 0), (1, 0, 16), (1, 1 << 33, 24), (ZIP32_LIMIT - 1, 0, 16), (ZIP32_LIMIT, 0, 24)],
)
def test_descriptor_is_as_wide_as_the_header(size_bytes: int, header_offset_bytes: int, descriptor_bytes: int) -> None:
    assert place_record(b"a/b", size_bytes, header_offset_bytes, 64).descriptor_bytes == descriptor_bytes


def test_worked_example() -> None:
    # 30 + 10 bytes of header and name and 4 of padding field end at 44: the data starts at the next multiple of 64.
    record = place_record(b"m/data.pkl", 100, 0, 64)
    assert record == Record(b"m/data.pkl", 100, 0, 64, 16)
    assert record.end_offset_bytes == 64 + 100 + 16
    assert place_record(b"m/version", 2, 180, 64).data_offset_bytes == 256


def test_header_that_ends_on_the_alignment_gets_no_padding() -> None:
    assert place_record(b"x" * 30, 1, 0, 64).data_offset_bytes == 64
    assert place_record(b"x" * 31, 1, 0, 64).data_offset_bytes == 128


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=99), SIZES), max_size=20), ALIGNMENTS, SIZES)
def test_records_fill_the_file_without_gap_or_overlap(
    names_and_sizes: list[tuple[bytes, int]], alignment: int, start: int
) -> None:
    cursor = start
    for record in place_records(names_and_sizes, alignment, start_offset_bytes=start):
        assert record.header_offset_bytes == cursor
        assert record.data_offset_bytes % alignment == 0
        header_bytes = record.data_offset_bytes - cursor
        least = LOCAL_HEADER_BYTES + len(record.name) + 4 + zip64_extra_bytes(record.size_bytes, cursor)
        assert least <= header_bytes < least + alignment
        assert header_bytes - LOCAL_HEADER_BYTES - len(record.name) <= 0xFFFF  # the extra field's length
        cursor = record.end_offset_bytes
        assert cursor == record.data_offset_bytes + record.size_bytes + record.descriptor_bytes


@given(st.integers(0, 1 << 64), st.integers(1, 1 << 20))
def test_align_up_is_the_least_multiple(value: int, alignment: int) -> None:
    result = align_up(value, alignment)
    assert result % alignment == 0
    assert 0 <= result - value < alignment
