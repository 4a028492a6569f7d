"""What a save would do with a state is told without saving it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runs import Run

import fastpersist as fp
from fastpersist.checkpointer.explain import explain
from fastpersist.saving.ownership import Owners


def test_explain_counts_each_kind_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run().advance()
    frozen = torch.nn.Linear(500, 500)
    checkpointer = fp.Checkpointer(tmp_path / "run", optimizer=run.optimizer, constant=frozen)
    text = checkpointer.explain({**run.state(), "frozen": frozen.state_dict()})
    assert capsys.readouterr().out == ""
    rows = {line.split()[0]: line.split()[1::2] for line in text.splitlines()[1:7]}
    assert [float(value) for value in rows["model"]] == [pytest.approx(0.14, abs=0.01), 0, 0]
    assert [float(value) for value in rows["frozen"]] == [0, pytest.approx(1.0, abs=0.01), 0]
    assert [float(value) for value in rows["position"]] == [0, 0, pytest.approx(0.0, abs=0.01)]
    assert "ms" in text
    assert not (tmp_path / "run").exists()
    run.advance()  # and no step waits for what was only explained


def test_explain_names_what_lies_under_no_key_and_why_state_is_copied() -> None:
    frozen, copied = torch.ones(250_000), torch.ones(500_000)
    lines = explain([copied, {"frozen": frozen}], Owners(None, frozen, "optimizer")).splitlines()
    assert lines[0].split() == ["key", "stable", "constant", "volatile"]
    rows = {line.split()[0]: line.split()[1::2] for line in lines[1:4]}
    assert rows == {"[0]": ["0.00", "0.00", "2.00"], "[1]": ["0.00", "1.00", "0.00"], "all": ["0.00", "1.00", "2.00"]}
    assert lines[4].startswith("save() returns after about ")
    assert lines[5:] == ["not all of the optimizer's state is stable: no optimizer was given"]


def test_state_that_cannot_be_saved_is_refused_as_by_save() -> None:
    with pytest.raises(Exception, match=r"pickle|lambda"):
        explain({"a": lambda: 1}, Owners(None, (), "optimizer"))
