"""What ranks do together: the failure of one is raised on all, by the class that the others choose."""

from __future__ import annotations

import pytest
from support.process_groups import run_ranks

from fastpersist import StorageError
from fastpersist.integrations._shared.agreement import PeerFailure, is_first_rank, on_all_ranks


class HeardOf(Exception):
    """What the others raise."""


def heard_of(failure: PeerFailure) -> Exception:
    return HeardOf(*failure)


def test_one_rank_alone_does_its_work() -> None:
    assert is_first_rank()
    assert on_all_ranks(lambda: 7, heard_of) == [7]
    with pytest.raises(ZeroDivisionError):
        on_all_ranks(lambda: 1 // 0, heard_of)


def test_all_ranks_have_the_results_of_all_or_one_failure() -> None:
    def work(rank: int, _count: int) -> tuple[list[int], list[str]]:
        told = []
        for failure in (StorageError(5, "the disk is gone"), ValueError("no")):

            def fail_on_the_last(failure: Exception = failure) -> None:
                if rank == 2:
                    raise failure

            try:
                on_all_ranks(fail_on_the_last, heard_of)
            except Exception as error:  # noqa: BLE001 - told to the test
                told.append(repr(error))
        return on_all_ranks(lambda: rank * 10, heard_of), told

    results = run_ranks(3, work)
    assert [found for found, _ in results] == [[0, 10, 20]] * 3
    own = [repr(StorageError(5, "the disk is gone")), "ValueError('no')"]
    text = f"StorageError: {StorageError(5, 'the disk is gone')}"
    others = [repr(HeardOf(2, text, True)), repr(HeardOf(2, "ValueError: no", False))]
    assert [told for _, told in results] == [others, others, own]
