"""Two processes with DDP: one directory with the parts of both, and both know how each save ended."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from support.huggingface_ranks import train
from support.huggingface_trainers import assert_like_stock, assert_same_file, checkpoints_in, files_below
from support.runs import hidden_names

import fastpersist as fp


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stock") / "stock"
    train(directory, "stock")
    return directory / "run"


def test_directories_and_what_is_heard_are_those_of_a_stock_trainer(tmp_path: Path, stock: Path) -> None:
    first, second = train(tmp_path / "ours", "ours")
    output = tmp_path / "ours" / "run"
    assert checkpoints_in(output) == checkpoints_in(stock) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    for name in checkpoints_in(stock):
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= files_below(output / name)
        assert_like_stock(output / name, stock / name)
    assert hidden_names(output) == []
    assert first == second  # at the same step, or the ranks would part ways
    assert [line.split(" at ")[0] for line in first] == [
        *(f"heard of {step}" for step in (2, 4, 6, 8)),
        "ended",
    ]
    assert train(tmp_path / "ours", "ours", "resume") == [["ended at 8"]] * 2


def test_callback_saves_the_same_files(tmp_path: Path, stock: Path) -> None:
    train(tmp_path / "ours", "callback")
    output = tmp_path / "ours" / "run"
    assert checkpoints_in(output) == checkpoints_in(stock)
    for name in checkpoints_in(stock):
        assert files_below(output / name) == files_below(stock / name) | {"MANIFEST.json"}
        for file in files_below(stock / name) - {"trainer_state.json"}:
            if not file.startswith("rng_state"):  # that of a callback is from before the evaluation
                assert_same_file(output / name / file, stock / name / file)


def test_all_ranks_are_told_of_a_full_disk(tmp_path: Path) -> None:
    first, second = train(tmp_path, "ours", "raise")
    assert checkpoints_in(tmp_path / "run") == ["checkpoint-2"]
    assert first[-1].startswith("ended by NoSpaceError")
    assert second[-1].startswith("ended by PeerError: rank 0 failed while saving")
    assert "NoSpaceError" in second[-1]
    assert hidden_names(tmp_path / "run") == []


def test_all_ranks_go_on_after_a_warning(tmp_path: Path) -> None:
    first, second = train(tmp_path, "ours", "warn")
    assert first == second
    assert [line.split(" at ")[0] for line in first] == ["heard of 2", "heard of 6", "heard of 8", "ended"]
    assert checkpoints_in(tmp_path / "run") == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]


def test_a_rank_that_cannot_save_its_part_ends_all(tmp_path: Path) -> None:
    first, second = train(tmp_path, "ours", "part")
    assert first == ["ended by RuntimeError: rank 1 could not save: TypeError: rank 1 fails"]
    assert second == ["ended by TypeError: rank 1 fails"]
    assert list((tmp_path / "run").iterdir()) == []


def test_a_sigterm_that_reaches_one_rank_makes_all_of_them_save_the_same_step_and_end(tmp_path: Path) -> None:
    ends = [[line for line in lines if line.startswith("ended")] for lines in train(tmp_path, "ours", "sigterm")]
    assert ends == [["ended at 5", "ended at 8"]] * 2  # the next training is not ended by the signals of this one
    checkpoint = tmp_path / "run" / "checkpoint-5"
    assert fp.verify(checkpoint).ok
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= files_below(checkpoint)
    assert "checkpoint-is-incomplete.txt" not in files_below(checkpoint)
    assert hidden_names(tmp_path / "run") == []
