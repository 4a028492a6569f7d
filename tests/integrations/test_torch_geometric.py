"""PyTorch Geometric over tables on disk: the batches of its own loaders, whose rows were asked for ahead.

Slow, as DataLoader starts workers, and one test a process of its own.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric.data import Data, FeatureStore, HeteroData, TensorAttr
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.testing import MyFeatureStore

import fastpersist as fp
from fastpersist.integrations.torch_geometric import (
    AheadNodeLoader,
    CompressedGraph,
    NodeTicket,
    RowFeatureStore,
    TorchNeighborSampler,
)

NODE_COUNT = 300
COUNTS = {"paper": 300, "author": 120}
KINDS = [("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "has", "author")]
WIDTH = 7


def table(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def edges(source_count: int, target_count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(count, (2000,), generator=generator) for count in (source_count, target_count)]
    return torch.unique(torch.stack(columns), dim=1)[:, torch.randperm(1500, generator=generator)]


def data() -> Data:
    return Data(edge_index=edges(NODE_COUNT, NODE_COUNT, 1), num_nodes=NODE_COUNT)


def typed_data() -> HeteroData:
    made = HeteroData()
    for name, count in COUNTS.items():
        made[name].num_nodes = count
    for seed, kind in enumerate(KINDS):
        made[kind].edge_index = edges(COUNTS[kind[0]], COUNTS[kind[2]], seed)
    return made


def stored(path: Path, values: torch.Tensor) -> Path:
    fp.write_rows(path, values)
    return path


class Recorded(RowFeatureStore):
    """Keeps the tickets of what it was asked for ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: list[NodeTicket] = []

    def prefetch(self, nodes: Any) -> NodeTicket:
        self.tickets.append(super().prefetch(nodes))
        return self.tickets[-1]


@pytest.fixture
def features(tmp_path: Path) -> Iterator[Recorded]:
    """Attributes of a graph of one type: x on disk, y in memory."""
    with Recorded() as store:
        store.add(stored(tmp_path / "x.npy", table(NODE_COUNT)), cache_bytes="1MiB")
        store.put_tensor(torch.arange(NODE_COUNT), group_name=None, attr_name="y", index=None)
        yield store


@pytest.fixture
def typed_features(tmp_path: Path) -> Iterator[Recorded]:
    """Attributes of a graph of two types, on disk."""
    with Recorded() as store:
        for seed, (name, count) in enumerate(COUNTS.items()):
            store.add(stored(tmp_path / f"{name}.npy", table(count, seed)), name, cache_bytes="1MiB")
        store.add(stored(tmp_path / "year.npy", torch.arange(COUNTS["paper"])), "paper", "year", cache_bytes="1MiB")
        yield store


def in_memory(store: FeatureStore) -> MyFeatureStore:
    """Copy all attributes into PyG's own store for tests."""
    copied = MyFeatureStore()
    for attr in store.get_all_tensor_attrs():
        attr.index = None
        copied.put_tensor(store.get_tensor(attr), attr)
    return copied


def assert_same_batch(one: Any, other: Any) -> None:
    one, other = one.to_dict(), other.to_dict()
    assert set(one) == set(other)
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------- the feature store

INDICES = {
    "all": None,
    "slice": slice(3, 50, 2),
    "whole slice": slice(None),
    "tail": slice(-4, None),
    "nothing": slice(3, 1),
    "ids": torch.tensor([5, 299, 5, 0]),
    "int32": torch.tensor([7, 1], dtype=torch.int32),
    "no ids": torch.tensor([], dtype=torch.int64),
    "two dimensions": torch.tensor([[1, 2], [3, 4]]),
    "array": np.array([9]),
    "number": 17,
    "mask": torch.arange(NODE_COUNT) % 7 == 3,
}


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_index_means_what_it_means_to_a_tensor(features: Recorded, name: str, index: Any) -> None:
    values = {"x": table(NODE_COUNT), "y": torch.arange(NODE_COUNT)}[name]
    expected = values if index is None else values[index]
    assert torch.equal(features.get_tensor(None, name, index), expected)
    assert features.get_tensor_size(None, name, index) == tuple(expected.shape)


