"""docs/plots/figures.py: the pictures in the repository are those of its JSON, and a measurement makes new ones.

It starts benchmarks, each of which imports torch several times.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPT = DOCS / "plots" / "figures.py"
STORED = sorted(path.stem for path in (DOCS / "plots").glob("*.json"))


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def content_of(docs: Path, name: str) -> dict[str, Any]:
    content = json.loads((docs / "plots" / f"{name}.json").read_text())
    assert isinstance(content, dict)
    return content


def test_figures_are_those_that_are_looked_at(figures: ModuleType) -> None:
    assert {"overlap", "load"} <= set(STORED) <= set(figures.FIGURES)


@pytest.mark.parametrize("name", STORED)
def test_picture_in_the_repository_is_that_of_its_json(figures: ModuleType, name: str, tmp_path: Path) -> None:
    figures.draw(name, DOCS / "plots", tmp_path)
    assert (tmp_path / f"{name}.svg").read_text() == (DOCS / "assets" / f"{name}.svg").read_text()


@pytest.mark.parametrize("name", STORED)
def test_json_says_when_and_where_and_no_more(name: str) -> None:
    machine = content_of(DOCS, name)["machine"]
    assert {"date", "cpu_count", "memory_bytes", "kernel"} <= set(machine)
    assert not {"directory", "device", "mount_options", "load_average", "host"} & set(machine)
    assert content_of(DOCS, name)["command"].startswith(f"fastpersist bench {name} DIR ")


def test_bar_is_the_median_and_its_whisker_the_extremes(figures: ModuleType) -> None:
    content = content_of(DOCS, "load")
    content["rows"] = [{"name": "fio", "samples_s": [1.0, 1.0, 1.0]}, {"name": "<b>", "samples_s": [1.0, 4.0, 2.0]}]
    svg = figures.picture(content)
    root = ElementTree.fromstring(svg)  # well-formed
    bars = [float(one.attrib["width"]) for one in root if "rx" in one.attrib and "x" in one.attrib]
    assert bars == [pytest.approx(112.5), pytest.approx(225.0)]
    assert "2.00 s  2.0 ×" in svg
    assert 'd="M362.5 134 H700.0"' in svg


def test_slowdown_is_that_of_the_rounds(figures: ModuleType) -> None:
    assert figures.added([1.1, 2.4, 3.6], [1.0, 2.0, 3.0]) == "+20 %"


@pytest.mark.long  # forty seconds
def test_command_measures_and_draws(tmp_path: Path) -> None:
    words = ["measure", str(tmp_path), "load", "--quick", "--docs", str(tmp_path / "docs")]
    subprocess.run([sys.executable, SCRIPT, *words], check=True, stdout=subprocess.DEVNULL, timeout=540)
    content = content_of(tmp_path / "docs", "load")
    assert str(tmp_path) not in json.dumps(content)
    assert {"fp.load", "torch.load"} <= {row["name"] for row in content["rows"]}
    ElementTree.parse(tmp_path / "docs" / "assets" / "load.svg")


def test_unknown_figure_is_refused() -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, "draw", "quux"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "there is no figure quux; there are overlap, save, load" in ended.stderr
