"""Hooks of mkdocs: pages that are made from the code and from files outside docs/, so that they cannot go stale.

Made here: `contributing.md` and `changelog.md` from the files in the root of the repository, `reference/cli.md` from
what `command_line.py` has written, and the tree of packages that mkdocstrings reads. The other pages are written by
hand, below docs/.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "build" / "docs" / "packages"
COMMAND_LINE = ROOT / "build" / "docs" / "command_line.md"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Lay out the packages as they are installed: integrations/ lies elsewhere in the repository."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "fastpersist", PACKAGES / "fastpersist", ignore=ignored)
    shutil.copytree(ROOT / "integrations", PACKAGES / "fastpersist" / "integrations", ignore=ignored)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from something else."""
    if not COMMAND_LINE.is_file():
        raise PluginError(f"{COMMAND_LINE} is missing: `make docs` makes it before the site")
    made = {
        "reference/cli.md": COMMAND_LINE.read_text(),
        "contributing.md": page_of_root("CONTRIBUTING.md"),
        "changelog.md": page_of_root("CHANGELOG.md"),
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def page_of_root(name: str) -> str:
    """Return a file of the root as a page: links into docs/ are the site's, other files are only named."""

    def link(found: re.Match[str]) -> str:
        text, path, anchor = found[1], found[2], found[3] or ""
        return f"[{text}]({path.removeprefix('docs/')}{anchor})" if path.startswith("docs/") else text

    return LINK.sub(link, (ROOT / name).read_text())
