"""keys= of all loads, and what a load with targets leaves out: chosen by name or pattern, and nothing else is read."""

from __future__ import annotations

import logging
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.archives import flip_bit, read_records
from support.resumables import network, save
from support.sameness import assert_same, portrait

import fastpersist as fp
from fastpersist.loading.selection import choose, chosen_part, dict_entries, left_out_of, tensor_bytes, without
from fastpersist.transfer.reader import Extents

KIB = 1 << 10
MIB = 1 << 20


def chosen(held: Any, *keys: str) -> Any:
    return chosen_part("the file", held, keys)


# --- names and patterns

NESTED = {
    "model": {"a.weight": 1, "b": {"weight": 2, "bias": 3}},
    "optimizer": {"state": {0: {"exp_avg": 4, "step": 5}, 1: {"exp_avg": 6, "step": 7}}, "param_groups": [{"lr": 8}]},
    "step": 9,
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["step"], {"step": 9}),
        (["model"], {"model": NESTED["model"]}),
        (["model.*"], {"model": NESTED["model"]}),
        (["model.b"], {"model": {"b": {"weight": 2, "bias": 3}}}),
        (["*.weight"], {"model": {"a.weight": 1, "b": {"weight": 2}}}),
        (["optimizer.state.*.exp_avg"], {"optimizer": {"state": {0: {"exp_avg": 4}, 1: {"exp_avg": 6}}}}),
        (["optimizer.state[[]*].exp_avg"], {"optimizer": {"state": {0: {"exp_avg": 4}, 1: {"exp_avg": 6}}}}),
        (["optimizer.state[1].exp_avg"], {"optimizer": {"state": {1: {"exp_avg": 6}}}}),
        (["optimizer.state.1.exp_avg"], {"optimizer": {"state": {1: {"exp_avg": 6}}}}),
        (["optimizer.param_groups"], {"optimizer": {"param_groups": [{"lr": 8}]}}),
        (["model", "model.b.bias", "st*"], {"model": NESTED["model"], "step": 9}),
        (["*"], NESTED),
        ([], {}),
    ],
    ids=str,
)
def test_what_keys_choose(keys: list[str], expected: Any) -> None:
    assert chosen(NESTED, *keys) == expected


@pytest.mark.parametrize("key", ["Model", "model.a", "model.b.weight.x", "optimizer.param_groups[0].lr", "param*", ""])
def test_keys_that_match_nothing_are_named(key: str) -> None:
    with pytest.raises(fp.ConfigError, match=re.escape(f": {key} is among the keys, but not in the file")):
        chosen(NESTED, "step", key)


def test_what_is_cut_is_copied_and_the_rest_is_the_same() -> None:
    held = OrderedDict(a=OrderedDict(x=[1], y=2), b=OrderedDict(z=3))
    held["a"]._metadata = {"version": 1}  # type: ignore[attr-defined]
    found = chosen(held, "a.x", "b")
    assert list(found) == ["a", "b"]
    assert type(found["a"]) is OrderedDict
    assert found["a"]._metadata == {"version": 1}
    assert found["a"]["x"] is held["a"]["x"]
    assert found["b"] is held["b"]
    assert list(held["a"]) == ["x", "y"]


def test_a_dict_that_is_held_twice_is_cut_where_it_is_not_chosen() -> None:
    shared = {"x": 1, "y": 2}
    assert chosen({"a": shared, "b": shared}, "a.x", "b") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


def test_a_dict_in_itself_ends() -> None:
    held: dict[str, Any] = {"a": {"x": 1}}
    held["a"]["self"] = held
    assert chosen(held, "a.x") == {"a": {"x": 1}}


def test_dicts_that_double_on_each_level_take_no_longer() -> None:
    held: dict[str, Any] = {"x": 1}
    for _ in range(60):
        held = {"a": held, "b": held}
    choice = choose(held, ["*.x"], dict_entries)
    assert choice.unmatched == []


def test_dicts_that_are_nested_very_deeply_come_whole() -> None:
    deepest: dict[str, Any] = {"x": 1}
    held: dict[str, Any] = deepest
    for _ in range(5000):
        held = {"a": held}
    assert choose(held, ["*.x"], dict_entries).unmatched == ["*.x"]
    assert choose(held, ["a.a"], dict_entries).left_out == []
    with pytest.raises(fp.ConfigError, match="more than 64 dicts deep, comes with it"):
        chosen(held, "*.x")


def test_names_are_found_as_deep_as_the_message_says() -> None:
    held: dict[str, Any] = {"x": 1}
    for _ in range(63):
        held = {"a": held}
    assert chosen(held, "*.x") == held
    with pytest.raises(fp.ConfigError, match="more than 64 dicts deep"):
        chosen({"a": held}, "*.x")


