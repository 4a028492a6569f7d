"""Text for people: what comes from files of others commands neither a terminal nor a notebook."""

from __future__ import annotations

import pytest

from fastpersist.display import (
    count_text,
    duration_text,
    html_table,
    html_text,
    printable,
    rate_text,
    size_text,
    time_text,
)


def test_printable_escapes_what_would_command_a_terminal() -> None:
    assert printable("a\x1b[2Jé\n") == "a\\x1b[2Jé\\n"


def test_html_text_escapes_tags_quotes_and_controls() -> None:
    assert html_text("<b>'&\"\u202e") == "&lt;b&gt;&#x27;&amp;&quot;\\u202e"


def test_html_text_cuts_what_would_hide_the_rest() -> None:
    assert html_text("x" * 400) == "x" * 400
    assert html_text("x" * 401) == "x" * 400 + "…"


@pytest.mark.parametrize(
    ("size_bytes", "said"), [(0, "0 bytes"), (999, "999 bytes"), (38_400_000, "38.4 MB"), (5 * 10**9, "5.00 GB")]
)
def test_sizes_are_decimal(size_bytes: int, said: str) -> None:
    assert size_text(size_bytes) == said


def test_one_thing_is_singular() -> None:
    assert [count_text(count, "tensor") for count in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]


@pytest.mark.parametrize(
    ("seconds", "said"), [(None, ""), (0.0042, "4.2 ms"), (1.35, "1.35 s"), (119.6, "120 s"), (720, "12 min")]
)
def test_times_have_three_digits(seconds: float | None, said: str) -> None:
    assert duration_text(seconds) == said


@pytest.mark.parametrize("time_s", [None, 1e300, float("inf"), float("nan")])
def test_time_that_no_calendar_has_is_left_out(time_s: float | None) -> None:
    assert time_text(time_s) == ""


def test_time_is_a_date() -> None:
    assert time_text(1e9)[:7] == "2001-09"


def test_table_escapes_title_headers_cells_and_notes() -> None:
    made = html_table("<t>", ("<h>",), [("<c>",)], ("<n>",))
    assert "<t>" not in made
    assert [f"&lt;{name}&gt;" in made for name in "thcn"] == [True] * 4
    assert made.count("<tr>") == made.count("</tr>") == 2


def test_table_without_rows_is_a_title_and_notes() -> None:
    assert html_table("title", ("a",), []) == "<div><p><strong>title</strong></p></div>"


def test_long_table_shows_its_beginning_and_says_how_much_is_left() -> None:
    made = html_table("t", (), [(f"row {number}!",) for number in range(100)])
    assert ("row 29!" in made, "row 30!" in made) == (True, False)
    assert "… and 70 more" in made


def test_column_of_empty_cells_is_left_out() -> None:
    made = html_table("t", ("name", "file"), [("a", ""), ("b", "")])
    assert ("name" in made, "file" in made, made.count("<td")) == (True, False, 2)


def test_rates_are_in_gb_per_second() -> None:
    assert rate_text(2_314_000_000.0) == "2.31 GB/s"
    assert rate_text(None) == ""
