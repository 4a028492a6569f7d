"""PyTorch Geometric: graphs whose features are larger than memory.

    features = RowFeatureStore()
    features.add("feat.npy")                                  # attribute x, on disk
    features.put_tensor(labels, group_name=None, attr_name="y", index=None)
    sampler = TorchNeighborSampler(graph, [10, 10, 5])        # or PyG's own, where pyg-lib is installed
    for batch in AheadNodeLoader((features, graph), sampler, input_nodes=train, batch_size=1024, num_workers=2): ...

- `feature_store`: attributes whose rows lie on disk, as PyG's FeatureStore; asked for ahead
- `loader`: a NodeLoader that knows its batches ahead
- `sampler`: neighbours sampled in torch alone, as PyG's BaseSampler; for where pyg-lib is not installed
- `graph_store`: edges in compressed columns, as PyG's GraphStore
- `sampling`: what the sampler computes; knows nothing of PyG

Importing this package imports no torch_geometric: that comes with the first class that is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .feature_store import NodeTicket, RowFeatureStore
    from .graph_store import CompressedGraph
    from .loader import AheadNodeLoader
    from .sampler import TorchNeighborSampler

__all__ = ["AheadNodeLoader", "CompressedGraph", "NodeTicket", "RowFeatureStore", "TorchNeighborSampler"]

_MODULE_OF = {
    "AheadNodeLoader": "loader",
    "CompressedGraph": "graph_store",
    "NodeTicket": "feature_store",
    "RowFeatureStore": "feature_store",
    "TorchNeighborSampler": "sampler",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