def test_long_keys_are_cut() -> None:
    long = "k" * 2000
    assert chosen({long: {"x": 1}, "a": 2}, "a") == {"a": 2}
    assert chosen({long: {"x": 1}, "a": 2}, "k*.x") == {long: {"x": 1}}
    assert chosen({long: {"x": 1}, "a": 2}, long) == {long: {"x": 1}}


def test_a_key_of_the_outermost_dict_is_no_pattern() -> None:
    assert chosen({"a*": 1, "ab": 2, "c": {"a*": 3}}, "a*") == {"a*": 1}
    assert chosen({5: 1, "5": 2}, "5") == {"5": 2}


def test_without_takes_out_what_paths_lead_to() -> None:
    held = {"a": {"b": 1, "c": 2}, "d": [3]}
    assert without(held, [("a", "b"), ("e",), ("d", 0)]) == {"a": {"c": 2}, "d": [3]}
    assert without(held, []) is held


def test_bytes_of_tensors_count_each_storage_once() -> None:
    weight = torch.zeros(10)
    sparse = torch.eye(3).to_sparse()
    assert tensor_bytes({"a": [weight, weight[:3]], "b": {torch.zeros(2)}, "c": 5}) == 40 + 8
    assert tensor_bytes([sparse]) == 3 * 4


# --- which entries of a state


@pytest.mark.parametrize(
    ("into", "keys", "read"),
    [
        ([], None, ["model", "ema", "rng", "step"]),
        ([], ["ema"], ["ema"]),
        ([], [], []),
        (["model"], None, ["model", "rng", "step"]),
        (["model"], ["ema"], ["model", "ema", "rng", "step"]),
        (["model"], [], ["model", "rng", "step"]),
    ],
)
def test_entries_of_a_state_that_are_read(into: list[str], keys: list[str] | None, read: list[str]) -> None:
    sizes_bytes = {"model": 8 * MIB, "ema": MIB, "rng": MIB - 1, "step": 0}
    choice = left_out_of(sizes_bytes, into, keys, dict_entries, lambda size_bytes: size_bytes)
    assert list(without(sizes_bytes, (path for path, _ in choice.left_out))) == read


# --- fp.load

WEIGHT = torch.randn(64, 1024)  # 256 KiB


def large_state() -> dict[str, Any]:
    """A state of 4 MiB with every kind of value."""
    moments = {index: {"exp_avg": WEIGHT * index} for index in range(8)}
    return {
        "model": {f"layer{index}": WEIGHT + index for index in range(8)},
        "optimizer": {"state": moments, "param_groups": [{"params": [*range(8)]}]},
        "step": 3,
    }


def read_bytes() -> int:
    """Bytes that this process has asked the kernel for by read and pread, whatever comes from the page cache."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(file.readline().removeprefix("rchar:"))


@pytest.mark.parametrize("weights_only", [True, False])
def test_only_what_is_chosen_is_read(weights_only: bool, tmp_path: Path) -> None:
    save(large_state(), tmp_path / "all.pt")
    options: dict[str, Any] = {"engine": "threads", "weights_only": weights_only}
    fp.load(tmp_path / "all.pt", **options)  # imports, and the like
    before = read_bytes()
    found = fp.load(tmp_path / "all.pt", keys=["model.layer3", "optimizer.state.5.*", "step"], **options)
    cost_bytes = read_bytes() - before
    assert_same(
        found, {"model": {"layer3": WEIGHT + 3}, "optimizer": {"state": {5: {"exp_avg": WEIGHT * 5}}}, "step": 3}
    )
    assert 512 * KIB < cost_bytes < 1024 * KIB  # two tensors, the pickle, the directory
    before = read_bytes()
    assert fp.load(tmp_path / "all.pt", keys=["step"], **options) == {"step": 3}
    assert read_bytes() - before < 256 * KIB


def test_only_what_is_chosen_of_safetensors_is_read(tmp_path: Path) -> None:
    save_file({f"layer{index}.weight": WEIGHT + index for index in range(16)}, tmp_path / "all.safetensors")
    fp.load(tmp_path / "all.safetensors", engine="threads")
    before = read_bytes()
    found = fp.load(tmp_path / "all.safetensors", keys=["layer[34].*"], engine="threads")
    cost_bytes = read_bytes() - before
    assert_same(found, {"layer3.weight": WEIGHT + 3, "layer4.weight": WEIGHT + 4})
    assert 512 * KIB < cost_bytes < 768 * KIB


def test_neither_bytes_nor_headers_of_other_storages_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(large_state(), tmp_path / "all.pt")
    places: list[tuple[int, int]] = []
    original = Extents.read

    def spy(self: Extents, *arguments: Any, **options: Any) -> Any:
        places.extend(self.places())
        return original(self, *arguments, **options)

    monkeypatch.setattr(Extents, "read", spy)
    fp.load(tmp_path / "all.pt", keys=["model.layer3"])
    assert sorted(size_bytes for _, size_bytes in places) == [30, 256 * KIB]


def test_a_storage_with_a_chosen_tensor_is_read_whole(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    save({"a": whole[:2], "b": whole[5:], "c": torch.ones(3)}, tmp_path / "all.pt")
    found = fp.load(tmp_path / "all.pt", keys=["b"])
    assert_same(found, {"b": torch.load(tmp_path / "all.pt")["b"]})
    assert found["b"].untyped_storage().nbytes() == 40


class Holder:
    """An object that only its own code can build."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        assert float(state["tensor"].sum()) == 3  # it sees its bytes
        self.__dict__.update(state)


