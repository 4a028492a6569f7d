"""Ranks that load one file together get what each alone would get, whichever way they read: real gloo groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.archives import record_places
from support.loads_together import MIB, Model, content, trained, watch, world
from support.process_groups import run_ranks
from support.sameness import portrait

import fastpersist as fp
from fastpersist.config import BLOCK_BYTES
from fastpersist.distributed import shared_reader
from fastpersist.distributed.partition import CUT_BYTES_MIN
from fastpersist.distributed.shared_reader import cut_places
from fastpersist.loading.restore import load_state

WAYS = ("ahead", "alone", "auto")


@pytest.fixture(scope="module")
def zip_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "model.pt"
    fp.save(content(), path)
    return path


# --------------------------------------------------------------------------------------------- the same object


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_each_rank_gets_what_torch_load_gives(way: str, count: int, zip_path: Path) -> None:
    def work(rank: int, count: int) -> tuple[Any, list[str]]:
        watched = watch(way)
        return portrait(fp.load(zip_path, verify=True, process_group=world())), watched.ways

    expected = portrait(torch.load(zip_path))
    for found, ways in run_ranks(count, work):
        assert found == expected
        if count > 1 and way != "auto":
            assert set(ways) == {way}


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_gets_what_safetensors_gives(way: str, tmp_path: Path) -> None:
    tensors = {key: value.clone() for key, value in content().items() if isinstance(value, torch.Tensor)}
    save_file(tensors, tmp_path / "model.safetensors")

    def work(rank: int, count: int) -> Any:
        watch(way)
        return portrait(fp.load(tmp_path / "model.safetensors", process_group=world()))

    expected = portrait(fp.load(tmp_path / "model.safetensors"))
    assert run_ranks(2, work) == [expected] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_each_rank_gets_what_its_keys_choose(suffix: str, way: str, tmp_path: Path) -> None:
    saved = {f"layer{number}": torch.full((MIB // 4,), float(number)) for number in range(4)}
    path = tmp_path / f"model.{suffix}"
    fp.save(saved, path)
    wanted = [["layer[12]"], ["layer2", "layer3"]]

    def work(rank: int, count: int) -> tuple[Any, Any]:
        watch(way)
        target = {name: torch.zeros(MIB // 4) for name in saved}
        fp.load_into(path, target, keys=wanted[rank], process_group=world())
        return portrait(fp.load(path, keys=wanted[rank], process_group=world())), portrait(target)

    for names, found in zip([["layer1", "layer2"], ["layer2", "layer3"]], run_ranks(2, work), strict=True):
        chosen = {name: tensor for name, tensor in saved.items() if name in names}
        assert found == (portrait(chosen), portrait({name: chosen.get(name, torch.zeros(MIB // 4)) for name in saved}))


def test_a_key_that_chooses_nothing_on_one_rank_ends_the_load_on_all(zip_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        expected = fp.ConfigError if rank else fp.PeerError
        with pytest.raises(expected, match="nothing is among the keys"):
            fp.load(zip_path, keys=["nothing"] if rank else None, process_group=world())

    run_ranks(2, work)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_divide_the_check_and_read_no_byte_twice(count: int, tmp_path: Path) -> None:
    saved = {"a": torch.ones(3 * MIB), "b": torch.ones(700_000)}
    fp.save(saved, tmp_path / "model.pt")

    def work(rank: int, count: int) -> tuple[int, list[str]]:
        watched = watch()
        target = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
        fp.load_into(tmp_path / "model.pt", target, verify=True, process_group=world())
        return watched.asked_bytes[0], watched.ways

    found = run_ranks(count, work)
    assert [ways[0] for _, ways in found] == ["divide"] * count
    own_bytes = [asked_bytes for asked_bytes, _ in found]
    assert sum(own_bytes) == sum(tensor.nbytes for tensor in saved.values())
    assert max(own_bytes) - min(own_bytes) <= 2 * BLOCK_BYTES


def test_ranks_of_one_node_read_each_byte_ahead_once(zip_path: Path) -> None:
    def work(rank: int, count: int) -> tuple[list[str], list[tuple[int, int]]]:
        watched = watch(cached_bytes=0)
        advised: list[tuple[int, int]] = []

        def advise(fd: int, offset_bytes: int, size_bytes: int, advice: int) -> None:
            assert advice == os.POSIX_FADV_WILLNEED
            advised.append((offset_bytes, offset_bytes + size_bytes))

        patched: Any = os
        patched.posix_fadvise = advise
        fp.load(zip_path, process_group=world())
        return watched.ways, advised

    found = run_ranks(2, work)
    assert [ways for ways, _ in found] == [["ahead"], ["ahead"]]
    places = record_places(zip_path.read_bytes())
    for name, (offset_bytes, size_bytes) in places.items():
        if name.startswith("data/") and size_bytes >= CUT_BYTES_MIN:
            covered = [0] * size_bytes
            for low, high in found[0][1] + found[1][1]:
                for index in range(max(low, offset_bytes), min(high, offset_bytes + size_bytes), BLOCK_BYTES):
                    covered[index - offset_bytes] += 1
            assert sum(covered) == -(-size_bytes // BLOCK_BYTES), name
    sizes = [sum(high - low for low, high in advised) for _, advised in found]
    assert 0.8 < sizes[0] / sizes[1] < 1.25


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ("one node, cold", "ahead"),
        ("one node, in the page cache", "alone"),
        ("one node, named engine", "alone"),
        ("two nodes", "alone"),
        ("two nodes of two ranks", "ahead"),
    ],
)
def test_way_is_the_one_that_is_faster(situation: str, expected: str, zip_path: Path) -> None:
    def work(rank: int, count: int) -> list[str]:
        node = {"one": "", "two": str(rank % 2)}[situation[:3]]
        watched = watch(node=node, cached_bytes=1 << 40 if "cache" in situation else 0)
        engine = "threads" if "engine" in situation else "auto"
        loaded = fp.load(zip_path, process_group=world(), engine=engine)
        assert torch.equal(loaded["large"], content()["large"])
        return watched.ways

    count = 4 if "of two ranks" in situation else 2
    assert run_ranks(count, work) == [[expected]] * count


def test_ranks_may_load_in_different_ways(zip_path: Path) -> None:
    def work(rank: int, count: int) -> Any:
        watch()
        options: dict[str, Any] = {"map_location": lambda storage, location: storage} if rank == 1 else {}
        loaded = [fp.load(zip_path, process_group=world(), **options) for _ in range(2)]
        return [portrait(each) for each in loaded]

    expected = portrait(torch.load(zip_path))
    assert run_ranks(2, work) == [[expected] * 2] * 2


def test_legacy_file_is_loaded_by_all(tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "model.pt", _use_new_zipfile_serialization=False)

    def work(rank: int, count: int) -> Any:
        return portrait(fp.load(tmp_path / "model.pt", process_group=world()))

    assert run_ranks(2, work) == [portrait(torch.load(tmp_path / "model.pt"))] * 2


def test_group_of_one_talks_to_nobody(zip_path: Path) -> None:
    def work(rank: int, count: int) -> None:
        patched: Any = dist
        patched.all_gather_object = None
        fp.load(zip_path, process_group=world())
        fp.load_into(zip_path, {"large": torch.zeros(3 * MIB + 17, dtype=torch.uint8)}, strict=False)

    run_ranks(1, work)


# --------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("way", ["ahead", "alone", "auto"])
def test_modules_of_all_ranks_are_filled(way: str, tmp_path: Path) -> None:
    saved = Model(1)
    fp.save(saved.state_dict(), tmp_path / "model.pt")

    def work(rank: int, count: int) -> Any:
        watch(way)
        model = Model(2 + rank)
        versions = [parameter._version for parameter in model.parameters()]
        fp.load_into(tmp_path / "model.pt", model, verify=True, process_group=world())
        assert all(now._version > before for now, before in zip(model.parameters(), versions, strict=True))
        return portrait(model.state_dict())

    assert run_ranks(2, work) == [portrait(saved.state_dict())] * 2


@pytest.mark.parametrize("way", ["ahead", "alone"])
def test_targets_of_other_layout_or_dtype_on_one_rank_are_filled(way: str, tmp_path: Path) -> None:
    saved = {"a": torch.randn(1100, 800), "b": torch.randn(900, 1500), "c": torch.randn(10)}
    fp.save(saved, tmp_path / "model.pt")

    def work(rank: int, count: int) -> list[bool]:
        watch(way)
        target = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
        if rank == 1:
            target["a"] = torch.zeros(1100, 800, dtype=torch.float64)
            target["b"] = torch.zeros(1500, 900).t()
        fp.load_into(tmp_path / "model.pt", target, process_group=world())
        return [bool((target[key] == saved[key]).all()) for key in saved]

    assert run_ranks(2, work) == [[True] * 3] * 2


def test_strided_tensors_in_the_file_are_read_by_all(tmp_path: Path) -> None:
    saved = {"a": torch.randn(800, 1400)[:, ::2], "b": torch.randn(600, 900).t()}
    torch.save(saved, tmp_path / "model.pt")

    def work(rank: int, count: int) -> list[bool]:
        target = {"a": torch.zeros(800, 700), "b": torch.zeros(900, 600)}
        fp.load_into(tmp_path / "model.pt", target, process_group=world())
        return [torch.equal(target[key], saved[key]) for key in saved]

    assert run_ranks(2, work) == [[True, True]] * 2


@pytest.mark.parametrize("way", ["ahead", "alone"])
def test_state_is_restored_where_one_rank_has_stepped_and_the_other_has_not(way: str, tmp_path: Path) -> None:
    model, optimizer = trained(1, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    path = str(tmp_path / "state.pt")
    fp.save(state, path)

    def work(rank: int, count: int) -> Any:
        watch(way)
        model, optimizer = trained(5, rank)
        into = {"model": model, "optimizer": optimizer}
        with shared_reader.SharedReader(world(), "step 3") as read:
            loaded = load_state(
                path, into=into, map_location=None, verify=True, weights_only=True, engine="auto", read=read
            )
        assert loaded["epoch"] == 3
        return portrait({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    expected = portrait({"model": state["model"], "optimizer": state["optimizer"]})
    assert run_ranks(2, work) == [expected] * 2


# --------------------------------------------------------------------------------------------- integers


@given(
    st.lists(
        st.tuples(st.integers(0, 8 * MIB), st.sampled_from([0, 1, 4095, 5000, CUT_BYTES_MIN, 3 * MIB + 5])), max_size=8
    ),
    st.integers(1, 9),
)
def test_shares_hold_every_byte_once_and_are_about_equal(places: list[tuple[int, int]], count: int) -> None:
    shares = cut_places(places, count)
    assert len(shares) == count
    reached = [0] * len(places)
    for part in [part for share in shares for part in share]:
        assert part.from_bytes == reached[part.source]
        assert part.size_bytes > 0
        reached[part.source] += part.size_bytes
        ends = places[part.source][0] + reached[part.source]
        assert reached[part.source] == places[part.source][1] or ends % BLOCK_BYTES == 0
    assert reached == [size for _, size in places]
    even = sum(reached) / count
    for share in shares:
        assert abs(sum(part.size_bytes for part in share) - even) <= CUT_BYTES_MIN + BLOCK_BYTES
