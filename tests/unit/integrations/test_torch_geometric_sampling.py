"""Neighbours that are sampled are neighbours, each at most once, and follow from the generator alone."""

from __future__ import annotations

import pytest
import torch

from fastpersist.integrations.torch_geometric.sampling import SampledNeighbors, sample_neighbors

NODE_COUNT = 300
LONELY = 7
HUB = 11


def make_graph(dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """Node LONELY has no neighbours, HUB has all nodes, the others 0 to 19 different ones."""
    generator = torch.Generator().manual_seed(1)
    lists = [
        torch.randperm(NODE_COUNT, generator=generator)[: int(torch.randint(20, (), generator=generator))]
        for _ in range(NODE_COUNT)
    ]
    lists[LONELY] = lists[LONELY][:0]
    lists[HUB] = torch.arange(NODE_COUNT)
    indptr = torch.tensor([0, *(len(neighbors) for neighbors in lists)]).cumsum(0)
    return indptr, torch.cat(lists).to(dtype)


def sample(seeds: list[int], fan_outs: list[int], seed: int = 0, dtype: torch.dtype = torch.int32) -> SampledNeighbors:
    generator = torch.Generator().manual_seed(seed)
    return sample_neighbors(*make_graph(dtype), torch.tensor(seeds, dtype=torch.int64), fan_outs, generator)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_sampled_edge_is_an_edge_of_the_graph(dtype: torch.dtype) -> None:
    indptr, indices = make_graph(dtype)
    sampled = sample([3, HUB, LONELY, 250], [10, 10, 5], dtype=dtype)
    owners = sampled.node[sampled.col]
    assert bool((indptr[owners] <= sampled.edge).all())
    assert bool((sampled.edge < indptr[owners + 1]).all())
    assert torch.equal(indices[sampled.edge].to(torch.int64), sampled.node[sampled.row])
    assert sampled.edge.unique().numel() == sampled.edge.numel() > 50


def test_nodes_are_unique_and_begin_with_the_seeds() -> None:
    sampled = sample([250, LONELY, HUB, 3], [10, 5])
    assert sampled.node[:4].tolist() == [250, LONELY, HUB, 3]
    assert sampled.node.unique().numel() == sampled.node.numel()
    assert sampled.num_sampled_nodes[0] == 4


def test_nodes_of_a_hop_are_in_the_order_of_their_first_edge() -> None:
    sampled = sample([HUB, 3, 250], [8])
    first_seen = list(dict.fromkeys(sampled.node[sampled.row].tolist()))
    assert sampled.node[3:].tolist() == [node for node in first_seen if node not in (HUB, 3, 250)]


def test_each_node_is_expanded_once_in_the_hop_after_its_own() -> None:
    indptr, _ = make_graph()
    sampled = sample([HUB, 3], [4, 6, 2])
    hop_of_place = torch.repeat_interleave(torch.arange(4), torch.tensor(sampled.num_sampled_nodes))
    hop_of_edge = torch.repeat_interleave(torch.arange(3), torch.tensor(sampled.num_sampled_edges))
    assert torch.equal(hop_of_place[sampled.col], hop_of_edge)
    degree = (indptr[1:] - indptr[:-1])[sampled.node]
    fan_out = torch.tensor([4, 6, 2, 0])[hop_of_place]
    edge_counts = torch.bincount(sampled.col, minlength=sampled.node.numel())
    assert torch.equal(edge_counts, torch.minimum(degree, fan_out))


def test_same_generator_state_gives_the_same_sample() -> None:
    first, again, other = (sample([HUB, 3, 250], [10, 10], seed) for seed in (5, 5, 6))
    for name in ("node", "row", "col", "edge"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.edge, other.edge)


def test_neighbors_of_a_hub_are_all_as_likely() -> None:
    counts = torch.zeros(NODE_COUNT)
    rounds = 3000
    generator = torch.Generator().manual_seed(0)
    indptr, indices = make_graph()
    for _ in range(rounds):
        edge = sample_neighbors(indptr, indices, torch.tensor([HUB]), [10], generator).edge
        counts[edge - indptr[HUB]] += 1
    # Each is drawn in 1 of 30 rounds: 100 times, with a standard deviation of 9.8. Five of these either way.
    assert counts.sum() == rounds * 10
    assert 51 < counts.min()
    assert counts.max() < 149


@pytest.mark.parametrize(
    ("seeds", "fan_outs"), [([], [3, 3]), ([LONELY], [3, 3]), ([3, 4], []), ([3, 4], [0, 5])], ids=str
)
def test_nothing_to_sample(seeds: list[int], fan_outs: list[int]) -> None:
    sampled = sample(seeds, fan_outs)
    assert sampled.node.tolist() == seeds
    assert sampled.num_sampled_nodes == [len(seeds), *(0 for _ in fan_outs)]
    assert sampled.num_sampled_edges == [0 for _ in fan_outs]
    for name in ("row", "col", "edge"):
        assert getattr(sampled, name).dtype == torch.int64
        assert getattr(sampled, name).numel() == 0


def test_seed_outside_the_graph_is_refused() -> None:
    with pytest.raises(IndexError):
        sample([NODE_COUNT], [3])
