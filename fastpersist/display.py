"""Formats text for people: sizes, untrusted names, and the HTML tables that a notebook shows for our objects.

Names of tensors, files and software come from untrusted files. `printable` makes them safe for a terminal, `html_text`
for HTML. Other output of the command line is in `cli.terminal`.
"""

from __future__ import annotations

import html
import itertools
import time
from collections.abc import Sequence

__all__ = ["count_text", "duration_text", "html_table", "html_text", "printable", "rate_text", "size_text", "time_text"]

_ROWS_MAX = 30  # more would be too long for a notebook; the object has all of them
_TEXT_MAX = 400  # a name longer than this would hide the others


def printable(text: str) -> str:
    """Escape control and unprintable characters: names in files are untrusted.

    Thread safety: pure.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def html_text(text: str) -> str:
    """Escape a text for HTML, between tags and in attributes; a text of more than 400 characters is cut.

    Thread safety: pure.
    """
    if len(text) > _TEXT_MAX:
        text = text[:_TEXT_MAX] + "…"
    return html.escape(printable(text))


def count_text(count: int, noun: str) -> str:
    """Count things: "1 tensor", "2 tensors".

    Thread safety: pure.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(size_bytes: int) -> str:
    """Format a size in decimal units, with about three digits: "38.4 MB".

    Thread safety: pure.
    """
    size: float = size_bytes
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def rate_text(bytes_per_s: float | None) -> str:
    """Format a rate: "2.31 GB/s"; "" for None.

    Thread safety: pure.
    """
    return "" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"


def duration_text(seconds: float | None) -> str:
    """Format a time with three digits: "4.2 ms", "1.35 s", "12 min"; "" for None.

    Thread safety: pure.
    """
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def time_text(time_s: float | None) -> str:
    """Format a Unix time in the local time zone: "2026-11-23 11:32:06"; "" for None or a time that no calendar has.

    Thread safety: pure.
    """
    if time_s is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        return ""


def html_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Make a title, a table and notes for a notebook. Everything is escaped.

    Args:
        title: What the object is.
        headers: Names of the columns; () for a table of names and values.
        rows: The cells of each row; the first 30 rows are shown, and how many more there are. An empty column
            is left out.
        notes: Sentences below the table.

    Thread safety: pure.
    """
    left = ' style="text-align:left"'
    used = [any(row[column] for row in rows) for column in range(len(headers))]
    if headers:
        headers = tuple(itertools.compress(headers, used))
        rows = [tuple(itertools.compress(row, used)) for row in rows]
    parts = [f"<div><p><strong>{html_text(title)}</strong></p>"]
    if rows:
        parts.append("<table>")
        if headers:
            parts.append(f"<thead><tr>{''.join(f'<th{left}>{html_text(name)}</th>' for name in headers)}</tr></thead>")
        parts.append("<tbody>")
        parts += [
            f"<tr>{''.join(f'<td{left}>{html_text(cell)}</td>' for cell in row)}</tr>" for row in rows[:_ROWS_MAX]
        ]
        parts.append("</tbody></table>")
    if len(rows) > _ROWS_MAX:
        notes = (f"… and {len(rows) - _ROWS_MAX} more", *notes)
    parts += [f"<p>{html_text(note)}</p>" for note in notes]
    return "".join(parts) + "</div>"
