"""Run the commands on small checkpoints, and keep what they print for the reference of the command line.

Each text begins with the command. The directory is called /mnt/nvme in it, and that of Python's library
/usr/lib/python; nothing else is changed.

python docs/tools/command_outputs.py [NAME …]     # writes docs/outputs/NAME.txt
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

OUTPUTS = Path(__file__).resolve().parents[1] / "outputs"

PREPARE = """
import numpy, torch, transformers
import torch.distributed.checkpoint
import fastpersist as fp

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())
with fp.Checkpointer("runs/a", optimizer=optimizer, keep=3) as checkpoints:
    for step in range(10, 60, 10):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 512)).square().mean()
        loss.backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        checkpoints.save(step, state, metrics={"loss": loss.item()})
fp.save(model.state_dict(), "model.pt")
torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id="sharded", no_dist=True)
fp.write_rows("feat.npy", torch.randn(10_000, 64))
numpy.save("degree.npy", numpy.arange(10_000))
config = transformers.LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4
)
transformers.LlamaForCausalLM(config).save_pretrained("models/llama")
open("train.py", "w").write('''import torch

torch.save({"weight": torch.ones(1000, 1000)}, "weights.pt")
print(sorted(torch.load("weights.pt")))
''')
"""

COMMANDS = {
    "demo": ["demo", "--quick"],
    "run": ["run", "train.py"],
    "info": ["info"],
    "tune": ["tune", ".", "--seconds", "5", "--size-mb", "64", "--dry-run"],
    "inspect": ["inspect", "runs/a"],
    "verify": ["verify", "runs/a", "model.pt"],
    "merge": ["merge", "sharded", "merged.pt"],
    "report": ["report", "runs/a"],
    "watch": ["watch", "runs/a", "--once"],
    "ls": ["ls", "runs/a/step-00000050", "model.*"],
    "stats": ["stats", "model.pt"],
    "diff": ["diff", "runs/a/step-00000040", "runs/a/step-00000050"],
    "convert": ["convert", "model.pt", "model.safetensors"],
    "generate": ["generate", "models/llama", "--prompt-len", "8", "--gen-len", "5", "--quiet"],
    "rows": ["rows", "pack", "feat.npy", "packed.npy", "--order", "degree.npy"],
}
"""Not here: what needs a terminal, and `bench`, whose tables are in docs/benchmarks/."""


def output_of(words: list[str], directory: str) -> str:
    """Return the command and what it prints."""
    environment = {**os.environ, "COLUMNS": "100", "XDG_CONFIG_HOME": f"{directory}/config"}
    ended = subprocess.run(
        [sys.executable, "-m", "fastpersist", *words],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode not in (0, 1):  # diff ends with 1 for a difference
        raise SystemExit(f"fastpersist {shlex.join(words)} ended with {ended.returncode}:\n{ended.stdout}")
    text = f"$ fastpersist {shlex.join(words)}\n{ended.stdout}"
    shown = {
        f"{directory}/config": "~/.config",
        directory: "/mnt/nvme",
        sysconfig.get_path("stdlib"): "/usr/lib/python",
    }
    for path, name in shown.items():
        text = text.replace(path, name)
    return text


def main() -> None:
    """Write the texts."""
    names = sys.argv[1:] or list(COMMANDS)
    OUTPUTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.executable, "-c", PREPARE], cwd=directory, check=True)
        for name in names:
            lines = [line.rstrip() for line in output_of(COMMANDS[name], directory).splitlines()]
            (OUTPUTS / f"{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