def test_objects_come_whole_and_what_needs_its_bytes_is_built(tmp_path: Path) -> None:
    state = {"holder": Holder(torch.ones(3)), "sparse": torch.eye(2).to_sparse(), "w": torch.ones(2)}
    with pytest.warns(RuntimeWarning):
        save(state, tmp_path / "all.pt")
    assert_same(fp.load(tmp_path / "all.pt", keys=["w"], weights_only=False), {"w": torch.ones(2)})
    found = fp.load(tmp_path / "all.pt", keys=["hold*", "sparse"], weights_only=False)
    assert list(found) == ["holder", "sparse"]
    assert_same(found["holder"].tensor, torch.ones(3))
    with pytest.raises(fp.ConfigError, match=r"all\.pt: holder\.tensor is among the keys, but"):
        fp.load(tmp_path / "all.pt", keys=["holder.tensor"], weights_only=False)


@pytest.mark.parametrize("way", ["callable", "legacy", "compressed", "mapped", "file object"])
def test_other_ways_to_load_choose_the_same(way: str, tmp_path: Path) -> None:
    state, path = large_state(), tmp_path / "all.pt"
    torch.save(state, path, _use_new_zipfile_serialization=way != "legacy")
    if way == "compressed":
        records = read_records(path)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in records.items():
                archive.writestr(name, data)
    options: dict[str, Any] = {"keys": ["model.layer3", "step"]}
    if way == "callable":
        options["map_location"] = lambda storage, _: storage
    expected = {"model": {"layer3": WEIGHT + 3}, "step": 3}
    if way == "file object":
        with open(path, "rb") as file:
            assert_same(fp.load(file, **options), expected)
    else:
        assert_same(fp.load(path, mmap=way == "mapped", **options), expected)


def test_verify_reads_the_whole_file(tmp_path: Path) -> None:
    for name, state in {"all.pt": large_state(), "all.safetensors": large_state()["model"]}.items():
        path, key = tmp_path / name, "model.layer3" if name == "all.pt" else "layer3"
        save(state, path)
        assert_same(list(fp.load(path, keys=[key], verify=True)), [key.partition(".")[0]])
        last = max(fp.inspect(path).tensors, key=lambda tensor: tensor.offset_bytes or 0)
        flip_bit(path, last.offset_bytes or 0)
        with pytest.raises(fp.ChecksumError, match=re.escape(last.name)):
            fp.load(path, keys=[key], verify=True)
        fp.load(path, keys=[key])


def test_what_has_no_names_or_wrong_keys_is_refused(tmp_path: Path) -> None:
    save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(fp.ConfigError, match="holds a list"):
        fp.load(tmp_path / "list.pt", keys=["a"])
    text: Any = "model"
    with pytest.raises(fp.ConfigError, match=re.escape("keys=['model']")):
        fp.load(tmp_path / "list.pt", keys=text)
    save({"a": 1}, tmp_path / "dict.pt")
    with pytest.raises(fp.ConfigError, match=r"b\.\* is among the keys, but not in the file, which holds a;"):
        fp.load(tmp_path / "dict.pt", keys=["b.*"])


NAMES = st.sampled_from(["a", "b", "a.b", "ab", 0, 1])
STATES = st.dictionaries(
    NAMES,
    st.recursive(
        st.integers(0, 9) | st.builds(lambda size: torch.arange(float(size)), st.integers(0, 5)),
        lambda inner: st.dictionaries(NAMES, inner, max_size=4) | st.lists(inner, max_size=2),
        max_leaves=12,
    ),
    max_size=4,
)
PATTERNS = st.sampled_from(["a", "b", "a.*", "*b", "*[[]0]", "*.1", "a.b", "?", "a*b", "b[1]", "0.a"])


