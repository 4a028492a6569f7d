"""The fixtures of the tests that save during training, each with an `Overlap`: a test file takes what it needs by name.

from support import overlap_fixtures

overlap = overlap_fixtures.overlap
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.training import WAYS, Overlap, small_model, train


@pytest.fixture(params=WAYS)
def overlap(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Overlap]:
    with Overlap(tmp_path, request.param) as overlap:
        yield overlap


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Overlap]:
    """Writers wait until the test lets them go."""
    with Overlap(tmp_path, "held") as overlap:
        yield overlap


@pytest.fixture(params=["held", "no room"])
def held_either_way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Overlap]:
    """Writers wait until the test, or somebody at the gate, lets them go."""
    with Overlap(tmp_path, request.param) as overlap:
        yield overlap


def trained(seed: int = 0) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """Make a small model and its optimizer, Adam, with moments."""
    model = small_model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer
