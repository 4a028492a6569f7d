"""The n-th read fails, for n = 1, 2, 3 … until there is no n-th: an error names the weight, and the model goes on."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.leaks import no_leaks
from support.streamed_models import Blocks, expect_same, least_budget, loaded_whole, on_meta, save_weights
from support.tensor_files import EVERY, faults, skip_without
from torch import nn

import fastpersist as fp
from fastpersist import _native
from fastpersist.errors import EndOfFileError, StorageError

pytestmark = [pytest.mark.usefixtures("small_units"), pytest.mark.slow]  # a loop over every read of several passes

IDS = torch.tensor([[1, 5, 99], [7, 5, 0]])
PASSES = 3
FAULTS: dict[str, dict[str, Any]] = {
    "EIO": {"sys_errno": errno.EIO},
    "EIO-lasting": {"sys_errno": errno.EIO, "count": EVERY},
    "zero": {"kind": "zero"},
    "short": {"kind": "short", "short_bytes": 512},
    "EAGAIN": {"sys_errno": errno.EAGAIN, "count": 3},
    "late": {"kind": "delay", "delay_ms": 5},
}
FORGIVEN = ("short", "EAGAIN", "late")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: Blocks(4),
    "tied": lambda: Blocks(24, words=400, tied=True),
}


@pytest.mark.parametrize("engine", ["uring", "threads-buffered"])
@pytest.mark.parametrize("fault", FAULTS)
def test_whichever_read_fails_the_next_forward_is_right(fault: str, engine: str, tmp_path: Path) -> None:
    skip_without(engine, tmp_path)
    expect_each_fault_is_survived(MODELS["blocks"], fault, engine, tmp_path, extra_bytes=12_000)


@pytest.mark.parametrize("fault", ["EIO", "zero"])
def test_rows_of_a_tied_embedding_fail_like_other_reads(fault: str, tmp_path: Path) -> None:
    expect_each_fault_is_survived(MODELS["tied"], fault, "threads", tmp_path, extra_bytes=0, every=7)


@pytest.mark.parametrize("fault", ["EIO", "zero"])
def test_residents_fail_like_other_reads(fault: str, tmp_path: Path) -> None:
    expect_each_fault_is_survived(MODELS["blocks"], fault, "threads", tmp_path, extra_bytes=1 << 20)


@pytest.mark.parametrize("shards", [3])
def test_an_error_names_a_weight_of_its_own_file(shards: int, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Blocks(4)

    path = save_weights(build(), tmp_path / "sharded", shards=shards)
    expect_each_fault_is_survived(build, "EIO", "threads", tmp_path, extra_bytes=0, source=path)


def expect_each_fault_is_survived(
    build: Callable[[], nn.Module],
    fault: str,
    engine: str,
    directory: Path,
    *,
    extra_bytes: int,
    every: int = 1,
    source: Path | None = None,
) -> None:
    whole = build()
    path = source or save_weights(whole, directory / "model.safetensors")
    if source is None:
        loaded_whole(whole, path)
    else:
        for shard in path.glob("*.safetensors"):
            loaded_whole(whole, shard)
    with torch.inference_mode():
        expected = whole(IDS)
    budget = least_budget(lambda: on_meta(build()), path) + extra_bytes
    failures = 0
    for nth in itertools.count(1, every):
        model = on_meta(build())

        def run(model: nn.Module, where: dict[str, list[tuple[str, int, int]]]) -> int:
            try:
                found = model(IDS)
            except StorageError as error:
                failure = error
            else:
                expect_same(found, expected)
                return 0
            assert fault not in FORGIVEN
            assert isinstance(failure, EndOfFileError) == (fault == "zero")
            expect_told(failure, where)
            return 1

        with contextlib.ExitStack() as stack, torch.inference_mode():
            with faults(op="read", nth=nth, **FAULTS[fault]):  # reading begins before the first forward
                stream = stack.enter_context(fp.stream(model, path, budget_bytes=budget, engine=f"fault:{engine}"))
                where = places_of(stream)
                failures += sum(run(model, where) for _ in range(PASSES))
                hit = _native.clear_fault_plan()
            failures += run(model, where)  # the first block was read ahead, perhaps in vain
            expect_same(model(IDS), expected)
            expect_same(model(IDS), expected)
            stats = stream.stats()
            assert stats.outside_count == 0
            assert stats.on_demand_count == 0
        if not hit:
            break
    assert nth > 6
    if fault not in FORGIVEN:
        assert failures > 4


def places_of(stream: fp.WeightStream) -> dict[str, list[tuple[str, int, int]]]:
    """Return path, first byte and end of each weight."""
    return {
        weight.name: [
            (stream._source.file(piece.file).path, piece.offset_bytes, piece.offset_bytes + piece.size_bytes)
            for piece in weight.pieces
        ]
        for weight in stream._weights
    }


def expect_told(error: StorageError, where: dict[str, list[tuple[str, int, int]]]) -> None:
    """Fail unless an error has path and offset, and names a weight near that offset in that file."""
    assert error.filename is not None
    assert str(error.filename) in str(error)
    assert error.offset_bytes is not None
    assert str(error).count("for the weight") == 1, str(error)
    name = str(error).rpartition("for the weight ")[2]
    path, start, end = where[name][0]
    assert path == str(error.filename)
    assert start - (64 << 10) <= error.offset_bytes < end + 4096
    assert error.__cause__ is not error


@pytest.mark.parametrize("fault", ["EIO", "zero"])
def test_a_read_on_demand_fails_and_works_again(fault: str, tmp_path: Path) -> None:
    path = save_weights(Blocks(4), tmp_path / "model.safetensors")
    whole = loaded_whole(Blocks(4), path)
    model = on_meta(Blocks(4))
    with no_leaks(), fp.stream(model, path, budget_bytes="1MiB", engine="fault:threads") as stream:
        for filling in stream._prefetch._fillings.values():
            filling.wait()  # what is read ahead
        with faults(op="read", **FAULTS[fault]), pytest.raises(StorageError, match=r"the weight blocks\.2\.1\.weight"):
            model.blocks[2][1].weight.sum()
        expect_same(model.blocks[2][1].weight.sum(), whole.blocks[2][1].weight.sum().detach())


@pytest.mark.parametrize("fault", ["EIO", "zero"])
def test_small_buffers_that_cannot_be_read_leave_the_model_as_it_was(fault: str, tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    path = save_weights(whole, tmp_path / "model.safetensors")
    model = on_meta(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before = {name: id(each) for name, each in (*model.named_parameters(), *model.named_buffers())}
    with no_leaks(), faults(op="read", **FAULTS[fault]), pytest.raises(StorageError, match=r"for the weight 1\."):
        fp.stream(model, path, engine="fault:threads")
    assert {name: id(each) for name, each in (*model.named_parameters(), *model.named_buffers())} == before
    with fp.stream(model, path) as stream:
        expect_same(model.eval()(torch.ones(2, 4)), loaded_whole(whole, path).eval()(torch.ones(2, 4)).detach())
        assert not stream.closed