def test_store_has_what_the_one_of_pyg_has(features: Recorded) -> None:
    oracle = in_memory(features)
    ids = torch.tensor([3, 1, 200])
    for name in ("x", "y"):
        assert torch.equal(features[None, name, ids], oracle[None, name, ids])
        assert torch.equal(features[None, name][ids], oracle[None, name][ids])
        assert torch.equal(features[None, name, None], oracle[None, name, None])
        assert features.get_tensor_size(None, name) == tuple(oracle.get_tensor_size(None, name))
    array = features.get_tensor(None, "x", np.array([2]), convert_type=True)  # PyG refuses arrays of more
    assert np.array_equal(array, table(NODE_COUNT)[[2]].numpy())


def test_size_is_known_without_reading(features: Recorded) -> None:
    assert features.get_tensor_size(None, "x") == (NODE_COUNT, WIDTH)
    assert features.get_tensor_size(None, "x", torch.tensor([1, 2])) == (2, WIDTH)
    assert features._rows[None, "x"].stats().row_count == 0


def test_attributes_are_new_objects_each_time(features: Recorded) -> None:
    first = features.get_all_tensor_attrs()
    for attr in first:
        attr.index = torch.tensor([1])
    second = features.get_all_tensor_attrs()
    assert [(attr.group_name, attr.attr_name) for attr in second] == [(None, "x"), (None, "y")]
    assert not any(attr.is_set("index") for attr in second)


def test_tensors_in_memory_are_changed_and_tables_are_not(features: Recorded) -> None:
    features.put_tensor(torch.tensor([-1, -2]), group_name=None, attr_name="y", index=torch.tensor([4, 6]))
    assert features.get_tensor(None, "y", slice(3, 8)).tolist() == [3, -1, 5, -2, 7]
    features.put_tensor(np.ones((NODE_COUNT, 2)), group_name=None, attr_name="z", index=None)
    assert features.get_tensor(None, "z", 5).tolist() == [1, 1]
    with pytest.raises(fp.UnsupportedError, match="'x' of None is a table on disk, which is never changed"):
        features.put_tensor(table(NODE_COUNT), group_name=None, attr_name="x", index=None)


def test_an_update_of_some_rows_leaves_the_others(features: Recorded) -> None:
    assert features.update_tensor(torch.tensor([-1, -2]), group_name=None, attr_name="y", index=torch.tensor([4, 6]))
    assert features.get_tensor(None, "y", slice(3, 8)).tolist() == [3, -1, 5, -2, 7]
    assert features.update_tensor(torch.zeros(3), group_name=None, attr_name="y", index=None)
    assert features.get_tensor(None, "y", None).tolist() == [0, 0, 0]
    with pytest.raises(fp.UnsupportedError, match="'x' of None is a table on disk, which is never changed"):
        features.update_tensor(table(2), group_name=None, attr_name="x", index=torch.tensor([4, 6]))
    assert torch.equal(features.get_tensor(None, "x", slice(0, 9)), table(NODE_COUNT)[:9])


def test_removed_attributes_are_gone_and_their_tables_closed(features: Recorded, tmp_path: Path) -> None:
    owned = features._rows[None, "x"]
    assert features.remove_tensor(None, "x", None)
    with pytest.raises(fp.ConfigError, match="closed"):
        owned.gather([1])
    with pytest.raises(KeyError, match="there is no attribute 'x' of None; there is 'y' of None"):
        features.get_tensor(None, "x", None)
    assert not features.remove_tensor(None, "x", None)
    with fp.RowStore(tmp_path / "x.npy", cache_bytes=0) as lent:
        assert features.add(lent) is lent
        features.close()
        assert torch.equal(features.get_tensor(None, "x", [3]), table(NODE_COUNT)[[3]])


