"""The report as one HTML page: no network, no script, light or dark as the reader's browser is set.

A policy in the page forbids everything but its own style sheet, for the case that an escape were ever missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from fastpersist.cli.report.charts import Chart, charts_of
from fastpersist.cli.report.records import Run
from fastpersist.cli.report.svg import chart_svg
from fastpersist.display import duration_text, html_text, rate_text, size_text, time_text

__all__ = ["html_page"]

_STEPS_SHOWN = 100
_RANKS_SHOWN = 64

_STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#22262e;--soft:#5c6572;--line:#e1e4ea;
--c0:#d1495b;--c1:#8ea3b8;--c2:#3949ab;--c3:#e8973a;--c4:#2e8b7a;--c5:#8d5fb0}
@media(prefers-color-scheme:dark){:root{--bg:#14161b;--card:#1e2129;--ink:#e6e8ec;--soft:#9aa3b0;--line:#323743;
--c0:#ef7585;--c1:#7288a0;--c2:#8490e8;--c3:#f0ae62;--c4:#56b8a5;--c5:#b78ad6}}
*{box-sizing:border-box}
body{margin:0;padding:clamp(12px,3vw,32px);background:var(--bg);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto}
h1{font-size:1.35rem;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:1rem;margin:0 0 6px}
p{margin:4px 0;color:var(--soft);overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:10px;margin:16px 0}
.fact,section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;min-width:0}
.fact b{display:block;font-size:1.2rem}.fact span{color:var(--soft);font-size:.85rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:12px}
section.wide{margin-top:12px}section p{font-size:.85rem}
svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--ink)}
svg .e{text-anchor:end}svg .m{text-anchor:middle}svg .n{fill:var(--soft)}
.grid{stroke:var(--line);fill:none}.l{fill:none;stroke-width:2;stroke-linejoin:round}.dashes{stroke-dasharray:6 5}
.scroll{overflow:auto;max-height:30rem;margin-bottom:6px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500}td.text,th.text{text-align:left}
td.long{text-align:left;white-space:normal;min-width:16rem;overflow-wrap:anywhere}
footer{margin-top:16px}
"""
_COLORS = "".join(f".f{n}{{fill:var(--c{n})}}.s{n}{{stroke:var(--c{n})}}" for n in range(6))
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(run: Run) -> str:
    """Return the page of a run."""
    title = f"Checkpoints of {run.path}"
    charts = "".join(_card(chart) for chart in charts_of(run))
    body = [
        f"<h1>{html_text(title)}</h1>",
        f"<p>{html_text(_source(run))}</p>",
        f'<div class="facts">{"".join(_fact(value, name) for value, name in _facts(run))}</div>',
        f'<div class="charts">{charts}</div>' if charts else "<p>There is no save of which anything is known.</p>",
        _failures(run),
        _ranks(run),
        _steps(run),
        f"<footer><p>Made by <code>fastpersist report</code> on {html_text(time_text(time.time()))}.</p></footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{_STYLE}{_COLORS}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _source(run: Run) -> str:
    if not run.has_log:
        return "From the manifests of the steps that are there. Without a log of events, removed steps are missing."
    left = f" {run.left_out_count} earlier saves are left out." if run.left_out_count else ""
    return f"From the log of events in the root, and the manifests of the steps that are there.{left}"


def _fact(value: str, name: str) -> str:
    return f'<div class="fact"><b>{html_text(value)}</b><span>{html_text(name)}</span></div>'


def _facts(run: Run) -> list[tuple[str, str]]:
    good = [save for save in run.saves if save.kind == "committed"]
    stalls = [stall_s for save in good if (stall_s := save.get("stall_s")) is not None]
    rates = [rate for save in good if (rate := save.rate_bytes_per_s) is not None]
    facts = [(str(len(good)), "saves committed"), (str(len(run.steps_there)), "steps that are there")]
    if run.kept:
        facts.append((size_text(int(run.kept[-1][2])), "kept on the disk"))
    if stalls:
        facts += [
            (duration_text(median(stalls)), "lost to a save (median)"),
            (duration_text(max(stalls)), "longest stall"),
        ]
    if rates:
        facts.append((rate_text(median(rates)), "rate of writing (median)"))
    if run.disk_bytes_per_s is not None:
        facts.append((rate_text(run.disk_bytes_per_s), "the disk's own rate"))
    facts.append((str(run.failure_count), "saves failed"))
    if run.skipped_count:
        facts.append((str(run.skipped_count), "saves left out"))
    if len(run.ranks) > 1:
        facts.append((str(len(run.ranks)), "ranks"))
    return facts


def _card(chart: Chart) -> str:
    note = f"<p>{html_text(chart.note)}</p>" if chart.note else ""
    return f'<section id="{chart.name}"><h2>{html_text(chart.title)}</h2>{chart_svg(chart)}{note}</section>'


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], texts: int, note: str = "") -> str:
    """Return a card with a table whose last `texts` columns are texts; a single one may be long."""
    kinds = ["" if number < len(headers) - texts else ' class="text"' for number in range(len(headers))]
    cell_kinds = [*kinds[:-1], ' class="long"'] if texts == 1 else kinds
    head = "".join(f"<th{kind}>{html_text(name)}</th>" for kind, name in zip(kinds, headers, strict=True))
    lines = [
        f"<tr>{''.join(f'<td{kind}>{html_text(cell)}</td>' for kind, cell in zip(cell_kinds, row, strict=True))}</tr>"
        for row in rows
    ]
    return (
        f'<section class="wide"><h2>{html_text(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{f'<p>{html_text(note)}</p>' if note else ''}</section>"
    )


