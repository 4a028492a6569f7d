"""How each way builds the model: ours, what others have for models larger than memory, and the model in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from fastpersist import load, stream

__all__ = ["BUILDERS", "MAPPED", "ON_DEVICES", "OURS", "PACKAGES", "RESIDENT"]

PACKAGES = {
    "diffusers group offloading": "diffusers",
    "AirLLM": "airllm",
    "DeepSpeed ZeRO-Inference": "deepspeed",
}
"""What these ways need. They write the model in a form of their own before the first token."""
OURS, MAPPED, RESIDENT = "fp.stream", "safetensors mmap, assign", "resident"


def _ours(job: dict[str, Any]) -> Any:
    model = _empty_model(job)
    model.weight_stream = stream(model, job["directory"], budget_bytes=job["budget_bytes"], device=job["device"])
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
    return disk_offload(_empty_model(job), job["offload_directory"], execution_device=torch.device(job["device"]))


def _diffusers_groups(job: dict[str, Any]) -> Any:
    from diffusers.hooks import apply_group_offloading  # type: ignore[import-not-found]

    model, device = _safetensors_mapped(job), torch.device(job["device"])
    folder = os.path.join(job["root"], "peers", "diffusers")
    apply_group_offloading(
        model, device, torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=folder,
        use_stream=device.type == "cuda",
    )  # fmt: skip
    return model


def _airllm(job: dict[str, Any]) -> Any:
    from airllm.airllm_base import AirLLMBaseModel  # type: ignore[import-not-found]

    class Untokenized(AirLLMBaseModel):  # type: ignore[misc]
        def get_tokenizer(self, hf_token: str | None = None) -> None:
            return None

    folder = os.path.join(job["root"], "peers", "airllm")
    return Untokenized(job["directory"], device="cpu", layer_shards_saving_path=folder)


def _deepspeed(job: dict[str, Any]) -> Any:
    """Return the module of a ZeRO-Inference engine, with weights in a swap folder that it writes at each start."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    import deepspeed  # type: ignore[import-not-found]
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    config = AutoConfig.from_pretrained(job["directory"])
    largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    offload = {"device": "nvme", "nvme_path": job["scratch"], "pin_memory": False}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * config.hidden_size**2,
            "stage3_param_persistence_threshold": config.hidden_size,
            "stage3_max_live_parameters": 2 * largest,
            "offload_param": offload | {"buffer_count": 5, "buffer_size": largest},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    }
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    in_use = HfDeepSpeedConfig(settings)  # while it is there, from_pretrained gives each weight to DeepSpeed
    model = AutoModelForCausalLM.from_pretrained(job["directory"], dtype=config.dtype)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    del in_use
    return engine.module.eval()


def _safetensors_mapped(job: dict[str, Any]) -> Any:
    from safetensors.torch import load_file

    return _assigned(job, [load_file(path) for path in _shards(job)])


def _torch_mapped(job: dict[str, Any]) -> Any:
    return _assigned(job, [torch.load(path, weights_only=True, mmap=True) for path in job["torch_paths"]])


def _resident(job: dict[str, Any]) -> Any:
    return _assigned(job, [load(path, map_location=job["device"]) for path in _shards(job)]).to(job["device"])


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
    "diffusers group offloading": _diffusers_groups,
    "AirLLM": _airllm,
    "DeepSpeed ZeRO-Inference": _deepspeed,
    MAPPED: _safetensors_mapped,
    "torch.load(mmap=True), assign": _torch_mapped,
    RESIDENT: _resident,
}
"""By name, in the order of the table; each takes a job of the worker and returns the model."""
ON_DEVICES = (OURS, "accelerate disk_offload", "diffusers group offloading", RESIDENT)
"""Those that compute on a GPU as they are used here."""
