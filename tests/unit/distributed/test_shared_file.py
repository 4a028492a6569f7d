"""A file written by several ranks, which are threads here: byte for byte what the first rank alone writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.shared_files import MIB, expected_file, save_with, state_of


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
def test_no_page_of_any_machine_is_written_by_two_ranks(tmp_path: Path, name: str) -> None:
    page_bytes = 1 << 16
    state = {key: value.contiguous() for key, value in state_of(0).items() if isinstance(value, torch.Tensor)}
    path = tmp_path / name
    outcomes = save_with(3, lambda _: state, path, block_bytes=page_bytes)
    share, _ = outcomes[0]
    assert path.read_bytes() == expected_file(state, path)
    offsets = dict(enumerate(share.container.offsets))
    pages = []
    for rank in (1, 2):
        extents = share.extents_of(rank, offsets)
        assert sum(size_bytes for _, size_bytes in extents) > MIB
        for offset_bytes, size_bytes in extents:
            assert offset_bytes % page_bytes == size_bytes % page_bytes == 0
            pages += range(offset_bytes // page_bytes, (offset_bytes + size_bytes) // page_bytes)
    assert len(set(pages)) == len(pages)
    assert max(share.bytes_by_rank()) - min(share.bytes_by_rank()) <= page_bytes


def test_only_the_chosen_ranks_write(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    share, _ = save_with(4, state_of, path, writers=[0, 2])[0]
    sizes = share.bytes_by_rank()
    assert sizes[1] == sizes[3] == 0
    assert abs(sizes[0] - sizes[2]) <= 4096
    assert path.read_bytes() == expected_file(state_of(0), path)