@given(state=STATES, keys=st.lists(PATTERNS, max_size=3, unique=True))
def test_a_file_gives_what_is_chosen_of_its_object(
    state: dict[Any, Any], keys: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("given") / "all.pt"
    save(state, path)
    missed = choose(state, keys, dict_entries).unmatched
    if missed:
        with pytest.raises(fp.ConfigError, match=re.escape(f"{missed[0]} is among the keys")):
            fp.load(path, keys=keys)
        return
    assert_same(fp.load(path, keys=keys), chosen_part("the file", state, keys))


def test_what_is_wrong_is_found_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(large_state(), tmp_path / "all.pt")
    save_file(large_state()["model"], tmp_path / "all.safetensors")
    monkeypatch.setattr(Extents, "read", None)
    for name in ("all.pt", "all.safetensors"):
        with pytest.raises(fp.ConfigError, match="nothing is among the keys"):
            fp.load(tmp_path / name, keys=["*", "nothing"])
    with pytest.raises(fp.ConfigError, match="bogus"):
        fp.load(tmp_path / "all.pt", keys=["step"], engine="bogus")


def test_keys_rename_and_dtype_go_together(tmp_path: Path) -> None:
    save(large_state(), tmp_path / "all.pt")
    found = fp.load(tmp_path / "all.pt", keys=["model.*"], rename={"model.layer": ""}, dtype=torch.bfloat16)
    assert_same(found, {str(index): (WEIGHT + index).bfloat16() for index in range(8)})


# --- fp.load_into


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_only_what_is_chosen_is_read_to_fill(suffix: str, tmp_path: Path) -> None:
    path, state = tmp_path / f"all.{suffix}", large_state()["model"]
    save(state, path)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    fp.load_into(path, target, engine="threads")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    before = read_bytes()
    fp.load_into(path, target, keys=["layer3"], engine="threads")
    assert 256 * KIB < read_bytes() - before < 512 * KIB
    assert_same(target.pop("layer3"), WEIGHT + 3)
    assert all(not tensor.any() for tensor in target.values())


def test_a_damaged_header_of_a_chosen_storage_is_found_before_anything_changes(tmp_path: Path) -> None:
    path = tmp_path / "all.pt"
    save({"a": torch.ones(5000), "b": torch.ones(5000)}, path)
    with zipfile.ZipFile(path) as archive:
        flip_bit(path, archive.getinfo("all/data/0").header_offset)
    target = {"a": torch.zeros(5000), "b": torch.zeros(5000)}
    before = portrait(target)
    with pytest.raises(fp.FormatError, match="data/0 is damaged"):
        fp.load_into(path, target, keys=["a"])
    assert portrait(target) == before
    fp.load_into(path, target, keys=["b"])
    assert_same(target["b"], torch.ones(5000))


@pytest.mark.parametrize("form", ["torch", "safetensors", "directory"])
def test_a_part_of_a_module_is_filled_and_the_rest_stays(form: str, tmp_path: Path) -> None:
    source, target = network(1), network(2)
    before = portrait(target.head.weight)
    state = {name: tensor for name, tensor in source.state_dict().items() if name != "head.weight"}
    path = tmp_path / ("model.pt" if form == "torch" else "model.safetensors")
    fp.save(state, path)
    names = [name for name in state if not name.startswith("embedding")]
    found = fp.load_into(tmp_path if form == "directory" else path, target, keys=names)
    assert found.unexpected_keys == []
    assert "embedding.weight" in found.missing_keys
    assert portrait(target.head.weight) == before
    assert_same({name: target.state_dict()[name] for name in names}, {name: state[name] for name in names})


def test_what_is_chosen_has_a_place_in_the_target(tmp_path: Path) -> None:
    save({"a": {"x": torch.ones(2)}, "b": {"y": torch.ones(2)}}, tmp_path / "all.pt")
    target = {"a": {"x": torch.zeros(2)}}
    with pytest.raises(fp.ConfigError, match=r"b\.y is in the file, but not in the target"):
        fp.load_into(tmp_path / "all.pt", target)
    fp.load_into(tmp_path / "all.pt", target, keys=["a.*"])
    assert_same(target, {"a": {"x": torch.ones(2)}})
    with pytest.raises(fp.ConfigError, match=r"b\.y is in the file, but not in the target"):
        fp.load_into(tmp_path / "all.pt", target, keys=["*"])
    with pytest.raises(fp.ConfigError, match="c is among the keys, but not in the file, which holds a, b"):
        fp.load_into(tmp_path / "all.pt", target, keys=["c"])
    with pytest.raises(fp.UnsupportedError, match="another call"):
        fp.load_into(tmp_path / "all.pt", {"a": 3}, keys=["a"])


# --- Checkpointer.load


def saved_steps(root: Path, sharded: bool, state: dict[str, Any], **options: Any) -> fp.Checkpointer:
    checkpoints = fp.Checkpointer(root, sharded=sharded)
    checkpoints.save(1, state, **options).result()
    return checkpoints


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shards"])
def test_tensors_inside_a_step_are_chosen(sharded: bool, tmp_path: Path) -> None:
    with saved_steps(tmp_path, sharded, large_state()) as checkpoints:
        expected = {"model": {"layer3": WEIGHT + 3}, "step": 3}
        assert_same(checkpoints.load(keys=["model.layer3", "step"]), expected)
        found = checkpoints.load(keys=["optimizer.state.*.exp_avg", "optimizer.param_groups"])
        assert_same(found, {"optimizer": large_state()["optimizer"]})
        model = {name: torch.zeros_like(tensor) for name, tensor in large_state()["model"].items()}
        found = checkpoints.load(into={"model": model}, keys=["optimizer.state.5.*"])
        assert list(found["optimizer"]) == ["state"]
        assert_same(found["optimizer"]["state"], {5: {"exp_avg": WEIGHT * 5}})
        assert found["step"] == 3
        assert found["model"] is model
        assert_same(model, large_state()["model"])


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shards"])
def test_only_what_is_chosen_of_a_step_is_read(sharded: bool, tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, sharded=sharded, engine="threads") as checkpoints:
        checkpoints.save(1, large_state()).result()
        checkpoints.load()
        before = read_bytes()
        checkpoints.load(keys=["model.layer3"])
        assert 256 * KIB < read_bytes() - before < 768 * KIB


def test_objects_among_shards_that_are_not_chosen_are_not_read(tmp_path: Path) -> None:
    many = torch.eye(1000).to_sparse()  # an object of DCP's, as large as many tensors are
    with fp.Checkpointer(tmp_path, sharded=True, engine="threads") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3), "sparse": [many * index for index in range(100)], "step": 3}).result()
        checkpoints.load()
        before = read_bytes()
        assert checkpoints.load(keys=["step"]) == {"step": 3}
        assert read_bytes() - before < 256 * KIB
        assert_same(checkpoints.load(keys=["sparse"])["sparse"][7].to_dense(), torch.eye(1000) * 7)


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shards"])
def test_keys_that_choose_nothing_in_a_step_are_named(sharded: bool, tmp_path: Path) -> None:
    with saved_steps(tmp_path, sharded, large_state()) as checkpoints:
        with pytest.raises(fp.ConfigError, match=r": model\.nothing is among the keys, but not in the"):
            checkpoints.load(keys=["model.nothing", "step"])


