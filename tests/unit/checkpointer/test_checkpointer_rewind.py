"""A run that went back to an older step comes by the steps again that it could not load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastpersist as fp
from fastpersist.errors import ConfigError


def state(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3000,), float(step))}


def two_steps(root: Path) -> None:
    with fp.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_step_is_replaced_without_being_asked(damage: str, tmp_path: Path) -> None:
    two_steps(tmp_path)
    file = tmp_path / "step-00000002" / "state.pt"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:  # at its length, so that only loading finds it
        file.write_bytes(bytes(len(file.read_bytes())))
    with fp.Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(RuntimeWarning, match="step 2 cannot be loaded"):
            assert torch.equal(checkpointer.load()["weight"], state(1)["weight"])
        checkpointer.save(2, state(22))
        checkpointer.wait()
        assert torch.equal(checkpointer.load()["weight"], state(22)["weight"])


def test_empty_directory_of_a_step_is_replaced_without_being_asked(tmp_path: Path) -> None:
    """A removal that was killed may have left it, or a person."""
    two_steps(tmp_path)
    (tmp_path / "step-00000003").mkdir()
    with fp.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state(3))
        checkpointer.wait()
        assert torch.equal(checkpointer.load()["weight"], state(3)["weight"])


def test_whole_step_is_replaced_only_when_asked(tmp_path: Path) -> None:
    two_steps(tmp_path)
    with fp.Checkpointer(tmp_path) as checkpointer:
        assert torch.equal(checkpointer.load(1)["weight"], state(1)["weight"])
        with pytest.raises(ConfigError, match="overwrite=True"):
            checkpointer.save(2, state(22))
        checkpointer.save(2, state(22), overwrite=True)
        checkpointer.wait()
        assert torch.equal(checkpointer.load()["weight"], state(22)["weight"])
