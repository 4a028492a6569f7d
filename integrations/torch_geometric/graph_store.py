"""A GraphStore of PyTorch Geometric for edges in the layout "csc", which its own Data holds only with torch-sparse.

It holds references, so that a graph may be mapped from a file, as by `torch.load(path, mmap=True)`.
"""

from __future__ import annotations

from typing import Any

import torch

from .._shared.requirements import require

require("torch_geometric", "torch_geometric", "2.6")

from torch_geometric.data import EdgeAttr, GraphStore  # type: ignore[import-untyped] # noqa: E402
from torch_geometric.data.graph_store import EdgeLayout  # type: ignore[import-untyped] # noqa: E402

from fastpersist import ConfigError  # noqa: E402

__all__ = ["CompressedGraph"]


class CompressedGraph(GraphStore):  # type: ignore[misc] # torch_geometric has no types
    """A GraphStore of PyG for edges in the layout "csc": for each node, the nodes whose messages it gets.

        graph = CompressedGraph()
        graph.put_edge_index((indices, indptr), edge_type=None, layout="csc", size=(node_count, node_count))

    `indices[indptr[n] : indptr[n + 1]]` are the neighbours of node n. In a graph of several types, each has edges of
    its own: `edge_type=("author", "writes", "paper")`, and the size is that of source and target.

    Thread safety: any thread may read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._edges: dict[Any, tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int] | None]] = {}

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """Return an attribute for each type of edges; new objects."""
        return [EdgeAttr(kind, "csc", is_sorted=True, size=size) for kind, (_, size) in self._edges.items()]

    def _put_edge_index(self, edge_index: tuple[torch.Tensor, torch.Tensor], edge_attr: EdgeAttr) -> bool:
        if edge_attr.layout != EdgeLayout.CSC:
            raise ConfigError(f"edges of {edge_attr.edge_type} are of layout csc here, not {edge_attr.layout.value}")
        indices, indptr = edge_index
        if edge_attr.size is not None and indptr.numel() != edge_attr.size[1] + 1:
            raise ConfigError(
                f"edges of {edge_attr.edge_type}: {indptr.numel()} offsets, but {edge_attr.size[1]} target nodes, "
                "which need one more"
            )
        self._edges[edge_attr.edge_type] = ((indices, indptr), edge_attr.size)
        return True

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[torch.Tensor, torch.Tensor] | None:
        found = self._edges.get(edge_attr.edge_type)
        return found[0] if found is not None and edge_attr.layout == EdgeLayout.CSC else None

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        return self._edges.pop(edge_attr.edge_type, None) is not None
