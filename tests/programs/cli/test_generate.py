"""`fastpersist generate` on a small model: tokens, figures, Ctrl-C. It imports transformers, once in a child."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpersist.cli import main
from fastpersist.cli.generate import random_prompts

pytest.importorskip("transformers")

GEN_LEN = 5


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {word: number for number, word in enumerate(["<eos>", "hello", "world", *map(str, range(509))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(directory)
    return directory


def expected(directory: Path, prompts: torch.Tensor, **options: Any) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = model.generate(prompts, max_new_tokens=GEN_LEN, do_sample=False, **options)
    found: list[list[int]] = tokens[:, prompts.shape[1] :].tolist()
    return found


def test_tokens_are_those_of_the_model_loaded_whole(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt-len", "6", "--batch-size", "2", "--gen-len", str(GEN_LEN), "--loops", "2", "--json"]
    assert main(["generate", str(model_directory), "--budget", "8MiB", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == expected(model_directory, random_prompts(512, 2, 6), min_new_tokens=GEN_LEN)
    assert (result["batch_size"], result["prompt_len"], result["gen_len"]) == (2, 6, GEN_LEN)
    assert result["total_throughput"] == pytest.approx(2 * GEN_LEN / result["total_latency_s"])
    assert result["ring_bytes"] + result["resident_bytes"] <= result["budget_bytes"] == 8 << 20
    assert result["read_bytes"] >= GEN_LEN * result["streamed_bytes"] > 0
    assert result["peak_bytes"] > 1 << 20


def test_prompts_of_a_file_are_a_batch_and_their_texts_are_printed(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("hello\nhello world 5\n")
    words = ["--prompt-file", str(tmp_path / "prompts"), "--gen-len", "3", "--quiet"]
    assert main(["generate", str(model_directory), *words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0].startswith("hello ")
    assert lines[2].startswith("hello world 5 ")
    assert [line.split()[0] for line in lines[4:]] == ["prefill", "decode", "total", "disk", "weights", "peak"]


def test_model_without_tokenizer_says_how_to_do_without(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model_directory / name)
    assert main(["generate", str(tmp_path), "hello"]) == 2
    assert "--prompt-len N does without one" in capsys.readouterr().err


def test_what_transformers_cannot_make_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{bad")
    assert main(["generate", str(tmp_path), "--prompt-len", "4"]) == 2
    said = capsys.readouterr().err
    assert "has no causal language model that transformers can make: " in said
    assert len(said) < 500


def test_terminal_shows_each_token_and_ctrl_c_ends_it_cleanly(model_directory: Path) -> None:
    words = ["generate", str(model_directory), "hello", "--gen-len", "1000000", "--budget", "8MiB"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fastpersist", *words], stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as child:
        os.close(theirs)
        said = ""
        while "token 3 of 1000000: " not in said:
            said += os.read(ours, 4096).decode()
        child.send_signal(signal.SIGINT)
        out = child.communicate(timeout=60)[0]
        os.set_blocking(ours, False)
        try:
            said += os.read(ours, 1 << 20).decode()
        except OSError:  # nothing was left, or the other end is closed
            pass
    os.close(ours)
    assert child.returncode == 130, said
    assert out == ""
    assert "Traceback" not in said
