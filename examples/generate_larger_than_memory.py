"""Generate with a model that does not fit into memory: its weights stay on disk, and are read as they are needed.

It makes a Llama of 0.75 GB with random weights, and generates in a process that may have 0.6 GB of memory, Python and
torch included. Such a limit, a memory cgroup, needs root; without it the process is only told to take no more.

python examples/generate_larger_than_memory.py [DIR]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from memory_group import join_group, run_held_down

MEMORY_BYTES = 600_000_000
BUDGET = "128MiB"
TOKENS = 8


def make_model(directory: Path) -> int:
    """Write a model as transformers reads it, a layer at a time; return the bytes of its weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import fastpersist as fp

    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(directory)
    with torch.device("meta"):  # shapes without memory
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    files: dict[str, list[str]] = {}
    for name in weights:
        parts = name.split(".")
        files.setdefault(f"layer-{parts[2]}" if parts[1] == "layers" else "others", []).append(name)
    for file, names in files.items():
        tensors = {
            name: torch.randn(weights[name].shape, dtype=torch.bfloat16) * 0.02
            if weights[name].dim() > 1
            else torch.ones(weights[name].shape, dtype=torch.bfloat16)
            for name in names
        }
        fp.save(tensors, directory / f"{file}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"{file}.safetensors" for file, names in files.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(2 * weight.numel() for weight in weights.values())


def generate(directory: Path) -> None:
    """Generate some tokens, and tell how fast."""
    import torch

    # --8<-- [start:generate]
    from fastpersist.integrations.huggingface_streaming import from_pretrained

    model = from_pretrained(directory, budget_bytes=BUDGET)
    prompt = torch.tensor([[1, 2, 3, 4]])
    model.generate(prompt, max_new_tokens=1, do_sample=False)  # the first pass loads what stays in memory
    started_s = time.perf_counter()
    tokens = model.generate(prompt, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False)
    seconds = time.perf_counter() - started_s
    stats = model.weight_stream.stats()
    model.weight_stream.close()
    # --8<-- [end:generate]
    print("tokens", *tokens[0].tolist())
    print(f"{TOKENS / seconds:.1f} tokens/s, {stats.streamed_bytes / 1e6:.0f} MB read for each")
    print(f"ring {stats.ring_bytes / 1e6:.0f} MB, {stats.resident_bytes / 1e6:.0f} MB of weights stay in memory")
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    print(f"peak memory {peak_kib * 1024 / 1e6:.0f} MB of the process, its libraries included")


def show(directory: Path) -> None:
    """Make the model, and generate in a process that is held down."""
    size_bytes = make_model(directory)
    print(f"a model of {size_bytes / 1e6:.0f} MB", flush=True)
    run_held_down(__file__, ["--generate", str(directory)], MEMORY_BYTES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR", nargs="?", type=Path, default=Path(), help="on the disk to use")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate is not None:
        join_group()
        generate(options.generate)
    else:
        options.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            show(Path(scratch))
