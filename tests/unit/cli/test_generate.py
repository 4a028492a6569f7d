"""`fastpersist generate`: its figures, and what it refuses before it imports anything large."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from fastpersist.cli import generate, main
from fastpersist.cli.generate import TokenClock, random_prompts, throughputs


def test_throughputs_are_those_of_zero_inference() -> None:
    found = throughputs(batch_size=4, prompt_len=10, gen_len=5, prefill_s=2.0, total_s=6.0)
    assert found["prefill_throughput"] == 4 * 10 / 2.0
    assert found["decode_throughput"] == 4 * (5 - 1) / (6.0 - 2.0)
    assert found["total_throughput"] == 4 * 5 / 6.0


def test_one_token_is_no_decoding() -> None:
    assert throughputs(1, 8, 1, 2.0, 2.0)["decode_throughput"] is None


def test_clock_notes_the_prompt_and_each_token() -> None:
    shown: list[int] = []
    clock = TokenClock(shown.append)
    for _ in range(4):
        clock.put(torch.zeros(1))
    clock.end()
    assert shown == [1, 2, 3]
    assert len(clock.times_s) == 4
    assert clock.times_s == sorted(clock.times_s)


def test_random_prompts_are_the_same_each_time() -> None:
    prompts = random_prompts(100, 3, 7)
    assert prompts.shape == (3, 7)
    assert 0 <= int(prompts.min()) <= int(prompts.max()) < 100
    assert torch.equal(prompts, random_prompts(100, 3, 7))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give one of PROMPT, --prompt-file and --prompt-len"),
        (["hello", "--prompt-len", "4"], "give one of PROMPT, --prompt-file and --prompt-len"),
        (["hello", "--batch-size", "4"], "give --prompt-len as well"),
    ],
)
def test_prompts_come_from_one_place(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def test_name_on_a_hub_is_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "someone/some-model", "hello"]) == 2
    assert "someone/some-model is no directory" in capsys.readouterr().err


def test_missing_transformers_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["generate", str(tmp_path), "hello"]) == 2
    assert 'pip install "fastpersist[huggingface]"' in capsys.readouterr().err


def test_directory_without_a_model_is_said_before_its_tokenizer_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # transformers is there, and not imported
    assert main(["generate", str(tmp_path), "hello"]) == 2
    assert f"{tmp_path} has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [("\n \n", "no line with a prompt"), (None, "cannot be read")])
def test_prompt_file_must_have_prompts(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    if content is not None:
        path.write_text(content)
    with pytest.raises(generate.ConfigError, match=said):
        generate._texts(argparse.Namespace(prompt=None, prompt_file=str(path)))


def test_prompt_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\n\n two \n")
    namespace = argparse.Namespace(prompt=None, prompt_file=str(tmp_path / "prompts"))
    assert generate._texts(namespace) == ["one", " two "]


def test_text_of_a_model_cannot_move_the_cursor() -> None:
    figures = throughputs(1, 2, 3, 1.0, 2.0)
    numbers = dict.fromkeys(("read_bytes", "weight_bytes", "resident_bytes", "ring_bytes", "peak_bytes"), 10**6)
    counts = {"resident_unit_count": 1, "unit_count": 2, "read_bytes_per_s": 1e9, "stall_s": 0.5, "engine": "uring"}
    text = generate._report(figures | numbers | counts | {"texts": ["one\ntwo\x1b[2J"]})
    assert text.startswith("one\ntwo\\x1b[2J\n\nprefill     1.000 s, 2.00 tokens/s\n")
