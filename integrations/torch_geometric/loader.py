"""A NodeLoader of PyTorch Geometric that asks for the rows of its batches before it needs them.

Workers sample, or the main process if there are none. The main process draws batches `window` ahead of the one that it
returns, and has the store prefetch their rows. It joins both as PyG does, when the batch's turn comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from .._shared.requirements import require

require("torch_geometric", "torch_geometric", "2.6")

from torch_geometric.loader import NodeLoader  # type: ignore[import-untyped] # noqa: E402
from torch_geometric.sampler import BaseSampler  # type: ignore[import-untyped] # noqa: E402

from fastpersist import ConfigError  # noqa: E402

from .feature_store import NodeTicket, RowFeatureStore  # noqa: E402

__all__ = ["AheadNodeLoader"]


class AheadNodeLoader(NodeLoader):  # type: ignore[misc] # torch_geometric has no types
    """A NodeLoader of PyG whose rows are read while earlier batches are worked on.

    Its batches are those of `NodeLoader`, in the same order. Leaving the loop gives up what was asked for.

    Args:
        data: A pair of a RowFeatureStore and a GraphStore; or a Data or HeteroData without the attributes on disk.
        node_sampler: The option of NodeLoader.
        features: For Data or HeteroData: the attributes to add to each batch, before `transform`.
        window: How many batches to know ahead, 1 or more. The more, the better the cache knows which rows come back.
        transform: The option of NodeLoader.
        transform_sampler_output: The option of NodeLoader; called where batches are sampled.
        **options: Options of NodeLoader and DataLoader: `input_nodes`, `batch_size`, `shuffle`, `num_workers` …

    Raises:
        ConfigError: A window that is no whole number above 0; no RowFeatureStore, or two; `filter_per_worker=True`.

    Thread safety: as of DataLoader, one thread at a time.
    """

    def __init__(
        self,
        data: Any,
        node_sampler: BaseSampler,
        *,
        features: RowFeatureStore | None = None,
        window: int = 8,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ConfigError(f"window is {window!r}; it must be a number of batches, 1 or more")
        if options.pop("filter_per_worker", False):
            raise ConfigError("filter_per_worker=True would read rows in the workers, which know of one batch each")
        is_pair = isinstance(data, tuple | list)
        store = data[0] if is_pair and features is None else features
        if not isinstance(store, RowFeatureStore) or (is_pair and features is not None):
            raise ConfigError("rows come from one RowFeatureStore: the first of the pair data=, or features= with Data")
        self._window = window
        self._features = store
        self._transform = transform
        self._transform_output = transform_sampler_output
        self._joins_rows = not is_pair
        super().__init__(
            data, node_sampler, transform=transform if is_pair else None, filter_per_worker=False, **options
        )

    def collate_fn(self, index: Any) -> Any:
        """Sample a batch, in a worker if there are any."""
        # NodeLoader transforms outputs when they are joined with their rows: too late to know the nodes.
        output = super().collate_fn(index)
        return output if self._transform_output is None else self._transform_output(output)

    def filter_fn(self, out: Any) -> Any:
        """Join the output of the sampler with its attributes; those of `features` come behind PyG's own."""
        batch = super().filter_fn(out)
        if not self._joins_rows:
            return batch
        attrs = [attr for attr in self._features.get_all_tensor_attrs() if self._holder(batch, attr) is not None]
        for attr in attrs:  # not by n_id, which may be an attribute of the graph itself
            attr.index = out.node if attr.group_name is None else out.node[attr.group_name]
        for attr, values in zip(attrs, self._features.multi_get_tensor(attrs), strict=True):
            self._holder(batch, attr)[attr.attr_name] = values
        return batch if self._transform is None else self._transform(batch)

    @staticmethod
    def _holder(batch: Any, attr: Any) -> Any:
        """Return what holds the nodes that an attribute is of; None if the batch has none of them."""
        if attr.group_name is None:
            return batch
        return batch[attr.group_name] if attr.group_name in batch.node_types else None

    def _get_iterator(self) -> Iterator[Any]:
        return _AheadIterator(DataLoader._get_iterator(self), self._features, self.filter_fn, self._window)


class _AheadIterator:
    """Batches of a loader, from the outputs of its sampler."""

    def __init__(self, outputs: Any, features: RowFeatureStore, join: Callable[[Any], Any], window: int) -> None:
        self._outputs = outputs  # an iterator of DataLoader
        self._ask = features.prefetch
        self._join = join
        self._window = window
        self._batches = self._joined()

    def __iter__(self) -> _AheadIterator:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._outputs)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin anew; DataLoader calls this instead of making another iterator if its workers stay."""
        self._batches.close()
        self._outputs._reset(loader, first_iter)
        self._batches = self._joined()

    def _joined(self) -> Any:
        return _joined(self._outputs, self._ask, self._join, self._window)


def _joined(
    outputs: Iterator[Any], ask: Callable[[Any], NodeTicket], join: Callable[[Any], Any], window: int
) -> Iterator[Any]:
    asked: deque[tuple[Any, NodeTicket]] = deque()
    failures: list[Exception] = []
    try:
        for pair in _until_failure(((output, ask(output.node)) for output in outputs), failures):
            asked.append(pair)
            if len(asked) > window:
                yield _taken(asked, join)
        while asked:
            yield _taken(asked, join)
        if failures:
            raise failures.pop()
    finally:  # the loop was left early, or a batch could not be joined
        for _, ticket in reversed(asked):  # in forward order, each would make room for starting the next one
            ticket.cancel()


def _taken(asked: deque[tuple[Any, NodeTicket]], join: Callable[[Any], Any]) -> Any:
    joined = join(asked[0][0])  # takes the rows through the store
    asked.popleft()
    return joined


def _until_failure(
    pairs: Iterator[tuple[Any, NodeTicket]], failures: list[Exception]
) -> Iterator[tuple[Any, NodeTicket]]:
    """Yield pairs up to an error, which is put into `failures`: the batches before it are processed first."""
    try:
        yield from pairs
    except Exception as error:  # noqa: BLE001 - it is raised later
        failures.append(error)
