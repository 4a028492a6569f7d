"""What does not fit is refused before a target changes; damage is called damage; later errors say what they leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import leaks, native_fixtures
from support.archives import flip_bit, read_records, record_places, with_pickle, write_records
from support.resumables import load, network, resumable, save, state_of
from support.sameness import assert_same, portrait

import fastpersist as fp
from fastpersist.loading import restore

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC):UserWarning"),
]

DAMAGE = (fp.FormatError, fp.ChecksumError)


nothing_is_left_behind = leaks.nothing_is_left_behind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.pt"


fault = native_fixtures.fault


# --------------------------------------------------------------------------------------------- refusals


def refused(path: Path, into: dict[str, Any], error: Any = fp.ConfigError, **options: Any) -> str:
    """Expect a refusal that leaves every target as it was and tells nobody of a change; return the message."""
    before = portrait([_state_of(target) for target in into.values()])
    touched: list[str] = []
    with pytest.raises(error) as raised:
        load(path, into, on_filled=touched.append, **options)
    assert portrait([_state_of(target) for target in into.values()]) == before
    assert touched == []
    return str(raised.value)


def _state_of(target: Any) -> Any:
    return target.state_dict() if hasattr(target, "state_dict") else target


def test_every_difference_is_listed_and_nothing_changes(path: Path) -> None:
    source = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [source.weight]}, {"params": [source.bias]}], momentum=0.5)
    save({"model": source.state_dict(), "optimizer": optimizer.state_dict(), "n": 3, "t": {"x": torch.ones(1)}}, path)
    target = torch.nn.Sequential(torch.nn.Linear(3, 2))
    message = refused(
        path,
        {
            "model": target,
            "optimizer": torch.optim.SGD(target.parameters()),
            "scheduler": torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(target.parameters())),
            "n": 3,
            "t": {"y": torch.ones(1)},
        },
    )
    for part in (
        "was not changed",
        "model.0.weight is in the target, but not in the file",
        "model.weight is in the file, but not in the target",
        "optimizer has 1 parameter groups in the target, 2 in the file",
        "scheduler is in the target, but not in the file, which holds model, optimizer, n, t",
        "n is a value of type int in the target, which cannot be restored in place",
        "t.y is in the target, but not in the file",
        "t.x is in the file, but not in the target",
    ):
        assert part in message


def test_optimizer_state_of_another_shape_is_refused(path: Path) -> None:
    def made(size: int) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(size))
        optimizer = torch.optim.Adam([weight])
        weight.sum().backward()
        optimizer.step()
        return optimizer

    save({"optimizer": made(3).state_dict()}, path)
    message = refused(path, {"optimizer": made(4)})
    assert "optimizer.state[0].exp_avg has shape (4,) in the target, (3,) in the file" in message


def test_file_that_is_no_dict_is_refused(path: Path) -> None:
    save([torch.ones(1)], path)
    refused(path, {"x": torch.zeros(1)})
    assert load(path)[0].tolist() == [1]


def test_unsafe_file_is_refused_in_torchs_words(path: Path) -> None:
    import pickle

    save({"w": torch.ones(1), "object": network()}, path)
    refused(path, {"w": torch.zeros(1)}, pickle.UnpicklingError)
    target = torch.zeros(1)
    loaded = load(path, {"w": target}, weights_only=False, keys=["object"])
    assert target.tolist() == [1]
    assert_same(loaded["object"].state_dict(), network().state_dict())


def test_file_without_checksums_is_not_verified(path: Path) -> None:
    save({"w": torch.ones(1)}, path, checksum=False)
    refused(path, {"w": torch.zeros(1)}, fp.UnsupportedError, verify=True)
    assert load(path, {"w": torch.zeros(1)})["w"].tolist() == [1]


# --------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("steps", [0, 1], ids=["new optimizer", "optimizer with state"])
def test_damage_in_any_record_is_found_before_anything_changes(steps: int, path: Path) -> None:
    save(state_of(resumable()), path)
    good = path.read_bytes()
    target = resumable(9, steps)
    for name, (offset, size) in record_places(good).items():
        for at in sorted({offset, offset + size - 1}):
            flip_bit(path, at)
            if name.startswith("data/"):
                assert refused(path, target, fp.ChecksumError, verify=True)
            else:  # also without verify: what the pickle says is believed
                assert refused(path, target, DAMAGE)
            flip_bit(path, at)
    assert path.read_bytes() == good
    load(path, target, verify=True)


@pytest.mark.slow  # loads a file once for each byte of its structure, or each third
@pytest.mark.parametrize("byte_step", [3, pytest.param(1, marks=pytest.mark.long)])
def test_nothing_but_damage_is_reported_whatever_byte_of_the_structure_changes(path: Path, byte_step: int) -> None:
    source = torch.nn.Linear(2, 2)
    save({"model": source.state_dict(), "step": 3}, path)
    good = path.read_bytes()
    places = record_places(good).values()
    quiet = {at for offset, size in places for at in range(offset, offset + size)}
    target = torch.nn.Linear(2, 2)
    for at in range(0, len(good), byte_step):
        if at in quiet or len(set(good[max(0, at - 8) : at + 8])) == 1:  # padding
            continue
        bad = bytearray(good)
        bad[at] ^= 0xFF
        path.write_bytes(bad)
        try:
            loaded = load(path, {"model": target}, verify=True)
        except DAMAGE:
            continue
        assert loaded["step"] == 3
        assert_same(target.state_dict(), source.state_dict())


def test_every_truncation_is_damage(path: Path) -> None:
    source = resumable()
    save(state_of(source), path)
    good = path.read_bytes()
    target = resumable(9)
    before = portrait(state_of(target))
    for length in [0, 1, 8, 100, *range(4000, len(good) - 2000, 20_000), *range(len(good) - 130, len(good), 7)]:
        path.write_bytes(good[:length])
        for into in (target, None):
            with pytest.raises(DAMAGE):
                load(path, into)
    assert portrait(state_of(target)) == before


def test_foreign_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(fp.CheckpointNotFoundError):
        load(tmp_path / "state.pt", {"w": torch.ones(1)})
    (tmp_path / "text").write_bytes(b"hello, this is no checkpoint")
    with pytest.raises(fp.FormatError, match="neither"):
        load(tmp_path / "text")


def test_storage_that_is_missing_or_short_is_damage(path: Path) -> None:
    save({"w": torch.ones(4), "x": torch.ones(5)}, path)
    records = read_records(path)
    stem = path.stem
    for changed in (
        {name: data for name, data in records.items() if name != f"{stem}/data/1"},
        records | {f"{stem}/data/0": b"x" * 15},
    ):
        write_records(path, changed)
        for into in ({"w": torch.zeros(4)}, {"x": torch.zeros(5)}, None):
            with pytest.raises(fp.FormatError):
                load(path, into)


def test_tensor_that_reaches_beyond_its_storage_is_damage(path: Path) -> None:
    save({"w": torch.ones(4)}, path)
    pkl = read_records(path)[f"{path.stem}/data.pkl"]
    assert pkl.count(b"K\x04\x85q") == 1
    with_pickle(path, pkl.replace(b"K\x04\x85q", b"K\x09\x85q"))
    target = torch.zeros(9)
    with pytest.raises((fp.FormatError, RuntimeError)):
        load(path, {"w": target})
    assert target.sum() == 0


# --------------------------------------------------------------------------------------------- disk errors


def failure_to_load(path: Path, into: dict[str, Any], touched: list[str]) -> fp.StorageError | None:
    try:
        load(path, into, engine="fault:threads", on_filled=touched.append)
    except fp.StorageError as error:
        return error
    return None


def test_disk_error_at_any_read_names_what_is_overwritten_and_another_file_restores_all(
    tmp_path: Path, fault: Callable[..., None]
) -> None:
    newer, older = resumable(1, 4), resumable(2, 3)
    save(state_of(newer), tmp_path / "newer.pt")
    save(state_of(older), tmp_path / "older.pt")
    wanted = portrait(state_of(older))
    outcomes = []
    for steps in (0, 1):
        for nth in range(1, 10):
            target = resumable(9, steps)
            before = portrait(state_of(target))
            touched: list[str] = []
            fault(op="read", nth=nth, count=1)
            error = failure_to_load(tmp_path / "newer.pt", target, touched)
            if error is None:
                outcomes.append("whole")
                break
            assert error.errno == 5
            overwritten = f"partly overwritten, and not usable until they are restored again: {', '.join(touched)}"
            assert (overwritten in str(error)) == bool(touched)
            assert touched or portrait(state_of(target)) == before
            outcomes.append("partly" if touched else "untouched")
            load(tmp_path / "older.pt", target)
            assert portrait(state_of(target)) == wanted
    assert {"whole", "partly", "untouched"} <= set(outcomes)


def test_error_of_torch_while_filling_says_what_is_overwritten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("device lost")

    save({"w": torch.ones(2), "v": torch.ones(2)}, path)
    monkeypatch.setattr(restore, "fill_pairs", fail)
    with pytest.raises(fp.StorageError, match=r"RuntimeError: device lost; partly overwritten.*: v, w"):
        load(path, {"v": torch.zeros(2), "w": torch.zeros(2)})


@pytest.mark.parametrize(("engine", "error"), [("abacus", fp.ConfigError), ("null", fp.ConfigError)])
def test_engine_that_cannot_read_is_told_as_it_is(engine: str, error: type[Exception], path: Path) -> None:
    save({"w": torch.ones(2)}, path)
    target = torch.zeros(2)
    with pytest.raises(error, match="engine"):
        load(path, {"w": target}, engine=engine)
    assert target.tolist() == [0, 0]
