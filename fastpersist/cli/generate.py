"""`fastpersist generate DIR "prompt"`: text from a model whose weights stay on disk, and how fast it came.

The model is built by `integrations.huggingface_streaming`. The figures have the names, and the meaning, of
ZeRO-Inference's script: prefill, decode and total throughput of the last loop.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastpersist.cli.argument_types import positive
from fastpersist.cli.terminal import EXIT_GOOD, printable, size_text
from fastpersist.display import rate_text
from fastpersist.errors import ConfigError, FastPersistError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["TokenClock", "add_parser", "random_prompts", "run", "throughputs"]

_EPILOG = """\
examples:
  fastpersist generate models/llama 'Once upon a time'
  fastpersist generate models/llama --prompt-len 8 --gen-len 5 --budget 2GiB

DIR is what save_pretrained of transformers writes: config.json, safetensors, a tokenizer. It
is read in place, and nothing is written.

A model without a tokenizer, or a measurement: --prompt-len N [--batch-size N] takes random
token ids.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text with a model that is larger than memory",
        description="Generate text with a model whose weights stay on disk, and say how fast. Needs transformers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", help="directory of the model")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to go on with")
    parser.add_argument("--prompt-file", metavar="FILE", help="one prompt a line, all of them as one batch")
    parser.add_argument("--prompt-len", type=positive, metavar="N", help="random prompts of so many tokens")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="number of random prompts (default: 1)")
    parser.add_argument(
        "--gen-len", type=positive, default=32, metavar="N", help="tokens to generate at most (default: 32)"
    )
    parser.add_argument(
        "--loops", type=positive, default=1, metavar="N", help="generate so often; the last one counts (default: 1)"
    )
    parser.add_argument(
        "--budget", default="auto", metavar="SIZE", help="memory for weights, such as 4GiB (default: auto)"
    )
    parser.add_argument("--device", default="cpu", help="where the model computes, such as cuda:0 (default: cpu)")
    parser.add_argument("--dtype", default="auto", help="such as float32 (default: auto, that of the files)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate, print texts and figures.

    Raises:
        ConfigError: Options make no sense, or DIR has no such model.
        UnsupportedError: transformers, or the model's tokenizer, is missing; or transformers cannot make the model.
        StorageError: A weight cannot be read.
    """
    _check(arguments)
    import transformers

    from fastpersist.cli.bench.worker import resident_bytes
    from fastpersist.integrations.huggingface_streaming import (  # type: ignore[import-not-found]
        from_pretrained,
    )

    transformers.utils.logging.disable_progress_bar()
    tokenizer = None if arguments.prompt_len else _tokenizer(transformers, arguments.directory)
    texts = _texts(arguments)
    try:
        model = from_pretrained(
            arguments.directory,
            device_map=arguments.device,
            dtype=arguments.dtype,
            budget_bytes=arguments.budget,
        )
    except FastPersistError:
        raise
    except (ImportError, KeyError, OSError, ValueError) as error:  # of transformers
        raise UnsupportedError(
            f"{arguments.directory} has no causal language model that transformers can make: "
            f"{printable((str(error) or type(error).__name__).splitlines()[0][:200])}"
        ) from error
    with model.weight_stream as stream:
        if tokenizer is None:
            vocabulary_count = model.config.get_text_config().vocab_size
            prompts = {"input_ids": random_prompts(vocabulary_count, arguments.batch_size or 1, arguments.prompt_len)}
        else:
            prompts = dict(tokenizer(texts, return_tensors="pt", padding=len(texts) > 1))
        for _ in range(arguments.loops):
            tokens, figures = _generate(model, stream, prompts, tokenizer, arguments)
        result = figures | {"peak_bytes": resident_bytes("VmHWM")}
    prompt_len = figures["prompt_len"]
    result |= {"directory": arguments.directory}
    if tokenizer is None:
        result["tokens"] = tokens[:, prompt_len:].tolist()
    else:
        result["texts"] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    print(json.dumps(result, indent=2) if arguments.json else _report(result))
    return EXIT_GOOD


def _check(arguments: argparse.Namespace) -> None:
    sources = [arguments.prompt, arguments.prompt_file, arguments.prompt_len]
    if sum(source is not None for source in sources) != 1:
        raise ConfigError("give one of PROMPT, --prompt-file and --prompt-len")
    if arguments.batch_size and not arguments.prompt_len:
        raise ConfigError("--batch-size is about random prompts: give --prompt-len as well, or leave it out")
    if not os.path.isdir(arguments.directory):
        raise ConfigError(f"{arguments.directory} is no directory; name one that save_pretrained has written")
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError('this command needs transformers: pip install "fastpersist[huggingface]"')
    # Else the tokenizer would be missed first. Of an adapter the library says what to do.
    if not any(os.path.exists(os.path.join(arguments.directory, f"{kind}config.json")) for kind in ("", "adapter_")):
        raise ConfigError(f"{arguments.directory} has no config.json: it is no model of transformers")


def _tokenizer(transformers: Any, directory: str) -> Any:
    """Return the model's tokenizer, which pads on the left: the last token is the one to go on from."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left", local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UnsupportedError(
            f"{directory} has no tokenizer that can be read; --prompt-len N does without one, with random token ids "
            f"({printable(str(error).splitlines()[0])})"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _texts(arguments: argparse.Namespace) -> list[str]:
    if arguments.prompt_file is None:
        return [arguments.prompt or ""]
    try:
        with open(arguments.prompt_file, encoding="utf-8") as file:
            lines = [line.rstrip("\n") for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{arguments.prompt_file} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"{arguments.prompt_file} has no line with a prompt")
    return lines


def random_prompts(vocabulary_count: int, batch_size: int, prompt_len: int) -> torch.Tensor:
    """Return random token ids, the same for the same numbers."""
    import torch

    return torch.randint(vocabulary_count, (batch_size, prompt_len), generator=torch.Generator().manual_seed(0))


class TokenClock:
    """Notes when tokens come: the `streamer` of transformers' `generate`. It belongs to the thread that generates.

    Args:
        show: Called at each token with the number of tokens so far.

    Attributes:
        times_s: The time of the start, then of each token, by the clock `time.perf_counter`.
    """

    def __init__(self, show: Callable[[int], None] | None = None) -> None:
        self.times_s: list[float] = []
        self._show = show

    def put(self, _tokens: object) -> None:
        """Note a token; the first call is with the prompt."""
        self.times_s.append(time.perf_counter())
        if self._show is not None and len(self.times_s) > 1:
            self._show(len(self.times_s) - 1)

    def end(self) -> None:
        """Do nothing: the last token has been put."""


class _Progress:
    """A line on the terminal that says what the last token took, and how far it is."""

    def __init__(self, stream: Any, gen_len: int) -> None:
        self._stream, self._gen_len = stream, gen_len
        self._last = (time.perf_counter(), stream.stats())

    def show(self, count: int) -> None:
        (then_s, before), now_s, now = self._last, time.perf_counter(), self._stream.stats()
        self._last = (now_s, now)
        seconds = max(now_s - then_s, 1e-9)
        gb_per_s = (now.read_bytes - before.read_bytes) / seconds / 1e9
        stall_s = now.stall_s - before.stall_s
        line = f"token {count} of {self._gen_len}: {seconds:.2f} s, {gb_per_s:.2f} GB/s, waited {stall_s:.2f} s"
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    @staticmethod
    def clear() -> None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _generate(
    model: Any, stream: Any, prompts: dict[str, Any], tokenizer: Any, arguments: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """Generate once; return prompts with what follows, and the figures."""
    shown = sys.stderr.isatty() and not arguments.quiet
    progress = _Progress(stream, arguments.gen_len) if shown else None
    clock = TokenClock(progress.show if progress else None)
    # Random tokens have no end of their own: as many as were asked for, so that the figures are of that many.
    length = {"min_new_tokens": arguments.gen_len} if tokenizer is None else {"pad_token_id": tokenizer.pad_token_id}
    before = stream.stats()
    started_s = time.perf_counter()
    try:
        tokens = model.generate(
            **{name: value.to(model.device) for name, value in prompts.items()},
            max_new_tokens=arguments.gen_len,
            do_sample=False,
            streamer=clock,
            **length,
        )
    finally:
        if progress:
            progress.clear()
    after = stream.stats()
    batch_size, prompt_len = prompts["input_ids"].shape
    total_s = clock.times_s[-1] - started_s
    figures = throughputs(batch_size, prompt_len, len(clock.times_s) - 1, clock.times_s[1] - started_s, total_s)
    read_bytes = after.read_bytes - before.read_bytes
    figures |= {"read_bytes": read_bytes, "read_bytes_per_s": read_bytes / total_s}
    figures |= {"stall_s": after.stall_s - before.stall_s}
    for name in ("budget_bytes", "ring_bytes", "resident_bytes", "streamed_bytes", "weight_bytes", "engine"):
        figures[name] = getattr(after, name)
    for name in ("unit_count", "resident_unit_count", "on_demand_count", "wrong_guess_count"):
        figures[name] = getattr(after, name)
    return tokens, figures


def throughputs(batch_size: int, prompt_len: int, gen_len: int, prefill_s: float, total_s: float) -> dict[str, Any]:
    """Return the figures that ZeRO-Inference's script prints, in tokens per second.

    Args:
        batch_size: The number of prompts that are processed at once.
        prompt_len: Tokens in each prompt.
        gen_len: Tokens that are generated for each prompt.
        prefill_s: Seconds until the first token.
        total_s: Seconds until the last token.
    """
    decode_s = total_s - prefill_s
    return {
        "batch_size": batch_size,
        "prompt_len": prompt_len,
        "gen_len": gen_len,
        "prefill_latency_s": prefill_s,
        "prefill_throughput": batch_size * prompt_len / prefill_s,
        "decode_latency_s": decode_s,
        "decode_throughput": batch_size * (gen_len - 1) / decode_s if gen_len > 1 else None,
        "total_latency_s": total_s,
        "total_throughput": batch_size * gen_len / total_s,
    }


def _report(result: dict[str, Any]) -> str:
    lines = [line for text in result.get("texts", ()) for line in (*map(printable, text.splitlines()), "")]
    decode = result["decode_throughput"]
    units = f"{result['resident_unit_count']} of {result['unit_count']} units"
    lines += [
        f"prefill     {result['prefill_latency_s']:.3f} s, {result['prefill_throughput']:.2f} tokens/s",
        "decode      " + ("–" if decode is None else f"{result['decode_latency_s']:.3f} s, {decode:.2f} tokens/s"),
        f"total       {result['total_latency_s']:.3f} s, {result['total_throughput']:.2f} tokens/s "
        f"({result['batch_size']} × {result['gen_len']} tokens behind {result['prompt_len']})",
        f"disk        {size_text(result['read_bytes'])} read, {rate_text(result['read_bytes_per_s'])} "
        f"({result['engine']}), waited {result['stall_s']:.3f} s for it",
        f"weights     {size_text(result['weight_bytes'])}, of which {size_text(result['resident_bytes'])} stay in "
        f"memory ({units}); ring {size_text(result['ring_bytes'])}",
        f"peak memory {size_text(result['peak_bytes'])} of this process",
    ]
    return "\n".join(lines)
