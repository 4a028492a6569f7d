"""What batches ask for: a graph with hubs, made offline, and traces of row ids from it and from known distributions.

Everything follows from sizes and seeds, so that two machines measure the same work. A trace is a list of batches,
each with unique ids, int32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fastpersist.integrations.torch_geometric.sampling import sample_neighbors  # type: ignore[import-not-found]

__all__ = ["by_degree", "drifting_trace", "graph_trace", "make_graph", "open_graph", "uniform_trace", "zipf_trace"]

_QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""Of Graph500: how likely an edge lies in each quarter of the matrix, and of that quarter, and so on."""

_CHUNK_EDGES = 1 << 21
_PARTS = 16
"""The edges are sorted in so many parts, which bounds the memory of sorting."""


def make_graph(scale: int, edges_per_node: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Make an R-MAT graph of 2**scale nodes in compressed rows, its ids permuted.

    Edges that are drawn twice are kept once. About half of the nodes have no edge at all, as usual with R-MAT. The
    permutation keeps a row's id from telling how often it is asked for.

    Args:
        scale: The binary logarithm of the number of nodes, 1 to 30.
        edges_per_node: The number of edges drawn, divided by the number of nodes.
        seed: The seed; it determines the graph.

    Returns:
        `indptr`, int64, and `indices`, int32, ascending within a node. Memory while it works: 14 bytes for each edge.

    Source: Chakrabarti, Zhan, Faloutsos, "R-MAT: A Recursive Model for Graph Mining", SIAM Data Mining 2004.
    """
    generator = torch.Generator().manual_seed(seed)
    node_count = 1 << scale
    names = torch.randperm(node_count, generator=generator, dtype=torch.int64)
    keys = torch.empty(node_count * edges_per_node, dtype=torch.int64)
    for chunk in keys.split(_CHUNK_EDGES):
        source, target = _draw_edges(scale, chunk.numel(), generator)
        torch.add(names[source] << scale, names[target], out=chunk)
    degree = torch.empty(node_count, dtype=torch.int64)
    parts = []
    for part in range(min(_PARTS, node_count)):
        first, end = (node_count * number // min(_PARTS, node_count) for number in (part, part + 1))
        inside = keys[(keys >= first << scale) & (keys < end << scale)].sort().values
        inside = torch.unique_consecutive(inside)
        degree[first:end] = torch.bincount((inside >> scale) - first, minlength=end - first)
        parts.append((inside & (node_count - 1)).to(torch.int32))
    indptr = torch.zeros(node_count + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=indptr[1:])
    return indptr, torch.cat(parts)


def _draw_edges(scale: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    upper_left, upper_right, lower_left, _ = _QUADRANTS
    source = torch.zeros(count, dtype=torch.int64)
    target = torch.zeros(count, dtype=torch.int64)
    for _ in range(scale):
        place = torch.rand(count, generator=generator)
        lower = place >= upper_left + upper_right
        right = (place >= upper_left) ^ lower ^ (place >= upper_left + upper_right + lower_left)
        source.mul_(2).add_(lower)
        target.mul_(2).add_(right)
    return source, target


def open_graph(
    directory: str | os.PathLike[str], scale: int, edges_per_node: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the graph of `make_graph`, mapped from a file in the directory, which is made if it is not there."""
    path = Path(directory) / f"rmat-{scale}-{edges_per_node}-{seed}.pt"
    if not path.exists():
        pending = path.with_suffix(".pending")
        torch.save(make_graph(scale, edges_per_node, seed), pending)
        pending.rename(path)
    indptr, indices = torch.load(path, mmap=True, weights_only=True)
    return indptr, indices


def by_degree(indices: torch.Tensor, node_count: int) -> torch.Tensor:
    """Return all nodes, int32, those first that most others have as a neighbour: these are sampled most often."""
    count = torch.zeros(node_count, dtype=torch.int64)
    for some in indices.split(1 << 24):
        count += torch.bincount(some, minlength=node_count)
    return count.argsort(descending=True, stable=True).to(torch.int32)


def graph_trace(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    batch_count: int,
    seed_count: int = 1024,
    fan_outs: tuple[int, ...] = (10, 10, 5),
) -> Iterator[torch.Tensor]:
    """Yield the nodes of each batch of a training by neighbour sampling; no node with edges is a seed twice.

    Raises:
        ValueError: Fewer nodes have edges than seeds are needed.
    """
    generator = torch.Generator().manual_seed(0)
    candidates = (indptr[1:] > indptr[:-1]).nonzero().squeeze(1)
    if candidates.numel() < batch_count * seed_count:
        raise ValueError(f"{batch_count} batches of {seed_count} seeds, but {candidates.numel()} nodes have edges")
    order = torch.randperm(candidates.numel(), generator=generator)
    for seeds in candidates[order[: batch_count * seed_count]].split(seed_count):
        yield sample_neighbors(indptr, indices, seeds, fan_outs, generator).node.to(torch.int32)


def zipf_trace(row_count: int, exponent: float, batch_count: int, draw_count: int) -> Iterator[torch.Tensor]:
    """Yield the unique ids of `draw_count` draws a batch: the k-th most popular row has weight k**-exponent."""
    return drifting_trace(row_count, exponent, batch_count, draw_count, moved_share=0)


def uniform_trace(row_count: int, batch_count: int, draw_count: int) -> Iterator[torch.Tensor]:
    """Yield the unique ids of `draw_count` draws a batch, all rows alike."""
    return drifting_trace(row_count, 0.0, batch_count, draw_count, moved_share=0)


def drifting_trace(
    row_count: int, exponent: float, batch_count: int, draw_count: int, moved_share: float
) -> Iterator[torch.Tensor]:
    """Yield as `zipf_trace` does, but after each batch a share of the rows, drawn at random, swap their popularity."""
    generator = torch.Generator().manual_seed(0)
    id_of_rank = torch.randperm(row_count, generator=generator).to(torch.int32)
    share_up_to = torch.arange(1, row_count + 1, dtype=torch.float64).pow_(-exponent).cumsum_(0)
    for _ in range(batch_count):
        uniform = torch.rand(draw_count, dtype=torch.float64, generator=generator)
        ranks = torch.searchsorted(share_up_to, uniform.mul_(share_up_to[-1]))
        yield id_of_rank[torch.unique(ranks)]
        moved = torch.randperm(row_count, generator=generator)[: int(row_count * moved_share)]
        id_of_rank[moved] = id_of_rank[moved.roll(1)]
