"""`fastpersist merge` of shards gives the state that `Checkpointer.load` gives, and runs nothing that lies in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.sameness import assert_same
from support.store_runs import step_path

import fastpersist as fp
from fastpersist.cli import main


class MadeBy:
    """What leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_optimizer_of_a_merged_step_finds_the_state_of_its_parameters(tmp_path: Path) -> None:
    model, optimizer = trained()
    with fp.Checkpointer(tmp_path, sharded=True) as checkpoints:
        checkpoints.save(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}).result(30)
        loaded = checkpoints.load(1)
    assert main(["merge", str(step_path(tmp_path, 1)), str(tmp_path / "state.pt"), "--quiet"]) == 0
    merged = torch.load(tmp_path / "state.pt")
    assert_same(merged, loaded)
    new_model, new_optimizer = trained()
    new_model.load_state_dict(merged["model"])
    new_optimizer.load_state_dict(merged["optimizer"])
    for old, new in zip(model.parameters(), new_model.parameters(), strict=True):
        assert_same(new_optimizer.state[new], optimizer.state[old])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch 2.7, of its own writer
def test_objects_that_run_code_are_refused_unless_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed.checkpoint as dcp

    ran = tmp_path / "ran"
    dcp.save({"a": torch.ones(3), "made": MadeBy(ran)}, checkpoint_id=tmp_path / "shards", no_dist=True)
    ran.unlink(missing_ok=True)
    words = ["merge", str(tmp_path / "shards"), str(tmp_path / "state.pt")]
    assert main(words) != 0
    told = capsys.readouterr().err
    assert "'made'" in told
    assert "--no-weights-only" in told
    assert not ran.exists()
    assert not (tmp_path / "state.pt").exists()
    assert main([*words, "--no-weights-only"]) == 0
    assert ran.exists()
    assert torch.load(tmp_path / "state.pt", weights_only=False)["a"].tolist() == [1, 1, 1]
