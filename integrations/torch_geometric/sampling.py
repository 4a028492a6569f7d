"""Samples the neighbours of nodes, hop by hop, from a graph in compressed rows (CSR).

It uses only torch, because the native samplers of PyTorch Geometric are not on the package index. It does not know
features or loaders: callers make a `torch_geometric.sampler.SamplerOutput` from the fields of `SampledNeighbors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["SampledNeighbors", "first_of_each", "sample_edges", "sample_neighbors"]


@dataclass(frozen=True, slots=True)
class SampledNeighbors:
    """Nodes and edges around a batch of seeds; the fields are those of PyTorch Geometric's `SamplerOutput`.

    Attributes:
        node: Ids of all nodes, each once: the seeds, then the nodes of each hop, in the order in which they were found.
        row: The neighbour of each edge, as a place in `node`.
        col: The node that the neighbour was sampled for, as a place in `node`; ascending.
        edge: The place of each edge in `indices`.
        num_sampled_nodes: How many nodes were new: the seeds, then those of each hop.
        num_sampled_edges: How many edges were sampled in each hop.
    """

    node: torch.Tensor
    row: torch.Tensor
    col: torch.Tensor
    edge: torch.Tensor
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]


def sample_neighbors(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    seeds: torch.Tensor,
    fan_outs: Sequence[int],
    generator: torch.Generator | None = None,
) -> SampledNeighbors:
    """Sample up to `fan_outs[hop]` neighbours of each node that the hop before found, without replacement.

    A node is expanded once, in the hop after the one that found it. The same generator state gives the same result,
    with any number of threads.

    Args:
        indptr: int64, node count + 1: the neighbours of node n are `indices[indptr[n] : indptr[n + 1]]`.
        indices: The ids of the neighbours; int32 or int64.
        seeds: Unique ids of nodes, int64.
        fan_outs: Neighbours for each node, one number ≥ 0 for each hop.
        generator: A generator on the CPU; None for torch's default.

    Returns:
        Nodes and edges, all int64. Memory beside them: 4 bytes for each node of the graph.

    Raises:
        IndexError: A seed is not a node of the graph.

    Thread safety: reads its arguments only, but a generator belongs to one thread at a time.
    """
    unseen = torch.iinfo(torch.int32).max
    place_of = torch.full((indptr.numel() - 1,), unseen, dtype=torch.int32)
    place_of[seeds] = torch.arange(seeds.numel(), dtype=torch.int32)
    hops = [seeds.to(torch.int64)]
    node_count = seeds.numel()
    rows, cols, edges = [], [], []
    for fan_out in fan_outs:
        owner, edge = sample_edges(indptr, hops[-1], fan_out, generator)
        neighbor = indices[edge].to(torch.int64)
        new = first_of_each(neighbor[place_of[neighbor] == unseen], place_of)
        place_of[new] = torch.arange(node_count, node_count + new.numel(), dtype=torch.int32)
        rows.append(place_of[neighbor].to(torch.int64))
        cols.append(owner + (node_count - hops[-1].numel()))
        edges.append(edge)
        hops.append(new)
        node_count += new.numel()
    return SampledNeighbors(
        node=torch.cat(hops),
        row=_joined(rows),
        col=_joined(cols),
        edge=_joined(edges),
        num_sampled_nodes=[hop.numel() for hop in hops],
        num_sampled_edges=[edge.numel() for edge in edges],
    )


def sample_edges(
    indptr: torch.Tensor, nodes: torch.Tensor, fan_out: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample up to `fan_out` edges of each node: one hop of `sample_neighbors`.

    Returns:
        For each edge the place of its node in `nodes`, ascending, and its own place in `indices`; int64.

    Thread safety: as `sample_neighbors`.
    """
    begin = indptr[nodes]
    degree = indptr[nodes + 1] - begin
    # Column c of `offset` holds the c-th neighbour. Nodes with few take all of them: neighbour c.
    offset = torch.arange(fan_out).repeat(nodes.numel(), 1)
    many = (degree > fan_out).nonzero().squeeze(1)
    offset[many] = _distinct_numbers(degree[many], fan_out, generator)
    taken = torch.arange(fan_out) < degree.unsqueeze(1)
    owner = taken.nonzero()[:, 0]
    return owner, (offset + begin.unsqueeze(1))[taken]


def _distinct_numbers(limits: torch.Tensor, count: int, generator: torch.Generator | None) -> torch.Tensor:
    """Draw `count` different numbers below each limit, each set as likely as any other.

    Floyd's way: the c-th draw is below limit - count + c + 1, and a number that was drawn before gives way to the
    largest of that range, which cannot have been drawn yet.
    Source: Bentley and Floyd, "A sample of brilliance", Communications of the ACM 30 (9), 1987.
    """
    # A double's 53 bits are enough for any degree.
    uniform = torch.rand((count, limits.numel()), dtype=torch.float64, generator=generator)
    drawn = torch.empty((count, limits.numel()), dtype=torch.int64)
    for column in range(count):
        largest = limits - count + column
        number = (uniform[column] * (largest + 1)).to(torch.int64)
        known = (drawn[:column] == number).any(dim=0)
        drawn[column] = torch.where(known, largest, number)
    return drawn.t()


def first_of_each(nodes: torch.Tensor, place_of: torch.Tensor) -> torch.Tensor:
    """Return the different nodes in the order of first appearance; leave numbers in their entries of `place_of`.

    Args:
        nodes: Ids, whose entries in `place_of` are the largest int32.
        place_of: int32, an entry for each node of the graph.

    Thread safety: writes to `place_of`.
    """
    order = torch.arange(nodes.numel(), dtype=torch.int32)
    place_of.scatter_reduce_(0, nodes, order, "amin")
    return nodes[place_of[nodes] == order]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
