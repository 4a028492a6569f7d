"""A neighbour sampler for PyTorch Geometric's loaders, in pure torch.

PyG's own NeighborSampler needs pyg-lib or torch-sparse, which are not on the package index. If one of them is
installed, use PyG's sampler: it is faster. `sampling` draws the neighbours; this module handles hops between types, and
PyG's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._shared.requirements import require

require("torch_geometric", "torch_geometric", "2.6")

from torch_geometric.data import GraphStore  # type: ignore[import-untyped] # noqa: E402
from torch_geometric.sampler import (  # type: ignore[import-untyped] # noqa: E402
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NodeSamplerInput,
    SamplerOutput,
)

from fastpersist import ConfigError, UnsupportedError  # noqa: E402

from .sampling import first_of_each, sample_edges, sample_neighbors  # noqa: E402

__all__ = ["TorchNeighborSampler"]


class _Edges(NamedTuple):
    """Edges of one type: the sources of target n are `indices[indptr[n] : indptr[n + 1]]`."""

    indptr: torch.Tensor
    indices: torch.Tensor


class TorchNeighborSampler(BaseSampler):  # type: ignore[misc] # torch_geometric has no types
    """A sampler of PyG that draws neighbours without replacement, hop by hop, in torch alone.

    An edge points from the sampled neighbour to the node that it was sampled for. Random numbers are torch's: seeded
    by `torch.manual_seed`, and by DataLoader in each of its workers.

    Args:
        graph: A Data, a HeteroData, or another GraphStore. Edges that are not in the layout "csc" are sorted once.
        num_neighbors: Neighbours to draw for each node, in each hop; or that for each type of edges. None is negative.

    Raises:
        ConfigError: Numbers that are none, or not of the same hops; types of edges that the graph lacks.

    Thread safety: any thread. Workers that are forked share the graph's memory.
    """

    def __init__(self, graph: GraphStore, num_neighbors: Sequence[int] | Mapping[Any, Sequence[int]]) -> None:
        super().__init__()
        attrs = graph.get_all_edge_attrs()
        if not attrs:
            raise ConfigError("the graph has no edges")
        rows, pointers, self._permutation = graph.csc()
        self._is_typed = isinstance(rows, dict)
        if not self._is_typed:
            rows, pointers = {None: rows}, {None: pointers}
        self._edges = {kind: _Edges(pointers[kind], rows[kind]) for kind in rows}
        self._fan_outs = _fan_outs(num_neighbors, list(self._edges), self._is_typed)
        self._node_counts = _node_counts(self._edges, {attr.edge_type: attr.size for attr in attrs})

    @property
    def edge_permutation(self) -> Any:
        """Where each edge of the layout "csc" was in the graph; None if it was there already. By type, if there are."""
        return self._permutation

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput | HeteroSamplerOutput:
        """Sample around seeds.

        Raises:
            UnsupportedError: The seeds have times.
        """
        if index.time is not None:
            raise UnsupportedError("TorchNeighborSampler knows no times; leave input_time out")
        if self._is_typed:
            return self._sample_types(index)
        indptr, indices = self._edges[None]
        found = sample_neighbors(indptr, indices, index.node, self._fan_outs[None])
        return SamplerOutput(
            node=found.node,
            row=found.row,
            col=found.col,
            edge=found.edge,
            num_sampled_nodes=found.num_sampled_nodes,
            num_sampled_edges=found.num_sampled_edges,
            metadata=(index.input_id, index.time),
        )

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: Any = None) -> Any:
        """Refuse: seeds are nodes here.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError("TorchNeighborSampler samples around nodes, not edges; use PyG's sampler with pyg-lib")

    def _sample_types(self, index: NodeSamplerInput) -> HeteroSamplerOutput:
        """Sample hop by hop: a node is expanded, along all types of edges to it, in the hop after its discovery."""
        hops = {kind: [torch.empty(0, dtype=torch.int64)] for kind in self._node_counts}
        unseen = torch.iinfo(torch.int32).max
        place_of = {kind: torch.full((count,), unseen, dtype=torch.int32) for kind, count in self._node_counts.items()}
        hops[index.input_type] = [index.node.to(torch.int64)]
        if index.input_type in place_of:  # else no edge leads to the seeds, or away from them
            place_of[index.input_type][index.node] = torch.arange(index.node.numel(), dtype=torch.int32)
        rows, cols, edges = ({kind: [] for kind in self._edges} for _ in range(3))  # type: ignore[var-annotated]
        for hop in range(len(next(iter(self._fan_outs.values())))):
            before = {kind: sum(part.numel() for part in parts[:-1]) for kind, parts in hops.items()}
            count = {kind: before[kind] + parts[-1].numel() for kind, parts in hops.items()}
            newest = {kind: parts[-1] for kind, parts in hops.items()}
            found: dict[Any, list[torch.Tensor]] = {kind: [] for kind in hops}
            for kind, (indptr, indices) in self._edges.items():
                source, _, target = kind
                owner, edge = sample_edges(indptr, newest[target], self._fan_outs[kind][hop], None)
                neighbor = indices[edge].to(torch.int64)
                places = place_of[source]
                new = first_of_each(neighbor[places[neighbor] == unseen], places)
                places[new] = torch.arange(count[source], count[source] + new.numel(), dtype=torch.int32)
                count[source] += new.numel()
                found[source].append(new)
                rows[kind].append(places[neighbor].to(torch.int64))
                cols[kind].append(owner + before[target])
                edges[kind].append(edge)
            for kind, parts in found.items():
                hops[kind].append(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64))
        return HeteroSamplerOutput(
            node={kind: torch.cat(parts) for kind, parts in hops.items()},
            row={kind: torch.cat(parts) for kind, parts in rows.items()},
            col={kind: torch.cat(parts) for kind, parts in cols.items()},
            edge={kind: torch.cat(parts) for kind, parts in edges.items()},
            num_sampled_nodes={kind: [part.numel() for part in parts] for kind, parts in hops.items()},
            num_sampled_edges={kind: [part.numel() for part in parts] for kind, parts in edges.items()},
            metadata=(index.input_id, index.time),
        )