def _failures(run: Run) -> str:
    """Return the failures, those with the same words as one row."""
    if not run.failures:
        return ""
    alike: dict[str, list[tuple[float, int, int]]] = {}
    for time_s, step, rank, message in reversed(run.failures):
        alike.setdefault(message, []).append((time_s, step, rank))
    rows = []
    for message, found in alike.items():
        time_s, step, rank = found[0]
        rows.append((time_text(time_s), "" if step < 0 else str(step), str(rank), str(len(found)), message))
    left = run.failure_count - len(run.failures)
    note = f"{left} earlier failures are not shown." if left > 0 else ""
    return _table("Failures", ("the last", "step", "rank", "times", "what went wrong"), rows, 1, note)


def _ranks(run: Run) -> str:
    if len(run.ranks) < 2 or not any(rank.save_count for rank in run.ranks.values()):
        return ""
    slowest_first = sorted(run.ranks, key=lambda number: (-run.ranks[number].slowest_count, number))
    rows = []
    for number in slowest_first[:_RANKS_SHOWN]:
        rank = run.ranks[number]
        saves = max(1, rank.save_count)
        rows.append(
            (
                str(number),
                str(rank.save_count),
                str(rank.slowest_count),
                duration_text(rank.write_s / saves),
                duration_text(rank.stall_s / saves),
                size_text(int(rank.bytes)),
            )
        )
    left = len(run.ranks) - len(rows)
    headers = ("rank", "saves", "slowest in", "write and sync (mean)", "stall (mean)", "bytes")
    return _table("Who was slow", headers, rows, 0, f"{left} more ranks are not shown." if left else "")


def _steps(run: Run) -> str:
    shown = run.saves[-_STEPS_SHOWN:]
    if not shown:
        return ""
    rows = []
    for save in reversed(shown):
        rows.append(
            (
                "" if save.step < 0 else str(save.step),
                time_text(save.end_s),
                size_text(int(save.get("bytes") or 0)),
                *(duration_text(save.get(f"{name}_s")) for name in ("stall", "capture", "write", "sync", "commit")),
                rate_text(save.rate_bytes_per_s),
                size_text(int((save.get("bytes_at_gate") or 0) + (save.get("bytes_before_return") or 0))),
                save.engine,
                save.kind,
            )
        )
    headers = ("step", "time", "size", "stall", "capture", "write", "sync", "commit", "rate", "copied", "engine", "")
    left = len(run.saves) - len(shown)
    return _table("Saves, the last first", headers, rows, 2, f"{left} earlier saves are not listed." if left else "")
