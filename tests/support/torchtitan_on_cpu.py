"""TorchTitan's debug model on CPU, shortened: a program for torchrun, and the configurations that it names.

    torchrun --nproc-per-node 2 torchtitan_on_cpu.py --module torchtitan_on_cpu --config fast --dump_folder out

TorchTitan 0.3.0 trains on accelerators only, and with a torch that is not released yet. `on_cpu` replaces what it asks
of either: facts of a device, attention that is compiled for one, reductions that gloo does not have.

The environment variable TITAN_ASSETS names a directory that `make_assets` has filled.
"""

from __future__ import annotations

import json
import os
import random
import types
from pathlib import Path
from typing import Any


def make_assets(directory: Path) -> None:
    """Make a tokenizer and a text to train on."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = [f"word{number}" for number in range(300)]
    draw = random.Random(0)
    texts = [" ".join(draw.choices(words, k=100)) for _ in range(100)]
    data, tokens = directory / "data", directory / "tokenizer"
    data.mkdir(parents=True)
    tokens.mkdir()
    (data / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, special_tokens=special))
    tokenizer.save(str(tokens / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tokens / "tokenizer_config.json").write_text(json.dumps(names))


def stock() -> Any:
    """Return the configuration with TorchTitan's own manager: a save every second step."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    assets = Path(os.environ["TITAN_ASSETS"])
    config = llama3_debugmodel()
    config.hf_assets_path = str(assets / "tokenizer")
    config.dataloader.dataset_path = str(assets / "data")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.local_batch_size = 1
    config.training.seq_len = 32
    config.training.steps = 4
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.validator.enable = False
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    return config


def fast() -> Any:
    """Return the same configuration with our manager: nothing else differs."""
    from fastpersist.integrations.torchtitan import FastPersistCheckpointManager

    config = stock()
    config.checkpoint = FastPersistCheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    return config


def on_cpu() -> None:
    """Let TorchTitan run on CPU."""
    import torch
    import torch._utils
    import torch.distributed as dist
    import torch.nn.attention.flex_attention as flex
    from torch.distributed.fsdp import FSDPModule

    torch.use_deterministic_algorithms(True)
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 34, multi_processor_count=1)
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group: None
    flex._validate_device = lambda *tensors: None
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_for_gloo(module: Any, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_for_gloo

    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)


if __name__ == "__main__":
    on_cpu()
    from torchtitan.train import main

    main()
