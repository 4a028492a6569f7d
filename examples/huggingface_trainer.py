"""HuggingFace's Trainer with background checkpoints, by one additional line: `attach(trainer)`.

Without a directory it kills a training, and resumes it from the newest whole checkpoint. With one, it trains there;
stop it in any way (Ctrl-C, kill, kill -9) and start it again.

python examples/huggingface_trainer.py [DIR] [--steps N]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

CONTEXT, ROWS = 64, 8


def train(root: Path, steps: int) -> None:
    """Train a small GPT-2 to write Python, from the newest whole checkpoint in `root` if there is one."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from fastpersist.integrations.huggingface import attach, last_checkpoint

    class Tell(TrainerCallback):
        """Report when a checkpoint is published: a step or two after its save."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(f"begins after step {state.global_step}", flush=True)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(f"the checkpoint of step {state.global_step} is durable", flush=True)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source[: ROWS * steps * CONTEXT]), dtype=torch.uint8).long()
    dataset = [{"input_ids": row, "labels": row} for row in text.split(CONTEXT)]
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        str(root),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=1e-3,
        save_steps=5,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset, callbacks=[Tell()])
    attach(trainer)  # this is all: the checkpoints are those of a stock Trainer, and it resumes from them
    trainer.train(resume_from_checkpoint=last_checkpoint(root))


def show(steps: int) -> None:
    """Kill a training in the middle and resume it."""
    with tempfile.TemporaryDirectory() as root:
        options = [f"-W{option}" for option in sys.warnoptions]
        command = [sys.executable, *options, __file__, root, "--steps", str(steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                print(line, end="")
                if "step 5 is durable" in line:
                    child.kill()
            errors = child.stderr.read() if child.stderr else ""
        if child.returncode not in (0, -signal.SIGKILL):
            sys.exit(errors)
        print("killed; and once more" if child.returncode else "it was done before it could be killed; and once more")
        print(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout, end="")
        print("left:", *sorted(path.name for path in Path(root).iterdir()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", metavar="DIR", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.root is None:
        show(options.steps)
    else:
        train(options.root, options.steps)
