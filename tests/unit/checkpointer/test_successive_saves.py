"""A state that changes between saves: each step's file is that of a full save. tests/fuzz looks further."""

from __future__ import annotations

import pytest
from support.successive_saves import save_and_compare


@pytest.mark.parametrize("seed", range(15))
def test_each_file_is_that_of_a_full_save(seed: int) -> None:
    assert save_and_compare(seed, change_count=3) == 4
