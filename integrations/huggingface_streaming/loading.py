"""`from_pretrained` as transformers has it, for a model whose weights stay on disk.

transformers' own code handles classes and configuration, the dtype, names, ties, and computed buffers. The model is
built on the meta device, as transformers builds it; `fastpersist.stream` replaces the loading of weights.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from .._shared.requirements import require

require("huggingface", "transformers", "5.2")

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig  # noqa: E402
from transformers import initialization as weight_initialization  # noqa: E402

from fastpersist import (  # noqa: E402
    CheckpointNotFoundError,
    ConfigError,
    FastPersistError,
    TensorEntry,
    UnsupportedError,
    inspect,
    stream,
)

from .weight_names import WeightNames, weight_names  # noqa: E402

__all__ = ["from_pretrained"]

_log = logging.getLogger("fastpersist")

_WEIGHTS_NAME = "model.safetensors"
_INDEX_NAME = "model.safetensors.index.json"
_UNWRITTEN = 0xA5  # bytes of a buffer before it is computed: NaN in no dtype, and no likely value
_SHOWN_COUNT = 10


@dataclass(frozen=True)
class _Checkpoint:
    """The files of a model, by their headers.

    Attributes:
        directory: The path as it was given.
        source: The path that `fastpersist.stream` reads.
        tensors: The tensors by name; None if a file is damaged or missing, which the stream reports.
    """

    directory: str
    source: str
    tensors: dict[str, TensorEntry | None]


def from_pretrained(
    directory: str | os.PathLike[str],
    *,
    device_map: str | int | torch.device | Mapping[str, str | int | torch.device] = "cpu",
    max_memory: Mapping[int | str, int | str] | None = None,
    dtype: torch.dtype | str | None = "auto",
    attn_implementation: str | None = None,
    budget_bytes: int | str | None = None,
    auto_class: Any = AutoModelForCausalLM,
    trust_remote_code: bool = False,
    verify: bool = False,
    engine: str = "auto",
    **config_overrides: Any,
) -> Any:
    """Return a model of transformers whose weights stay in the safetensors files of a directory.

    It computes what the model from transformers' own `from_pretrained` computes, bit for bit, and is used in the same
    way: `generate`, `pipeline`, adapters of peft. This waits for config.json and the headers; of the weights, the first
    ones are on their way when it returns. Nothing is ever written to the directory. The model is in eval mode, and no
    parameter requires a gradient. `generate` does not compile it: weights come and go between its modules.

    `model.weight_stream` is the `WeightStream`: stats() tells what was read, close() ends it.

    Args:
        directory: A local directory with config.json and model.safetensors, or its shards and their index.
        device_map: The one device that computes: "cpu", "cuda:0", 0, {"": "cuda:0"}; "auto" is the current CUDA device
            if there is one.
        max_memory: Bytes by device, as in transformers: an integer, or text such as "20GiB". The entry of that device
            is the budget.
        dtype: "auto" is the dtype of config.json, else the one of the first floating-point tensor. Another one converts
            each weight when it is read. As in transformers, some modules keep float32.
        attn_implementation: The option of transformers.
        budget_bytes: Memory for weights, as in `fastpersist.stream`; in place of `max_memory`. None: "auto".
        auto_class: AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel, …, or a model class.
        trust_remote_code: Run code from the directory that defines the model.
        verify: The option of `fastpersist.stream`.
        engine: The option of `fastpersist.stream`.
        **config_overrides: Changes of the configuration, as in transformers.

    Returns:
        The model.

    Raises:
        CheckpointNotFoundError: There is no such directory, no config.json, or no safetensors file.
        ConfigError: The checkpoint does not fit the model; the message lists what is wrong. Or an argument is wrong,
            or the budget too small.
        UnsupportedError: A weight is computed while it is loaded (converted, unpacked, quantized); or the device map
            has several devices.
        StorageError, FormatError: A file cannot be read, or is damaged.
        OSError, ValueError, …: Errors of transformers.

    Thread safety: one call at a time, since transformers changes torch's defaults while it builds a model.
    """
    device = _device_of(device_map)
    budget = _budget_of(device, max_memory, budget_bytes)
    folder = _folder_of(directory)
    config, arguments = _configuration(auto_class, folder, trust_remote_code, config_overrides)
    checkpoint = _headers(folder, getattr(config, "transformers_weights", None))
    if attn_implementation is not None:
        arguments["attn_implementation"] = attn_implementation
    arguments["dtype"] = _dtype_of(dtype, config, checkpoint)
    model = _build(auto_class, config, trust_remote_code, arguments)
    _keep_precision(model, arguments["dtype"])

    mapped = weight_names(model, checkpoint.tensors)
    missing = _tie(model, mapped)
    if getattr(config, "quantization_config", None) is not None:
        _refuse_repacked(model, checkpoint, mapped, missing)
    _compute_buffers(model, missing, device, checkpoint)
    if mapped.unused:
        _log.info(
            "%s has %d tensors that %s does not use: %s",
            folder,
            len(mapped.unused),
            type(model).__name__,
            _listed(mapped.unused),
        )

    model.eval()
    model.requires_grad_(False)
    _configure_generation(model, folder)
    model.weight_stream = stream(
        model,
        checkpoint.source,
        device=device,
        budget_bytes=budget,
        dtype="model",
        names=mapped.names,
        verify=verify,
        engine=engine,
    )
    return model


# --------------------------------------------------------------------------------------------------- arguments


def _device_of(device_map: str | int | torch.device | Mapping[str, str | int | torch.device]) -> torch.device:
    if isinstance(device_map, Mapping):
        devices = set(device_map.values())
        if len(devices) != 1:
            raise UnsupportedError(f"a streamed model computes on one device, and device_map has {len(devices)}")
        device_map = devices.pop()
    if device_map == "auto":
        device_map = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device_map, int) and not isinstance(device_map, bool):
        device_map = f"cuda:{device_map}"
    try:
        device = torch.device(device_map)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"device_map is the device that computes, such as 'cpu' or 'cuda:0', not {device_map!r}"
        ) from None
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _budget_of(
    device: torch.device, max_memory: Mapping[int | str, int | str] | None, budget_bytes: int | str | None
) -> int | str:
    if max_memory is None:
        return "auto" if budget_bytes is None else budget_bytes
    if budget_bytes is not None:
        raise ConfigError("max_memory and budget_bytes say the same; pass one of them")
    keys: list[int | str] = [str(device), device.index]
    for key in keys:
        if key in max_memory:
            return max_memory[key]
    raise ConfigError(f"max_memory has no entry for {device}, which computes: its keys are {list(max_memory)}")


def _folder_of(directory: str | os.PathLike[str]) -> str:
    folder = os.fspath(directory)
    if not os.path.isdir(folder):
        raise CheckpointNotFoundError(
            2,
            f"{folder} is no directory: weights are streamed from local files; huggingface_hub.snapshot_download() "
            "fetches a model, and returns its directory",
            folder,
        )
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise UnsupportedError(
            f"{folder} holds an adapter of peft: stream the base model from a directory without it, then "
            "PeftModel.from_pretrained(model, adapter_directory)"
        )
    if not os.path.exists(os.path.join(folder, "config.json")):
        raise CheckpointNotFoundError(2, f"{folder} has no config.json: it is no model of transformers", folder)
    return folder


def _configuration(
    auto_class: Any, folder: str, trust_remote_code: bool, overrides: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the configuration, and the overrides that it does not know, which go to the model."""
    if hasattr(auto_class, "from_config"):
        auto_class, overrides = AutoConfig, {**overrides, "trust_remote_code": trust_remote_code}
    else:
        auto_class = auto_class.config_class
    config, unused = auto_class.from_pretrained(folder, return_unused_kwargs=True, **overrides)
    config.name_or_path = folder  # tells adapters their base model; not every class sets it
    return config, unused