def test_what_makes_no_sense_is_refused(features: Recorded, tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match="there is an attribute 'x' of None already"):
        features.add(tmp_path / "x.npy")
    with pytest.raises(fp.ConfigError, match="yet to be opened: cache_bytes"):
        features.add(features._rows[None, "x"], "other", cache_bytes=1)
    with pytest.raises(fp.RowIndexError, match=r"ids\[1\] is 300"):
        features.get_tensor(None, "x", torch.tensor([1, 300]))
    with pytest.raises(fp.RowIndexError):
        features.prefetch(torch.tensor([-1]))
    with pytest.raises(fp.ConfigError, match=r"a mask over 300 rows is of shape \[300\], not \[2\]"):
        features.get_tensor(None, "x", torch.tensor([True, False]))


def test_all_attributes_are_asked_for_before_the_first_is_waited_for(
    typed_features: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    prefetch, result = fp.RowStore.prefetch, fp.RowTicket.result
    monkeypatch.setattr(fp.RowStore, "prefetch", lambda *a, **k: (events.append("ask"), prefetch(*a, **k))[1])
    monkeypatch.setattr(fp.RowTicket, "result", lambda *a, **k: (events.append("take"), result(*a, **k))[1])
    attrs = typed_features.get_all_tensor_attrs()
    for attr in attrs:
        attr.index = torch.tensor([2, 1])
    found = typed_features.multi_get_tensor(attrs)
    assert events == ["ask"] * 3 + ["take"] * 3
    assert [values.tolist() for values in found] == [
        table(300, 0)[[2, 1]].tolist(),
        table(120, 1)[[2, 1]].tolist(),
        [2, 1],
    ]


def test_rows_that_were_asked_for_are_taken_once(features: Recorded) -> None:
    ids = torch.tensor([4, 2, 4])
    ticket = features.prefetch(ids)
    rows = features._rows[None, "x"]
    assert torch.equal(features.get_tensor(None, "x", ids), table(NODE_COUNT)[ids])
    assert ticket.done()
    assert rows.stats().row_count == 3
    assert torch.equal(features.get_tensor(None, "x", ids), table(NODE_COUNT)[ids])
    assert rows.stats().row_count == 6


def test_rows_come_to_the_device_of_the_store(tmp_path: Path) -> None:
    with RowFeatureStore(device="meta") as store:  # any other than the CPU
        store.add(stored(tmp_path / "x.npy", table(NODE_COUNT)))
        store.put_tensor(torch.arange(NODE_COUNT), group_name=None, attr_name="y", index=None)
        ids = torch.tensor([3, 4])
        ticket = store.prefetch(ids)
        for index in (ids, slice(2), 7):
            assert store.get_tensor(TensorAttr(None, "x", index)).is_meta
        assert store.get_tensor(TensorAttr(None, "y", ids)).tolist() == [3, 4]
        assert ticket.done()


def test_ids_that_were_changed_since_are_asked_for_anew(features: Recorded) -> None:
    ids = torch.tensor([4, 2])
    ticket = features.prefetch(ids)
    ids.add_(1)
    assert torch.equal(features.get_tensor(None, "x", ids), table(NODE_COUNT)[[5, 3]])
    ticket.cancel()
    assert ticket.done()


def test_dropped_ticket_gives_its_rows_up(features: Recorded) -> None:
    ids = torch.tensor([4, 2])
    ticket = RowFeatureStore.prefetch(features, ids)
    (row_ticket,) = ticket._tickets.values()
    del ticket
    gc.collect()
    assert not features._ahead
    assert torch.equal(features.get_tensor(None, "x", ids), table(NODE_COUNT)[ids])
    del row_ticket


def test_store_is_pickled_with_its_tables(typed_features: Recorded) -> None:
    typed_features.put_tensor(torch.ones(120), group_name="author", attr_name="y", index=None)
    with pickle.loads(pickle.dumps(typed_features)) as other:
        for attr in typed_features.get_all_tensor_attrs():
            attr.index = torch.tensor([7])
            assert torch.equal(other.get_tensor(attr), typed_features.get_tensor(copy.copy(attr)))


# ------------------------------------------------------------------------------------------------------ the sampler


def test_sampler_takes_all_neighbors_where_there_are_few() -> None:
    graph = data()
    sampler = TorchNeighborSampler(graph, [NODE_COUNT])
    source, target = graph.edge_index
    loader = NodeLoader((MyFeatureStore(), graph), sampler, input_nodes=torch.arange(20), batch_size=20)
    (batch,) = loader
    found = batch.n_id[batch.edge_index]
    expected = graph.edge_index[:, target < 20]
    assert sorted(found.t().tolist()) == sorted(expected.t().tolist())
    assert torch.equal(graph.edge_index[:, batch.e_id], found)
    assert torch.equal(batch.n_id[:20], torch.arange(20))
    assert batch.num_sampled_nodes == [20, len(set(source[target < 20].tolist()) - set(range(20)))]


def test_sampler_follows_types_hop_by_hop() -> None:
    graph = typed_data()
    sampler = TorchNeighborSampler(graph, {kind: [3, 2] for kind in KINDS})
    loader = NodeLoader(graph, sampler, input_nodes=("paper", torch.arange(50)), batch_size=50)
    (batch,) = loader
    for name in COUNTS:
        assert batch[name].n_id.unique().numel() == batch[name].n_id.numel() == sum(batch[name].num_sampled_nodes)
    for kind in KINDS:
        inside, every = batch[kind], graph[kind].edge_index
        source, target = inside.edge_index
        ends = torch.stack([batch[kind[0]].n_id[source], batch[kind[2]].n_id[target]])
        assert torch.equal(every[:, inside.e_id], ends)
        assert inside.e_id.unique().numel() == inside.e_id.numel() == sum(inside.num_sampled_edges)
        # Of the nodes that were found before the last hop, each is the target of as many edges as it has, up to 3 or 2.
        first, second, _ = batch[kind[2]].num_sampled_nodes
        degrees = torch.bincount(every[1], minlength=COUNTS[kind[2]])[batch[kind[2]].n_id]
        most = torch.cat([torch.full((first,), 3), torch.full((second,), 2)])
        counts = torch.bincount(target, minlength=degrees.numel())
        assert torch.equal(counts[: first + second], torch.minimum(degrees[: first + second], most))
        assert not counts[first + second :].any()
    assert batch["paper"].num_sampled_nodes[0] == 50
    assert batch["author"].num_sampled_nodes[0] == 0


def test_seeds_of_a_type_without_edges_are_all_of_their_batch(tmp_path: Path) -> None:
    graph = typed_data()
    graph["venue"].num_nodes = 9
    with RowFeatureStore() as store:
        store.add(stored(tmp_path / "venue.npy", table(9)), "venue")
        loader = AheadNodeLoader(
            *(graph, TorchNeighborSampler(graph, [3, 2])),
            features=store,
            input_nodes=("venue", torch.tensor([4, 2, 8])),
            batch_size=2,
        )
        assert [batch["venue"].n_id.tolist() for batch in loader] == [[4, 2], [8]]
        assert all(torch.equal(batch["venue"].x, table(9)[batch["venue"].n_id]) for batch in loader)
        assert all(batch.num_edges == batch["paper"].num_nodes == 0 for batch in loader)


def test_compressed_graph_is_sampled_as_it_is() -> None:
    sorted_data = data()
    rows, pointers, permutation = sorted_data.csc()
    graph = CompressedGraph()
    graph.put_edge_index((rows.to(torch.int32), pointers), edge_type=None, layout="csc", size=(NODE_COUNT, NODE_COUNT))
    sampler = TorchNeighborSampler(graph, [4, 3])
    assert sampler.edge_permutation is None
    other = TorchNeighborSampler(sorted_data, [4, 3])
    assert torch.equal(other.edge_permutation, permutation)
    outputs = []
    for each in (sampler, other):
        torch.manual_seed(3)
        loader = NodeLoader((MyFeatureStore(), graph), each, input_nodes=torch.arange(10), batch_size=10)
        outputs.append(next(iter(loader)))
    assert torch.equal(outputs[0].n_id, outputs[1].n_id)
    assert torch.equal(outputs[0].edge_index, outputs[1].edge_index)
    with pytest.raises(fp.ConfigError, match="layout csc here, not coo"):
        graph.put_edge_index((rows, rows), edge_type=None, layout="coo")
    with pytest.raises(fp.ConfigError, match="301 offsets, but 299 target nodes"):
        graph.put_edge_index((rows, pointers), edge_type=None, layout="csc", size=(300, 299))
    del graph[graph.get_all_edge_attrs()[0]]
    with pytest.raises(fp.ConfigError, match="no edges"):
        TorchNeighborSampler(graph, [4])


@pytest.mark.parametrize("numbers", [[], [-1], "12", [2.5], {KINDS[0]: [1]}])
def test_numbers_of_neighbors_are_checked(numbers: Any) -> None:
    with pytest.raises(fp.ConfigError, match="num_neighbors"):
        TorchNeighborSampler(typed_data(), numbers)
    with pytest.raises(fp.ConfigError, match="num_neighbors"):
        TorchNeighborSampler(data(), numbers)


def test_sampler_says_what_it_cannot_do(features: Recorded) -> None:
    graph = data()
    sampler = TorchNeighborSampler(graph, [2])
    loader = NodeLoader(
        (features, graph), sampler, input_nodes=torch.arange(4), input_time=torch.arange(4), batch_size=2
    )
    with pytest.raises(fp.UnsupportedError, match="knows no times"):
        next(iter(loader))
    with pytest.raises(fp.UnsupportedError, match="around nodes"):
        sampler.sample_from_edges(None)


# ------------------------------------------------------------------------------------------------------- the loader


def batches_of(kind: type, source: Any, sampler: Any, **options: Any) -> list[Any]:
    torch.manual_seed(11)
    return list(kind(source, sampler, **options))


def workers(count: int) -> dict[str, Any]:
    """Return options of a loader. Workers are forked: those that Python 3.14 would start find no class of a test."""
    return {"num_workers": count, "multiprocessing_context": "fork" if count else None}


@pytest.mark.parametrize("worker_count", [0, 2])
def test_batches_are_those_of_pyg(features: Recorded, worker_count: int) -> None:
    graph = data()
    sampler = TorchNeighborSampler(graph, [4, 3])
    options = {"input_nodes": torch.arange(0, 300, 2), "batch_size": 16, "shuffle": True} | workers(worker_count)
    expected = batches_of(NodeLoader, (in_memory(features), graph), sampler, **options)
    found = batches_of(AheadNodeLoader, (features, graph), sampler, window=3, **options)
    assert len(found) == len(expected) == 10
    for one, other in zip(found, expected, strict=True):
        assert_same_batch(one, other)
        assert torch.equal(one.x, table(NODE_COUNT)[one.n_id])
    # Each row was asked for once: ahead.
    assert features._rows[None, "x"].stats().row_count == 300 + sum(batch.num_nodes for batch in found)
    assert len(features.tickets) == 10


@pytest.mark.parametrize("worker_count", [0, 2])
def test_batches_of_several_types_are_those_of_pyg(typed_features: Recorded, worker_count: int) -> None:
    graph = typed_data()
    sampler = TorchNeighborSampler(graph, [4, 3])
    options = {
        "input_nodes": ("paper", torch.arange(150)),
        "batch_size": 16,
        "shuffle": True,
        **workers(worker_count),
    }
    expected = batches_of(NodeLoader, (in_memory(typed_features), graph), sampler, **options)
    before = typed_features._rows["author", "x"].stats().row_count
    found = batches_of(AheadNodeLoader, (typed_features, graph), sampler, window=2, **options)
    assert len(found) == 10
    for one, other in zip(found, expected, strict=True):
        assert_same_batch(one, other)
    asked = typed_features._rows["author", "x"].stats().row_count - before
    assert asked == sum(batch["author"].num_nodes for batch in found)


def test_window_of_batches_is_asked_for_before_the_first_comes(features: Recorded) -> None:
    graph = data()
    loader = AheadNodeLoader(
        (features, graph), TorchNeighborSampler(graph, [2]), input_nodes=torch.arange(100), batch_size=10, window=3
    )
    batches = iter(loader)
    assert len(batches) == len(loader) == 10
    asked = []
    for _ in batches:
        asked.append(len(features.tickets))
    assert asked == [4, 5, 6, 7, 8, 9, 10, 10, 10, 10]


@pytest.mark.parametrize("worker_count", [0, 2])
def test_loop_that_is_left_gives_up_what_it_asked_for(features: Recorded, worker_count: int) -> None:
    graph = data()
    loader = AheadNodeLoader(
        *((features, graph), TorchNeighborSampler(graph, [2])),
        input_nodes=torch.arange(100),
        batch_size=10,
        window=3,
        persistent_workers=worker_count > 0,
        **workers(worker_count),
    )
    for _ in loader:
        assert [bool(ticket._tickets) for ticket in features.tickets] == [False, True, True, True]
        break
    if worker_count:  # they stay, and so does the iterator, until the next epoch
        assert torch.equal(torch.cat([batch.input_id for batch in loader]), torch.arange(100))
    gc.collect()
    assert not any(ticket._tickets for ticket in features.tickets)
    assert len(list(loader)) == 10


def test_error_of_a_batch_gives_up_the_others(features: Recorded) -> None:
    graph = data()

    def fail(_: Any) -> Any:
        raise RuntimeError("transform")

    loader = AheadNodeLoader(
        *((features, graph), TorchNeighborSampler(graph, [2])),
        input_nodes=torch.arange(100),
        batch_size=10,
        window=3,
        transform=fail,
    )
    with pytest.raises(RuntimeError, match="transform"):
        next(iter(loader))
    assert not any(ticket._tickets for ticket in features.tickets)


@pytest.mark.parametrize("failing", ["sampler", "prefetch"])
def test_batches_before_an_error_come_first(features: Recorded, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = data()
    calls = itertools.count(1)

    def fail_at_fourth(value: Any) -> Any:
        if next(calls) == 4:
            raise fp.RowIndexError("the fourth")
        return value

    if failing == "prefetch":
        prefetch = features.prefetch
        monkeypatch.setattr(features, "prefetch", lambda nodes: prefetch(fail_at_fourth(nodes)))
    loader = AheadNodeLoader(
        *((features, graph), TorchNeighborSampler(graph, [2])),
        input_nodes=torch.arange(100),
        batch_size=10,
        window=5,
        transform_sampler_output=fail_at_fourth if failing == "sampler" else None,
    )
    batches = iter(loader)
    found = [batch.input_id for batch in itertools.islice(batches, 3)]
    assert torch.equal(torch.cat(found), torch.arange(30))
    with pytest.raises(fp.RowIndexError, match="the fourth"):
        next(batches)
    assert len(features.tickets) == 3
    assert not any(ticket._tickets for ticket in features.tickets)


def test_plain_data_gets_rows_before_it_is_transformed(features: Recorded) -> None:
    graph = data()
    graph.mask = torch.arange(NODE_COUNT) % 3 == 0
    features.remove_tensor(None, "y", None)
    seen = []
    loader = AheadNodeLoader(
        *(graph, TorchNeighborSampler(graph, [3, 2])),
        features=features,
        transform=lambda batch: (seen.append(batch.x.shape), batch)[1],
        input_nodes=torch.arange(60),
        batch_size=20,
        window=2,
    )
    batches = list(loader)
    for batch in batches:
        assert torch.equal(batch.x, table(NODE_COUNT)[batch.n_id])
        assert torch.equal(batch.mask, batch.n_id % 3 == 0)
    assert len(seen) == len(batches) == 3
    assert features._rows[None, "x"].stats().row_count == sum(batch.num_nodes for batch in batches)
    alone = loader([5])  # outside of a loop
    assert torch.equal(alone.x, table(NODE_COUNT)[alone.n_id])


def test_plain_data_of_several_types_gets_rows(typed_features: Recorded) -> None:
    graph = typed_data()
    loader = AheadNodeLoader(
        *(graph, TorchNeighborSampler(graph, [3])),
        features=typed_features,
        input_nodes=("author", torch.arange(40)),
        batch_size=20,
        window=2,
    )
    for batch in loader:
        assert torch.equal(batch["paper"].x, table(300, 0)[batch["paper"].n_id])
        assert torch.equal(batch["author"].x, table(120, 1)[batch["author"].n_id])
        assert torch.equal(batch["paper"].year, batch["paper"].n_id)


def test_rows_are_those_of_the_nodes_where_the_graph_has_an_n_id_of_its_own(features: Recorded) -> None:
    graph = data()
    graph.n_id = torch.arange(NODE_COUNT).flip(0)  # as of a graph that was itself sampled from a larger one
    loader = AheadNodeLoader(
        *(graph, TorchNeighborSampler(graph, [3])), features=features, input_nodes=torch.arange(60), batch_size=20
    )
    for batch in loader:
        nodes = NODE_COUNT - 1 - batch.n_id
        assert torch.equal(batch.y, nodes)
        assert torch.equal(batch.x, table(NODE_COUNT)[nodes])


def test_outputs_are_transformed_before_rows_are_asked_for(features: Recorded) -> None:
    def reverse(output: Any) -> Any:
        output.node = output.node.flip(0)
        return output

    graph = data()
    loader = AheadNodeLoader(
        *((features, graph), TorchNeighborSampler(graph, [2])),
        input_nodes=torch.arange(30),
        batch_size=10,
        transform_sampler_output=reverse,
    )
    batches = list(loader)
    assert all(batch.n_id[-1] == number * 10 for number, batch in enumerate(batches))
    assert features._rows[None, "x"].stats().row_count == sum(batch.num_nodes for batch in batches)


def test_loader_refuses_what_makes_no_sense(features: Recorded) -> None:
    graph = data()
    sampler = TorchNeighborSampler(graph, [2])
    for window in (0, True, 1.5):
        with pytest.raises(fp.ConfigError, match="window"):
            AheadNodeLoader((features, graph), sampler, window=window, input_nodes=torch.arange(3))
    with pytest.raises(fp.ConfigError, match="filter_per_worker=True"):
        AheadNodeLoader((features, graph), sampler, filter_per_worker=True, input_nodes=torch.arange(3))
    for source, given in [(graph, None), ((MyFeatureStore(), graph), None), ((features, graph), features)]:
        with pytest.raises(fp.ConfigError, match="one RowFeatureStore"):
            AheadNodeLoader(source, sampler, features=given, input_nodes=torch.arange(3))


@pytest.mark.filterwarnings("ignore:Failing to pass a value:DeprecationWarning")  # of PyG, in Python 3.14
def test_model_learns_from_rows_on_disk_as_from_memory(features: Recorded) -> None:
    graph = data()
    sampler = TorchNeighborSampler(graph, [4])
    losses = []
    for kind, source in [(NodeLoader, (in_memory(features), graph)), (AheadNodeLoader, (features, graph))]:
        torch.manual_seed(1)
        layer = SAGEConv(WIDTH, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        losses.append([])
        for batch in kind(source, sampler, input_nodes=torch.arange(200), batch_size=50, shuffle=True):
            out = layer(batch.x, batch.edge_index)[: batch.batch_size]
            loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size] % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_package_is_imported_without_its_framework() -> None:
    code = """
import sys
sys.modules["torch_geometric"] = None
import fastpersist.integrations.torch_geometric as package
from fastpersist.integrations.torch_geometric.sampling import sample_neighbors
for name in package.__all__:
    try:
        getattr(package, name)
    except ImportError as error:
        assert 'pip install "fastpersist[torch_geometric]"' in str(error), error
    else:
        raise SystemExit(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_attributes_have_pygs_class(features: Recorded) -> None:
    assert all(isinstance(attr, TensorAttr) for attr in features.get_all_tensor_attrs())
    with pytest.raises(AttributeError, match="no_such"):
        from fastpersist.integrations import torch_geometric

        _ = torch_geometric.no_such
