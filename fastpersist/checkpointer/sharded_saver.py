"""Save a step of a Checkpointer whose state is sharded: the files of its directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastpersist.checkpointer.step_saver import StepSave, StepSaver
from fastpersist.dcp.plan_agreement import SharedPlans
from fastpersist.dcp.save_state import ShardedFiles, required_mapping, save_sharded
from fastpersist.distributed.follower_save import FollowerSave
from fastpersist.saving.directory_save import DirectorySave
from fastpersist.saving.refused_globals import warn_caller, warn_of_globals

__all__ = ["ShardedSaver"]


class ShardedSaver(StepSaver):
    """Saves the steps of a Checkpointer whose state is sharded."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._plans = SharedPlans()

    def _begin_first(self, step: StepSave, directory: DirectorySave) -> None:
        save_sharded(directory, step.state, owners=self._owners, plans=self._plans)

    def _begin_other(self, step: StepSave, peer: FollowerSave) -> None:
        peer.save_produced(ShardedFiles(required_mapping(step.state), self._owners, self._plans))

    def _warn_of(self, state: Any) -> None:
        """Warn of objects that a load refuses, and of keys that come back as text."""
        objects: dict[str, Any] = {}
        changed: list[str] = []
        _find_objects(state, "", objects, changed)
        warn_of_globals(objects)
        if changed:
            warn_caller(
                f"the keys of {', '.join(map(repr, changed[:5]))} are not all text; in sharded state, as in DCP, they "
                "come back as text"
            )


def _find_objects(
    value: Any, name: str, objects: dict[str, Any], changed: list[str], *, knows_ids: bool = False
) -> None:
    """Find what is no tensor, by name, and the dicts whose keys are not text: for DCP all keys are."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, Mapping):
        if not knows_ids and not all(isinstance(key, str) for key in value):
            changed.append(name)
        # The groups of an optimizer tell which keys of its state were numbers, and a load makes them so again.
        is_optimizer = isinstance(value.get("state"), Mapping) and isinstance(value.get("param_groups"), list)
        for key, item in value.items():
            inner = f"{name}.{key}" if name else str(key)
            _find_objects(item, inner, objects, changed, knows_ids=is_optimizer and key == "state")
    elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor | Mapping | list) for item in value):
        for index, item in enumerate(value):
            _find_objects(item, f"{name}.{index}", objects, changed)
    else:
        objects[name] = value
