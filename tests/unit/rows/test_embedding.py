"""RowEmbedding: the results of torch.nn.Embedding, without weights in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastpersist.errors import ConfigError, RowIndexError
from fastpersist.rows.embedding import RowEmbedding
from fastpersist.rows.store import RowStore
from fastpersist.rows.writer import write_rows

WEIGHT = torch.arange(40 * 6, dtype=torch.float32).view(40, 6)


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[RowStore]:
    write_rows(tmp_path / "rows.npy", WEIGHT)
    with RowStore(tmp_path / "rows.npy", cache_bytes="1MiB") as store:
        yield store


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (4, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_results_are_those_of_an_embedding(rows: RowStore, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ids = torch.randint(40, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = RowEmbedding(rows)(ids)
    assert torch.equal(found, torch.nn.Embedding.from_pretrained(WEIGHT)(ids))
    assert found.device == ids.device
    assert not found.requires_grad


def test_nothing_is_there_to_save_train_or_convert(rows: RowStore) -> None:
    module = torch.nn.Sequential(RowEmbedding(rows), torch.nn.Linear(6, 2))
    assert set(module.state_dict()) == {"1.weight", "1.bias"}
    assert len(list(module.parameters())) == 2
    module.half().float()(torch.tensor([1, 2])).sum().backward()
    assert module[1].weight.grad is not None
    assert module[0].half()(torch.tensor(1)).dtype == torch.float32
    assert (module[0].num_embeddings, module[0].embedding_dim) == (40, 6)
    assert "40, 6, dtype=torch.float32, on disk" in repr(module)


def test_copy_reads_the_same_table(rows: RowStore) -> None:
    other = copy.deepcopy(RowEmbedding(rows))
    with other.rows:
        assert other.rows is not rows
        assert torch.equal(other(torch.tensor([39])), WEIGHT[[39]])


def test_what_is_no_embedding_is_refused(rows: RowStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows is a RowStore, not Tensor"):
        RowEmbedding(WEIGHT)  # type: ignore[arg-type]
    write_rows(tmp_path / "scalars.npy", torch.arange(5))
    with (
        RowStore(tmp_path / "scalars.npy", cache_bytes=0) as scalars,
        pytest.raises(ConfigError, match="one dimension"),
    ):
        RowEmbedding(scalars)
    with pytest.raises(RowIndexError, match="is 40"):
        RowEmbedding(rows)(torch.tensor([[3, 40]]))


@pytest.mark.parametrize("ids", [[1, 2], 3, None])
def test_ids_of_an_embedding_are_a_tensor(rows: RowStore, ids: Any) -> None:
    with pytest.raises(ConfigError, match=r"are a tensor, not .*torch\.as_tensor"):
        RowEmbedding(rows)(ids)


class Prefetching(torch.nn.Module):
    """Asks for its rows ahead."""

    def __init__(self, rows: RowStore) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._rows.prefetch(ids).result()


@pytest.mark.parametrize("kind", [RowEmbedding, Prefetching])
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_trace_cannot_have_rows_from_a_disk(rows: RowStore, kind: type[torch.nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"torch\.jit\.trace records no reads.*rows\.npy"):
        torch.jit.trace(kind(rows), torch.tensor([1, 2]))
    assert torch.equal(kind(rows)(torch.tensor([1, 2])), WEIGHT[[1, 2]])


def test_rows_are_asked_for_on_the_device_of_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "table.npy", torch.ones(3, 2))
    asked: list[object] = []
    with RowStore(tmp_path / "table.npy") as rows:
        monkeypatch.setattr(rows, "gather", lambda ids, device=None: asked.append((ids.device, device)))
        for device in ("cpu", "meta"):  # as any accelerator that is no CUDA device
            RowEmbedding(rows)(torch.zeros(1, dtype=torch.int64, device=device))
    assert asked == [(torch.device(name), torch.device(name)) for name in ("cpu", "meta")]
