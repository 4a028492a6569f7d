"""A process that generates text in one way, again and again: its memory is held down, and measured.

The parent (`rows`) puts the process into its cgroup before it has imported anything.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import tempfile
import time
import warnings
from typing import Any

import torch

from fastpersist.cli.bench.stream.ways import BUILDERS
from fastpersist.cli.bench.worker import forget_peak, resident_bytes
from fastpersist.cli.child_process import Answers
from fastpersist.cli.generate import TokenClock, random_prompts

__all__ = ["main"]


def main() -> None:
    """Serve one parent until it closes its end."""
    answers = Answers()
    warnings.simplefilter("ignore")  # of peers, on how they are used; they are used as intended
    import transformers
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401 - imported here, not in the first run

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    torch.set_grad_enabled(False)
    answers.send({"anonymous_bytes": resident_bytes("RssAnon")})
    for job in answers.requests():
        try:
            answer = _generate(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's result
            answer = {"failed": f"{type(error).__name__}: {error}"}
        gc.collect()
        answers.send(answer)


def _generate(job: dict[str, Any]) -> dict[str, Any]:
    """Build the model and generate once; return what it took."""
    gc.collect()
    peak_is_known = forget_peak()
    if job["device"] != "cpu":
        torch.cuda.set_device(torch.device(job["device"]).index or 0)
        torch.cuda.reset_peak_memory_stats()
    written_bytes = _written_bytes()
    with tempfile.TemporaryDirectory(dir=job["root"]) as scratch:
        started_s = time.perf_counter()
        model = BUILDERS[job["way"]](job | {"scratch": scratch})
        built_s = time.perf_counter()
        prompts = random_prompts(model.config.vocab_size, job["batch_size"], job["prompt_len"]).to(job["device"])
        clock = TokenClock()
        count = job["gen_len"]
        tokens = model.generate(prompts, max_new_tokens=count, min_new_tokens=count, do_sample=False, streamer=clock)
        stream = getattr(model, "weight_stream", None)
        answer = {
            "build_s": built_s - started_s,
            "prefill_s": clock.times_s[1] - built_s,
            "first_token_s": clock.times_s[1] - started_s,
            "passes_s": [end - start for start, end in zip(clock.times_s[1:], clock.times_s[2:], strict=False)],
            "peak_bytes": resident_bytes("VmHWM") if peak_is_known else None,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if prompts.is_cuda else None,
            "written_bytes": _written_bytes() - written_bytes,
            "stats": None,
            "tokens": tokens[:, job["prompt_len"] :].tolist(),
        }
        if stream is not None:
            stats = stream.stats()
            answer["stats"] = dataclasses.asdict(stats)
            stream.close()
        return answer


def _written_bytes() -> int:
    """Return how many bytes this process has given to the disk, files that it has dirtied included."""
    with open(f"/proc/{os.getpid()}/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("write_bytes:"))