def _dtype_of(dtype: torch.dtype | str | None, config: Any, checkpoint: _Checkpoint) -> torch.dtype:
    if dtype is None or dtype == "auto":
        dtype = getattr(config, "dtype", None)
    if dtype is None:
        of_file = [entry.dtype for entry in checkpoint.tensors.values() if entry is not None]
        dtype = next((each for each in of_file if getattr(torch, each, torch.int8).is_floating_point), None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype is 'auto' or a floating-point dtype of torch, not {dtype!r}")
    return dtype


# --------------------------------------------------------------------------------------------------- files


def _headers(folder: str, weights_name: str | None) -> _Checkpoint:
    """Read the headers of the files that transformers would load. The stream reports damaged or missing shards."""
    names = (_WEIGHTS_NAME, _INDEX_NAME) if weights_name is None else (weights_name,)
    path = next((each for each in (os.path.join(folder, name) for name in names) if os.path.exists(each)), None)
    if path is None:
        raise CheckpointNotFoundError(
            2,
            f"{folder} has no {' and no '.join(names)}. Weights of other formats are streamed after "
            "from_pretrained(...).save_pretrained(another_directory), once",
            folder,
        )
    if not path.endswith(".index.json"):
        return _Checkpoint(folder, path, {entry.name: entry for entry in inspect(path).tensors})
    tensors: dict[str, TensorEntry | None] = {}
    with open(path, "rb") as file:
        try:
            weight_map = dict(json.load(file)["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise UnsupportedError(f"{path} is no index of safetensors: {error!r}") from None
    for shard in sorted(set(weight_map.values())):
        try:
            tensors |= {entry.name: entry for entry in inspect(os.path.join(folder, shard)).tensors}
        except FastPersistError:
            pass
    return _Checkpoint(folder, folder, dict.fromkeys(weight_map) | tensors)


# --------------------------------------------------------------------------------------------------- the model


def _build(auto_class: Any, config: Any, trust_remote_code: bool, arguments: Mapping[str, Any]) -> Any:
    """Build a model without weights and without ties: it is not known yet which tied name the checkpoint has."""
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(weight_initialization.no_tie_weights())
        safe_creation = getattr(weight_initialization, "meta_device_safe_creation_ops", None)  # newer than 5.2
        if safe_creation is not None:
            stack.enter_context(safe_creation())
        if hasattr(auto_class, "from_config"):
            return auto_class.from_config(config, trust_remote_code=trust_remote_code, **arguments)
        return auto_class._from_config(config, **arguments)


def _keep_precision(model: Any, dtype: torch.dtype) -> None:
    """Give the modules that transformers keeps in float32 that dtype."""
    plan = model._get_dtype_plan(dtype)
    for pattern, kept in plan.items():
        matches = re.compile(pattern.replace("*", ".*")).search
        for name, tensor in model.state_dict(keep_vars=True).items():
            if matches(name):
                tensor.data = tensor.data.to(kept)


def _tie(model: Any, mapped: WeightNames) -> list[str]:
    """Tie weights as transformers does, whichever of them the checkpoint has; return the names that it lacks."""
    missing = model.state_dict().keys() - mapped.names.keys()
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    of_model = model.state_dict(keep_vars=True)
    found = {id(of_model[name]) for name in mapped.names}
    return [name for name in of_model if name in missing and id(of_model[name]) not in found]


def _compute_buffers(model: Any, missing: list[str], device: torch.device, checkpoint: _Checkpoint) -> None:
    """Compute buffers that no file has, as transformers does: buffers not saved, or missing in the checkpoint.

    Raises:
        ConfigError: The checkpoint lacks a parameter, or the model's class does not compute a buffer.
    """
    lost = [name for name in missing if name not in dict(model.named_buffers())]
    if lost:
        raise ConfigError(
            f"{checkpoint.directory} has no weights for {_listed(lost)} of {type(model).__name__}, which transformers "
            "would fill at random: choose the auto_class that the checkpoint was saved from"
        )
    computed = {}
    for name, buffer in list(model.named_buffers()):
        module_name, _, local = name.rpartition(".")
        module = model.get_submodule(module_name)
        if local in module._non_persistent_buffers_set or name in missing:
            module._non_persistent_buffers_set.add(local)  # what is not in a file is not looked for
            computed[name] = module, local
            module._buffers[local] = torch.empty_like(buffer, device="cpu")
            _memory_of(module._buffers[local]).fill_(_UNWRITTEN)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = tensor.is_meta
    model.initialize_weights()
    for name, (module, local) in computed.items():
        buffer = module._buffers[local]
        if buffer.numel() and bool((_memory_of(buffer) == _UNWRITTEN).all()):
            raise ConfigError(
                f"{type(module).__name__} does not compute its buffer {name} in _init_weights(), so that a model "
                "without weights in memory does not have it: code for transformers 4 has to be brought up to date"
            )
        del buffer._is_hf_initialized
        module._buffers[local] = buffer.to(device)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # whatever the order of its elements


def _refuse_repacked(model: Any, checkpoint: _Checkpoint, mapped: WeightNames, missing: list[str]) -> None:
    """Raise if a quantized checkpoint has anything but the parameters of the model, as they are."""
    of_model = model.state_dict()
    differing = list(missing) + list(mapped.unused)
    for name, sources in mapped.names.items():
        entries = [checkpoint.tensors[source] for source in sources]
        wanted = str(of_model[name].dtype).removeprefix("torch.")
        if any(entry is not None and entry.dtype != wanted for entry in entries):
            differing.append(name)
    if differing:
        described = model.config.quantization_config
        method = described.get("quant_method") if isinstance(described, dict) else described.quant_method
        raise UnsupportedError(
            f"{checkpoint.directory} is quantized ({getattr(method, 'value', method)}), and transformers changes the "
            f"model or its weights while it loads them ({_listed(differing)}), so they cannot stay in their files. "
            "Stream the model from a checkpoint that is not quantized (model.dequantize() and save_pretrained() make "
            "one), or load this one with transformers itself"
        )


def _configure_generation(model: Any, folder: str) -> None:
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder)
    except OSError:  # older checkpoints have it in config.json
        model.generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )
    # Not by hf_device_map={"": "disk"}, which keeps generate from compiling, too: pipeline() would take "disk" for a
    # device, and peft would put hooks of accelerate onto the model.
    model.generation_config.disable_compile = True


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN_COUNT} more" if len(names) > _SHOWN_COUNT else ""
    return ", ".join(names[:_SHOWN_COUNT]) + more
