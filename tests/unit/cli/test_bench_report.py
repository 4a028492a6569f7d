"""What stands above every report of a bench: the command line, which runs the same again, and the machine."""

from __future__ import annotations

import builtins
import shlex
from pathlib import Path
from typing import Any

import pytest

from fastpersist.cli import _parser
from fastpersist.cli.bench.report import command_line_text, machine_facts


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("bench save /d", "fastpersist bench save /d"),
        ("bench load /d --repeat 2 --json x --warm", "fastpersist bench load /d --repeat 2 --warm"),
        (
            "bench save /d --quick --state one-tensor --state gpt2-124m --engine uring --engine threads",
            "fastpersist bench save /d --state one-tensor --state gpt2-124m --engine uring threads --quick",
        ),
        (
            "bench io /d --sync --block 1MiB --block 4096 --no-fio",
            "fastpersist bench io /d --block 1MiB 4KiB --sync --no-fio",
        ),
        ("bench overlap '/a b' --soak 9 --growth-mb 3", "fastpersist bench overlap '/a b' --soak 9 --growth-mb 3"),
        (
            "bench overlap /d --ways all 'torch.save + fsync' --size-mb 512",
            "fastpersist bench overlap /d --ways all 'torch.save + fsync'",
        ),
        ("bench ranks /d --sharded --between 0.01", "fastpersist bench ranks /d --sharded --between 0.01"),
        ("bench rows /d --size 8GiB --depth 64 256", "fastpersist bench rows /d"),
        ("rows bench /d --size 2GB --depth 64", "fastpersist rows bench /d --size 2GB --depth 64"),
        ("bench stream /d --budget 1GiB half", "fastpersist bench stream /d --budget 1GiB half"),
    ],
)
def test_command_line_is_what_differs_from_the_defaults(words: str, text: str) -> None:
    arguments = _parser()[0].parse_args(shlex.split(words))

    assert command_line_text(arguments) == text

    again = _parser()[0].parse_args(shlex.split(text)[1:])
    for one in (arguments, again):
        del one.parser
        one.json = None
    assert again == arguments


def test_facts_on_the_machine_need_no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = open

    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", opened)
    facts = machine_facts(str(tmp_path))
    assert facts["cpu_model"] == ""
    assert facts["file_system"] == "unknown"
