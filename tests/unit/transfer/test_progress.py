"""What a progress bar shows of a transfer, and that nothing is left of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fastpersist.transfer import progress
from fastpersist.transfer.progress import counted, progress_bar, showing_progress


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bars that are made."""
    made: list[Any] = []
    monkeypatch.setattr(progress, "progress_bar", lambda **options: made.append(progress_bar(**options)) or made[-1])
    return made


def test_bar_follows_the_bytes_and_is_full_at_the_end(bars: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    with showing_progress("/somewhere/model.pt", 4_000_000, wanted=True) as poll:
        assert poll is not None
        for done_bytes, shown_bytes in ((0, 0), (1_000_000, 1_000_000), (3_999_999, 3_999_999), (4_000_100, 4_000_000)):
            poll(done_bytes)  # at the end with the padding of the last block
            assert bars[0].n == shown_bytes
    shown = capfd.readouterr()
    assert "model.pt: 100%" in shown.err
    assert "4.00M/4.00M" in shown.err
    assert "/somewhere" not in shown.err
    assert shown.out == ""


def test_bar_of_a_transfer_that_never_polled_is_full_at_the_end(bars: list[Any]) -> None:
    with showing_progress("model.pt", 100, wanted=True):
        pass
    assert bars[0].n == 100


def test_bar_of_a_transfer_that_failed_stays_where_it_was(bars: list[Any]) -> None:
    with pytest.raises(OSError, match="disk"), showing_progress("model.pt", 100, wanted=True) as poll:
        assert poll is not None
        poll(40)
        raise OSError("disk")
    assert bars[0].n == 40
    assert bars[0].disable  # closed


def test_reads_in_the_block_are_added_up(bars: list[Any]) -> None:
    own: list[int] = []
    with showing_progress("model.pt", 100, wanted=True):
        first, second = counted(None), counted(own.append)
        assert first is not None
        assert second is not None
        first(10)
        second(20)
        first(30)
        assert bars[0].n == 50
    assert own == [20]
    assert counted(None) is None


def test_nothing_is_shown_unasked(bars: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    with showing_progress("model.pt", 100, wanted=False) as poll:
        assert poll is None
    assert bars == []
    assert capfd.readouterr() == ("", "")


def test_bars_start_no_thread() -> None:
    before = threading.enumerate()  # other packages may show bars of their own
    with progress_bar(total=10) as bar:
        bar.update(10)
        assert [thread for thread in threading.enumerate() if thread not in before] == []
