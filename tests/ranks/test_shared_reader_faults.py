"""Ranks that load one file together fail together: own error on the rank that failed, PeerError on all others."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.archives import flip_bit, record_places
from support.loads_together import content, trained, watch, world
from support.process_groups import rank_endings, run_ranks
from support.sameness import portrait

import fastpersist as fp
from fastpersist import _native
from fastpersist.distributed import shared_reader
from fastpersist.distributed.shared_reader import SharedReader
from fastpersist.loading import unpickle
from fastpersist.loading.restore import load_state
from fastpersist.transfer.reader import ReadResult


@pytest.fixture(scope="module")
def zip_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "model.pt"
    fp.save(content(), path)
    return path


@pytest.mark.parametrize("way", ["ahead", "alone", "auto"])
@pytest.mark.parametrize("function", ["load", "load_into"])
def test_damage_is_found_by_all_ranks(way: str, function: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    fp.save({"a": torch.zeros(600_000), "b": torch.zeros(2_000_000)}, path)
    (offset_bytes, size_bytes) = record_places(path.read_bytes())["data/1"]
    flip_bit(path, offset_bytes + size_bytes - 3)  # the last rank reads it

    def work(rank: int, count: int) -> Any:
        watch(way)
        target = {"a": torch.ones(600_000), "b": torch.ones(2_000_000)}
        try:
            if function == "load":
                fp.load(path, verify=True, process_group=world())
            else:
                fp.load_into(path, target, verify=True, process_group=world())
        except fp.ChecksumError as error:
            return str(error), all(bool((tensor == 1).all()) for tensor in target.values())
        raise RuntimeError("no damage was found")

    found = run_ranks(3, work)
    assert len(set(found)) == 1
    assert "the bytes of b are damaged" in found[0][0]
    assert found[0][1]


class Fragile:
    """Refuses to be unpickled where told so."""

    refused = False

    def __init__(self) -> None:
        self.state = 1

    def __setstate__(self, state: object) -> None:
        if Fragile.refused:
            raise ValueError("not here")


def miss_the_file(path: Path) -> None:
    fp.load(path.with_name("elsewhere.pt"), process_group=world())


def read_half_a_file(path: Path) -> None:
    half = path.with_name("half.pt")
    half.write_bytes(path.read_bytes()[:2_000_000])
    fp.load(half, process_group=world())


def name_no_engine(path: Path) -> None:
    fp.load(path, process_group=world(), engine="nothing", weights_only=False)


def meet_a_bad_disk(path: Path) -> None:
    with reading(fp.StorageError(errno.EIO, f"reading {path}: bad disk", str(path))):
        fp.load(path, process_group=world(), weights_only=False)


def fail_while_unpickling(path: Path) -> None:
    Fragile.refused = True
    try:
        fp.load(path, process_group=world(), weights_only=False)
    finally:
        Fragile.refused = False


def be_refused_by_torch(path: Path) -> None:
    fp.load(path, process_group=world())  # weights_only


def be_interrupted(path: Path) -> None:
    with reading(KeyboardInterrupt()):
        fp.load(path, process_group=world(), weights_only=False)


@contextlib.contextmanager
def reading(error: BaseException) -> Iterator[None]:
    """Let every read of this rank raise an error."""

    def fail(*arguments: Any, **options: Any) -> ReadResult:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reader, "read_extents", fail)
        yield


@pytest.mark.parametrize("way", ["ahead", "alone"])
@pytest.mark.parametrize(
    ("fail", "name"),
    [
        (miss_the_file, "CheckpointNotFoundError"),
        (read_half_a_file, "FormatError"),
        (name_no_engine, "ConfigError"),
        (meet_a_bad_disk, "StorageError"),
        (fail_while_unpickling, "ValueError"),
        (be_refused_by_torch, "UnpicklingError"),
        (be_interrupted, "KeyboardInterrupt"),
    ],
)
def test_failure_of_one_rank_is_the_failure_of_all_and_the_next_load_works(
    fail: Callable[[Path], None], name: str, way: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    fp.save({**content(), "fragile": [Fragile()]}, path)

    def work(rank: int, count: int) -> tuple[str, str, int, str]:
        watch(way)
        error: BaseException
        try:
            if rank == 1:
                fail(path)
            else:
                fp.load(path, process_group=world(), weights_only=False)
            raise RuntimeError("nothing was raised")
        except BaseException as caught:  # noqa: BLE001 - a KeyboardInterrupt among them
            error = caught
        loaded = fp.load(path, process_group=world(), weights_only=False)
        assert torch.equal(loaded["large"], content()["large"])
        cause = type(error.__cause__).__name__
        return type(error).__name__, str(error), getattr(error, "rank", -1), cause

    endings = run_ranks(3, work)
    assert endings[1][0] == name
    for kind, message, rank, cause in (endings[0], endings[2]):
        assert (kind, rank) == ("PeerError", 1)
        assert message == f"rank 1 failed while loading {path}: {name}: {endings[1][1]}"
        assert cause == (name if hasattr(fp, name) else "NoneType")


def test_misfit_on_one_rank_changes_no_target(tmp_path: Path) -> None:
    fp.save({"a": torch.zeros(600_000), "b": torch.zeros(5)}, tmp_path / "model.pt")

    def work(rank: int, count: int) -> tuple[str, str, bool]:
        target = {"a": torch.ones(600_000), "b": torch.ones(5 + rank)}
        try:
            fp.load_into(tmp_path / "model.pt", target, process_group=world())
        except fp.FastPersistError as error:
            return type(error).__name__, str(error), all(bool((tensor == 1).all()) for tensor in target.values())
        raise RuntimeError("it fitted")

    first, second = run_ranks(2, work)
    assert second[0] == "ConfigError"
    assert first[0] == "PeerError"
    assert "overwritten" not in first[1]
    assert first[2]
    assert second[2]


def test_state_that_does_not_fit_on_one_rank_touches_no_target(tmp_path: Path) -> None:
    model, optimizer = trained(1, 2)
    path = str(tmp_path / "state.pt")
    fp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def work(rank: int, count: int) -> tuple[str, str, list[str]]:
        model, optimizer = trained(5, 1)
        into = {"model": torch.nn.Linear(2, 2) if rank == 1 else model, "optimizer": optimizer}
        touched: list[str] = []
        try:
            with SharedReader(world(), "step 3") as read:
                load_state(
                    path,
                    into=into,
                    map_location=None,
                    verify=False,
                    weights_only=True,
                    engine="auto",
                    on_filled=touched.append,
                    read=read,
                )
        except fp.FastPersistError as error:
            return type(error).__name__, str(error), touched
        raise RuntimeError("it fitted")

    first, second = run_ranks(2, work)
    assert (first[0], second[0]) == ("PeerError", "ConfigError")
    assert first[1].startswith("rank 1 failed while loading step 3: ConfigError: ")
    assert first[2] == second[2] == []


def test_disk_error_on_one_rank_is_said_to_have_overwritten_the_targets_of_all(tmp_path: Path) -> None:
    fp.save({"a": torch.zeros(600_000)}, tmp_path / "model.pt")

    def work(rank: int, count: int) -> tuple[str, str]:
        watch("alone")
        _native.set_fault_plan(_native.FaultPlan(op="read", nth=1))
        engine = "fault:threads-buffered" if rank == 0 else "threads-buffered"
        try:
            fp.load_into(tmp_path / "model.pt", {"a": torch.ones(600_000)}, engine=engine, process_group=world())
        except fp.FastPersistError as error:
            return type(error).__name__, str(error)
        raise RuntimeError("nothing was raised")

    found = run_ranks(2, work)
    assert [kind for kind, _ in found] == ["StorageError", "PeerError"]
    assert all("target partly overwritten, the contents of these tensors are unknown: a" in text for _, text in found)


def test_all_ranks_agree_on_the_first_failure(zip_path: Path) -> None:
    def work(rank: int, count: int) -> tuple[str, int, str]:
        shared = SharedReader(world(), "step 3")
        try:
            with shared:
                if rank == 2:
                    raise fp.FormatError("too short", path="x.pt", offset_bytes=7)
                if rank == 1:
                    raise fp.StorageError(5, "reading x.pt: bad disk", "x.pt")
        except fp.FastPersistError as error:
            assert shared.first_failure is not None
            first, first_error = shared.first_failure
            return type(error).__name__, first, f"{type(first_error).__name__}: {first_error}"
        raise RuntimeError("nothing was raised")

    said = (1, "StorageError: reading x.pt: bad disk")
    assert run_ranks(3, work) == [("PeerError", *said), ("StorageError", *said), ("FormatError", *said)]


@pytest.mark.parametrize("nodes", ["one node", "two nodes"])
@pytest.mark.parametrize("difference", ["content", "size"])
def test_different_files_are_refused_by_all(difference: str, nodes: str, tmp_path: Path) -> None:
    fp.save(content(0), tmp_path / "0.pt")
    fp.save(content(1) if difference == "content" else {"other": torch.ones(900_000)}, tmp_path / "1.pt")

    def work(rank: int, count: int) -> None:
        watch(node="" if nodes == "one node" else str(rank))
        fp.load(tmp_path / f"{rank}.pt", process_group=world())

    for ending in rank_endings(2, work):
        assert ending.error_type is fp.CoordinationError, ending
        assert "the ranks load different files" in ending.error_text
        assert f"{tmp_path / '0.pt'} of" in ending.error_text
        assert f"{tmp_path / '1.pt'} of" in ending.error_text
        assert ending.error_text.endswith("on rank 1")


def test_equal_copies_of_a_file_may_be_loaded(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        fp.save(content(), tmp_path / str(rank) / "model.pt")

    def work(rank: int, count: int) -> tuple[Any, list[str]]:
        watched = watch(node=str(rank))
        return portrait(fp.load(tmp_path / str(rank) / "model.pt", process_group=world())), watched.ways

    expected = portrait(torch.load(tmp_path / "0" / "model.pt"))
    assert run_ranks(2, work) == [(expected, ["alone"])] * 2


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("point", ["ahead: reading", "alone: reading", "ahead: unpickling"])
def test_death_of_a_rank_is_heard_by_all_within_the_timeout(point: str, count: int, zip_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        watch(point.partition(":")[0])
        if rank == 1:
            patched: Any = shared_reader if "reading" in point else unpickle
            name = "read_extents" if "reading" in point else "unpickle_with"
            setattr(patched, name, lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL))
        fp.load(zip_path, process_group=world())

    endings = rank_endings(count, work, group_timeout_s=5.0)
    assert endings[1].signal == signal.SIGKILL
    for rank in {*range(count)} - {1}:
        ending = endings[rank]
        assert ending.error_type is not None, "it returned"
        assert issubclass(ending.error_type, fp.PeerError), ending
        assert ending.error_attributes["rank"] == (1 if count == 2 else shared_reader.UNKNOWN_RANK)
        assert ending.seconds < 60
        assert f"gone or silent while loading {zip_path}" in ending.error_text


def test_rank_that_never_comes_is_waited_for_no_longer_than_the_timeout(zip_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        if rank == 0:
            fp.load(zip_path, process_group=world())

    first, second = rank_endings(2, work, group_timeout_s=1.0)
    assert second.error_type is None
    assert first.error_type is fp.AgreementTimeoutError, first
    assert first.seconds < 60


def test_process_outside_the_group_is_refused(zip_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        group = dist.new_group([0])
        if rank == 1:
            fp.load(zip_path, process_group=group)

    first, second = rank_endings(2, work)
    assert first.error_type is None
    assert second.error_type is fp.ConfigError, second


def test_subgroup_names_its_own_ranks(zip_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        loaded = portrait(fp.load(zip_path, process_group=group))
        with pytest.raises(fp.PeerError if rank == 1 else fp.CheckpointNotFoundError) as raised:
            fp.load(zip_path if rank == 1 else "nowhere", process_group=group)
        assert rank == 2 or getattr(raised.value, "rank", None) == 1
        return loaded

    expected = portrait(torch.load(zip_path))
    assert run_ranks(3, work) == [None, expected, expected]