def test_a_rank_state_is_chosen_by_name_and_by_pattern(tmp_path: Path) -> None:
    with saved_steps(tmp_path, False, {"step": 3, "rate": 4}, rank_state={"position": 5}) as checkpoints:
        assert checkpoints.load(keys=["rank_state"]) == {"rank_state": {"position": 5}}
        assert checkpoints.load(keys=["*"]) == {"step": 3, "rate": 4, "rank_state": {"position": 5}}
        assert checkpoints.load(keys=["step"]) == {"step": 3}


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shards"])
def test_large_tensors_nobody_asked_for_are_left_out_and_named(
    sharded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        "model": {"w": torch.ones(3)},
        "ema": {"w": torch.ones(MIB // 4)},
        "rng": torch.arange(9),
        "many": [torch.ones(MIB // 16), torch.ones(MIB // 4)],
        "step": 3,
    }
    with saved_steps(tmp_path, sharded, state) as checkpoints:
        target = {"w": torch.zeros(3)}
        with caplog.at_level(logging.INFO, "fastpersist"):
            found = checkpoints.load(into={"model": target})
        assert found.keys() == {"model", "rng", "step"}
        assert_same(found["rng"], torch.arange(9))
        lines = [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()]
        assert len(lines) == 1
        assert "ema (1.0 MiB), many (1.2 MiB)" in lines[0]
        caplog.clear()
        with caplog.at_level(logging.INFO, "fastpersist"):
            found = checkpoints.load(into={"model": target}, keys=["ema"])
        assert found.keys() == {"model", "rng", "step", "ema"}
        assert "not loaded" not in caplog.text
