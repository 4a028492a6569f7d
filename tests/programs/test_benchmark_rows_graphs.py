"""benchmarks/rows/graphs.py: the graph is what R-MAT says, in valid compressed rows; traces are unique ids."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

GRAPHS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "rows" / "graphs.py"))
drifting_trace, graph_trace, uniform_trace = (GRAPHS[f"{name}_trace"] for name in ("drifting", "graph", "uniform"))
zipf_trace, make_graph, open_graph = (GRAPHS[name] for name in ("zipf_trace", "make_graph", "open_graph"))

SCALE = 11
EDGES_PER_NODE = 15


def test_graph_is_in_compressed_rows_without_double_edges() -> None:
    indptr, indices = make_graph(SCALE, EDGES_PER_NODE)
    assert indptr.dtype == torch.int64
    assert indices.dtype == torch.int32
    assert indptr.numel() == (1 << SCALE) + 1
    assert indptr[0] == 0
    assert indptr[-1] == indices.numel()
    assert (1 << SCALE) * EDGES_PER_NODE / 2 < indices.numel() <= (1 << SCALE) * EDGES_PER_NODE
    assert 0 <= indices.min()
    assert indices.max() < 1 << SCALE
    owner = torch.repeat_interleave(torch.arange(1 << SCALE), indptr.diff())
    keys = owner * (1 << SCALE) + indices
    assert bool((keys[1:] > keys[:-1]).all())


def test_graph_has_hubs_at_permuted_ids() -> None:
    indptr, indices = make_graph(SCALE, EDGES_PER_NODE)
    for degree in (indptr.diff(), torch.bincount(indices, minlength=1 << SCALE)):
        assert degree.max() > 10 * EDGES_PER_NODE
        assert (degree == 0).sum() > (1 << SCALE) // 10
        # Without the permutation the lower half of the ids would have three quarters of the edges.
        share = degree[: 1 << (SCALE - 1)].sum() / degree.sum()
        assert 0.4 < share < 0.6


def test_edges_fall_into_the_quadrants_as_often_as_they_should() -> None:
    source, target = GRAPHS["_draw_edges"](1, 100_000, torch.Generator().manual_seed(0))
    shares = torch.bincount(source * 2 + target) / 100_000
    assert torch.allclose(shares, torch.tensor([0.57, 0.19, 0.19, 0.05]), atol=0.01)


@pytest.mark.parametrize("scale", [1, 3])
def test_tiny_graphs(scale: int) -> None:
    indptr, indices = make_graph(scale, 2)
    assert indptr[-1] == indices.numel() > 0


def test_graph_is_made_once_and_then_opened(tmp_path: Path) -> None:
    made = open_graph(tmp_path, 6, 4)
    (path,) = tmp_path.iterdir()
    changed_ns = path.stat().st_mtime_ns
    for one, other in zip(made, open_graph(tmp_path, 6, 4), strict=True):
        assert torch.equal(one, other)
    assert path.stat().st_mtime_ns == changed_ns
    assert not torch.equal(open_graph(tmp_path, 6, 4, seed=1)[0], made[0])


def test_graph_trace_has_each_seed_once_and_is_always_the_same() -> None:
    graph = make_graph(SCALE, EDGES_PER_NODE)
    batches = list(graph_trace(*graph, batch_count=8, seed_count=16, fan_outs=(3, 2)))
    seeds = torch.cat([batch[:16] for batch in batches])
    assert seeds.unique().numel() == 8 * 16
    assert bool((graph[0].diff()[seeds] > 0).all())
    for batch, again in zip(batches, graph_trace(*graph, 8, 16, (3, 2)), strict=True):
        assert batch.dtype == torch.int32
        assert batch.unique().numel() == batch.numel() > 16
        assert torch.equal(batch, again)


def test_graph_trace_needs_enough_seeds() -> None:
    graph = make_graph(6, 4)
    with pytest.raises(ValueError, match="nodes have edges"):
        next(graph_trace(*graph, batch_count=2, seed_count=64))


def test_zipf_trace_asks_for_each_rank_as_often_as_its_weight_says() -> None:
    counts = torch.zeros(50)
    for batch in zipf_trace(50, 1.1, batch_count=20_000, draw_count=1):
        counts[batch] += 1
    weights = torch.arange(1, 51, dtype=torch.float64) ** -1.1
    wanted = (20_000 * weights / weights.sum()).float()
    # Five standard deviations of each count.
    assert bool(((counts.sort(descending=True).values - wanted).abs() < 5 * wanted.sqrt()).all())


def test_batches_have_unique_ids() -> None:
    for trace in (zipf_trace(100, 0.9, 3, 500), uniform_trace(100, 3, 500), drifting_trace(100, 0.9, 3, 500, 0.1)):
        for batch in trace:
            assert batch.unique().numel() == batch.numel()
            assert 0 <= batch.min()
            assert batch.max() < 100


def test_popularity_drifts_by_the_share_that_moves() -> None:
    def hottest(moved_share: float) -> list[int]:
        # With so large an exponent nearly all draws are the first rank.
        return [int(batch[0]) for batch in drifting_trace(20, 40.0, 50, 4, moved_share)]

    assert len(set(hottest(0.0))) == 1
    assert len(set(hottest(0.2))) > 4
