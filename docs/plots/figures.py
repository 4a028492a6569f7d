"""Measure and draw the figures of README and docs: `make figures DIR=…`, or without make.

python docs/plots/figures.py measure DIR [NAME …]    # fastpersist bench, then docs/plots/NAME.json
python docs/plots/figures.py draw [NAME …]           # docs/plots/NAME.json, then docs/assets/NAME.svg

The JSON of a figure has what the picture shows and no more: the times of each row, the command, the date, and what of
the machine explains them. A bar is the median of its row, its whisker the shortest and the longest. The same JSON gives
the same bytes of SVG; its colors follow the reader's setting, light or dark.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parents[1]
MACHINE = (
    "date",
    "cpu_model",
    "cpu_count",
    "memory_bytes",
    "kernel",
    "architecture",
    "device_model",
    "file_system",
    "torch",
    "fastpersist",
    "fio",
)
WIDTH, TOP, ROW, LABEL, RIGHT, COLUMNS = 860, 74, 40, 250, 160, 118
STYLE = """\
text{fill:#37474f;font-family:system-ui,sans-serif;font-size:14px}.t{font-size:18px;font-weight:600}.n{font-size:12px}
.v{font-weight:600}.e{text-anchor:end}.card{fill:#fff}.base{fill:#78909c}.own{fill:#3949ab}.other{fill:#ef9a5d}
.w{stroke:#263238;stroke-width:1.5}.d{stroke:#78909c;stroke-dasharray:4 4}
@media(prefers-color-scheme:dark){text{fill:#cfd8dc}.card{fill:#1e2129}.own{fill:#7986cb}.w{stroke:#eceff1}}"""


class Figure(NamedTuple):
    """A picture of bars.

    Attributes:
        title: What each bar shows.
        command: The words of the benchmark's command line, without the directory.
        quick: Options that make it short, to try it.
        condense: Takes the benchmark's JSON; returns the facts below the title, and the rows.
        relation: Returns the text beside a bar's seconds, from its samples and those of the first bar, round by round.
    """

    title: str
    command: list[str]
    quick: list[str]
    condense: Callable[[dict[str, Any]], tuple[str, list[dict[str, Any]]]]
    relation: Callable[[list[float], list[float]], str]


def overlap_rows(results: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the median step of each run, and what of it was stall."""
    rows = []
    for row in results["rows"]:
        if row.get("runs") and not row["note"]:  # with a note, it failed in some round
            samples = [statistics.median(step["step_s"] for step in run["steps"]) for run in row["runs"]]
            stalls = [step["gate_s"] + step["save_s"] for run in row["runs"] for step in run["steps"]]
            rows.append({"name": row["name"], "samples_s": samples, "stall_s": statistics.median(stalls)})
    rows.sort(key=lambda row: kind_of(row["name"]) != "base")  # limits first
    return f"{results['training']['state_bytes'] / 1e9:.2f} GB of parameters and moments", rows


SHOWN = (
    "fp.save",
    "fp.save .safetensors",
    "torch.save + fsync, CRC on",
    "torch.save + fsync, CRC off",
    "safetensors save_file + fsync",
    "DCP FileSystemWriter, 2 threads",
    "fp.load",
    "fp.load_into",
    "fp.load .safetensors",
    "torch.load",
    "torch.load(mmap=True), touched",
    "safetensors load_file, touched",
)
"""The rows of `bench save` and `bench load` that the pictures show beside fio: ours as users call them, and others."""


def file_rows(results: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the seconds of the rows that are shown."""
    state = results["states"][0]
    rows = [
        {"name": row["name"], "samples_s": row["seconds"]}
        for row in state["rows"]
        if row.get("seconds") and (row["name"] in SHOWN or row["kind"] == "ceiling")
    ]
    return f"{state['payload_bytes'] / 1e9:.2f} GB in {state['tensor_count']} tensors", rows


def added(samples: list[float], first: list[float]) -> str:
    """Say by what the runs are longer than those of the first row, round by round."""
    ratios = [one / plain - 1 for one, plain in zip(samples, first, strict=True)]
    return f"{100 * statistics.median(ratios):+.0f} %"


def times(samples: list[float], first: list[float]) -> str:
    """Say how many times the first row's median this one's is."""
    return f"{statistics.median(samples) / statistics.median(first):.1f} ×"


STATE = ["--state", "one-tensor", "--size-mb", "512", "--repeat", "3"]
BARE_LOOP = "O_DIRECT loop"
LIMITS = ("no checkpoints", BARE_LOOP, "fio write", "fio read")
OTHER_WAYS = ("torch.save + fsync", "dcp.async_save", "dcp.async_save, stager kept")
FIGURES = {
    "overlap": Figure(
        "A training step with a checkpoint in every step",
        ["overlap", "--size-mb", "256", "--repeat", "7", "--ways", "fp.Checkpointer", BARE_LOOP, *OTHER_WAYS],
        ["--size-mb", "4", "--repeat", "1", "--steps", "2", "--step-ms", "20"],
        overlap_rows,
        added,
    ),
    "save": Figure("Save until the file is durable", ["save", *STATE], ["--quick"], file_rows, times),
    "load": Figure("Load from the disk, nothing in the page cache", ["load", *STATE], ["--quick"], file_rows, times),
}


def measure(name: str, directory: str, plots: Path, *, quick: bool) -> None:
    """Run the benchmark of a figure and write its JSON."""
    figure = FIGURES[name]
    words = [figure.command[0], directory, *figure.command[1:], *(figure.quick if quick else ())]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([sys.executable, "-m", "fastpersist", "bench", *words, "--json", file.name], check=True)
        results = json.load(file)
    state, rows = figure.condense(results)
    if not rows:
        raise SystemExit(f"no row of the figure {name} was measured")
    shown = shlex.join(["DIR" if word == directory else word for word in words])
    content = {
        "format": 1,
        "figure": name,
        "command": f"fastpersist bench {shown}",
        "state": state,
        "machine": {key: value for key in MACHINE if (value := results["machine"].get(key))},
        "rows": rows,
    }
    plots.mkdir(parents=True, exist_ok=True)
    (plots / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def text(x: float, y: float, words: str, kinds: str = "") -> str:
    """Return a line of text."""
    attribute = f' class="{kinds}"' if kinds else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{attribute}>{escape(words)}</text>'


def kind_of(name: str) -> str:
    """Return whose bar it is, for its color: ours, a limit's, or another's."""
    if name.startswith("fp."):
        return "own"
    return "base" if name in LIMITS else "other"


def picture(content: dict[str, Any]) -> str:
    """Return the SVG of a figure."""
    figure, rows, machine = FIGURES[content["figure"]], content["rows"], content["machine"]
    scale = (WIDTH - LABEL - RIGHT) / max(max(row["samples_s"]) for row in rows)
    first = rows[0]["samples_s"]
    facts = [
        machine["date"][:10],
        f"{machine['cpu_count']} CPUs {machine['cpu_model']}",
        f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        f"Linux {machine['kernel'].partition('-')[0]}",
        f"{machine['file_system']} {machine.get('device_model', '')}".strip(),
        f"torch {machine['torch']}",
        "medians, shortest and longest",
    ]
    notes = [*textwrap.wrap(content["command"], COLUMNS), *textwrap.wrap(", ".join(facts), COLUMNS)]
    bottom = TOP + ROW * len(rows)
    height = bottom + 20 + 18 * len(notes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(figure.title)}, by method</title><style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" class="card"/>',
        text(20, 30, figure.title, "t"),
        text(20, 52, f"seconds; {content['state']}; shorter is better"),
    ]
    for number, row in enumerate(rows):
        samples = row["samples_s"]
        y = TOP + ROW * number
        middle, length = y + ROW / 2, statistics.median(samples) * scale
        end = LABEL + max(samples) * scale
        beside = f"  {figure.relation(samples, first)}" if number else ""
        parts += [
            text(LABEL - 10, middle + 5, row["name"], "e"),
            f'<rect x="{LABEL}" y="{y + 8}" width="{length:.1f}" height="{ROW - 16}" rx="3" '
            f'class="{kind_of(row["name"])}"/>',
            f'<path d="M{LABEL + min(samples) * scale:.1f} {middle:.0f} H{end:.1f}" class="w"/>',
            text(end + 10, middle + 5, f"{statistics.median(samples):.2f} s{beside}", "v"),
        ]
    dashes = LABEL + statistics.median(first) * scale
    parts.append(f'<path d="M{dashes:.1f} {TOP} V{bottom}" class="d"/>')
    parts += [text(20, bottom + 24 + 18 * number, line, "n") for number, line in enumerate(notes)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw(name: str, plots: Path, assets: Path) -> None:
    """Draw a figure from its JSON."""
    assets.mkdir(parents=True, exist_ok=True)
    (assets / f"{name}.svg").write_text(picture(json.loads((plots / f"{name}.json").read_text())))


def main() -> None:
    """Measure and draw, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "draw"))
    parser.add_argument("words", nargs="*", metavar="DIR|NAME")
    parser.add_argument("--docs", type=Path, default=DOCS, help="write below there, not into docs/")
    parser.add_argument("--quick", action="store_true", help="small states, one round: to try it out")
    arguments = parser.parse_args()
    is_measured = arguments.action == "measure"
    if is_measured and not arguments.words:
        parser.error("measure needs a directory on the disk to measure")
    plots = arguments.docs / "plots"
    names = arguments.words[is_measured:] or [
        name for name in FIGURES if is_measured or (plots / f"{name}.json").exists()
    ]
    if unknown := set(names) - set(FIGURES):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    for name in names:
        if is_measured:
            measure(name, arguments.words[0], plots, quick=arguments.quick)
        draw(name, plots, arguments.docs / "assets")


if __name__ == "__main__":
    main()
