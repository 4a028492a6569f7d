"""How each way builds the model: ours, what others have for models larger than memory, and the model in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from fastpersist import load, stream

__all__ = ["BUILDERS", "MAPPED", "OURS", "RESIDENT"]

OURS, MAPPED, RESIDENT = "fp.stream", "safetensors mmap, assign", "resident"


def _ours(job: dict[str, Any]) -> Any:
    model = _empty_model(job)
    model.weight_stream = stream(model, job["directory"], budget_bytes=job["budget_bytes"])
    return model


def _transformers_disk(job: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        job["directory"], device_map={"": "disk"}, offload_folder=job["scratch"], dtype="auto"
    )


def _accelerate_disk(job: dict[str, Any]) -> Any:
    from accelerate import disk_offload  # type: ignore[import-untyped]

    if not job["offload_directory"]:
        raise ImportError("not installed: pip install accelerate")
    return disk_offload(_empty_model(job), job["offload_directory"], execution_device=torch.device("cpu"))


def _safetensors_mapped(job: dict[str, Any]) -> Any:
    from safetensors.torch import load_file

    return _assigned(job, [load_file(path) for path in _shards(job)])


def _torch_mapped(job: dict[str, Any]) -> Any:
    return _assigned(job, [torch.load(path, weights_only=True, mmap=True) for path in job["torch_paths"]])


def _resident(job: dict[str, Any]) -> Any:
    return _assigned(job, [load(path) for path in _shards(job)])


def _shards(job: dict[str, Any]) -> list[str]:
    names = sorted(name for name in os.listdir(job["directory"]) if name.endswith(".safetensors"))
    return [os.path.join(job["directory"], name) for name in names]


def _empty_model(job: dict[str, Any]) -> Any:
    """Return the model with its parameters on meta and its buffers computed."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job["directory"])
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()


def _assigned(job: dict[str, Any], parts: list[Any]) -> Any:
    model = _empty_model(job)
    model.load_state_dict({name: weight for part in parts for name, weight in part.items()}, assign=True)
    return model


BUILDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    OURS: _ours,
    "transformers, device_map disk": _transformers_disk,
    "accelerate disk_offload": _accelerate_disk,
    MAPPED: _safetensors_mapped,
    "torch.load(mmap=True), assign": _torch_mapped,
    RESIDENT: _resident,
}
"""By name, in the order of the table; each takes a job of the worker and returns the model."""
