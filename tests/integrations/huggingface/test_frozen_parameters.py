"""Which frozen parameters a Trainer's saves take for unchanged, and at what cost to the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from fastpersist.integrations.huggingface.checkpoint_saves import _FrozenParameters

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64)
SHAPES = ((300, 70), (), (0, 4), (7,))


class Frozen(torch.nn.Module):
    """A parameter of each kind, none of which is trained; and one that is."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in DTYPES:
            for number, shape in enumerate(SHAPES):
                values = torch.zeros(shape).to(dtype)
                self.register_parameter(f"{str(dtype)[6:]}_{number}", torch.nn.Parameter(values, requires_grad=False))
        self.trained = torch.nn.Parameter(torch.zeros(3))


def names_of(model: torch.nn.Module, bits: int) -> set[str]:
    return {name for position, (name, _) in enumerate(model.named_parameters()) if bits >> position & 1}


def test_those_that_are_as_they_were_are_found() -> None:
    model, frozen = Frozen(), _FrozenParameters()
    assert frozen.unchanged_in(model) == 0  # nobody knows yet
    assert names_of(model, frozen.unchanged_in(model)) == {name for name, _ in model.named_parameters()} - {"trained"}


def test_what_is_written_past_the_counter_of_changes_is_seen() -> None:
    model, frozen = Frozen(), _FrozenParameters()
    frozen.unchanged_in(model)
    versions = [parameter._version for parameter in model.parameters()]
    changed = {"float32_0", "bool_1", "float8_e4m3fn_3"}
    for name in changed:
        parameter: Any = model.get_parameter(name)
        parameter.data.view(-1)[0] = 1
    assert versions == [parameter._version for parameter in model.parameters()]
    every = {name for name, _ in model.named_parameters()}
    assert names_of(model, frozen.unchanged_in(model)) == every - {"trained"} - changed
    assert names_of(model, frozen.unchanged_in(model)) == every - {"trained"}  # and stay as they are from now on


def test_not_a_number_is_like_itself() -> None:
    model = torch.nn.ParameterDict({"nan": torch.nn.Parameter(torch.full((9,), torch.nan), requires_grad=False)})
    frozen = _FrozenParameters()
    frozen.unchanged_in(model)
    assert frozen.unchanged_in(model) == 1


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_views_that_are_computed_when_they_are_read_are_taken_for_changed(view: Any) -> None:
    model, frozen = torch.nn.Module(), _FrozenParameters()
    model.p = torch.nn.Parameter(view(torch.ones(4, dtype=torch.complex64)), requires_grad=False)
    assert [frozen.unchanged_in(model), frozen.unchanged_in(model)] == [0, 0]


def test_a_device_is_waited_for_once_for_all_parameters_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor

    model, frozen = Frozen(), _FrozenParameters()
    for waits in ("equal", "item", "tolist", "__bool__", "__eq__"):
        monkeypatch.setattr(torch.Tensor, waits, lambda *_: pytest.fail("waited for a single parameter"))
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    frozen.unchanged_in(model)
    assert len(copied) == len({dtype.itemsize for dtype in DTYPES})