def _fan_outs(given: Any, kinds: list[Any], is_typed: bool) -> dict[Any, list[int]]:
    """Return the numbers of neighbours in each hop, by type of edges."""
    by_kind = given if is_typed and isinstance(given, Mapping) else dict.fromkeys(kinds, given)
    if set(by_kind) != set(kinds):
        raise ConfigError(f"num_neighbors is for edges of {sorted(by_kind)}; the graph has {sorted(kinds)}")
    fan_outs = {}
    for kind, numbers in by_kind.items():
        if not isinstance(numbers, Sequence) or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ConfigError(f"num_neighbors is a list with a whole number, 0 or more, for each hop, not {numbers!r}")
        fan_outs[kind] = list(numbers)
    if len({len(numbers) for numbers in fan_outs.values()}) != 1 or not next(iter(fan_outs.values())):
        raise ConfigError(f"num_neighbors has the same number of hops, 1 or more, for all edges, not {given!r}")
    return fan_outs


def _node_counts(edges: Mapping[Any, _Edges], sizes: Mapping[Any, Any]) -> dict[Any, int]:
    """Return how many nodes there are of each type; {} in a graph of one type."""
    counts: dict[Any, int] = {}
    for kind, (indptr, indices) in edges.items():
        if kind is None:
            continue
        source, _, target = kind
        size = sizes.get(kind)
        source_count = size[0] if size is not None else int(indices.max()) + 1 if indices.numel() else 0
        counts[source] = max(counts.get(source, 0), source_count)
        counts[target] = max(counts.get(target, 0), indptr.numel() - 1)
    return counts
