"""A FeatureStore of PyTorch Geometric for node attributes whose rows lie on disk.

PyG's loaders request all attributes of a batch at once, and their rows are read together. If `prefetch` was called with
the nodes before, the rows have been read already. `loader` calls it some batches ahead.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import torch

from .._shared.requirements import require

require("torch_geometric", "torch_geometric", "2.6")

from torch_geometric.data import FeatureStore, TensorAttr  # type: ignore[import-untyped] # noqa: E402

from fastpersist import ConfigError, RowStore, RowTicket, UnsupportedError  # noqa: E402

__all__ = ["NodeTicket", "RowFeatureStore"]

_Key: TypeAlias = "tuple[Any, str]"
"""Group and name of an attribute: what it is of, such as "paper" or None, and what it is, such as "x"."""


class NodeTicket:
    """Rows of nodes that were asked for ahead, by `RowFeatureStore.prefetch`.

    Dropping it gives up the rows that were not taken, as `cancel` does.

    Thread safety: any thread.
    """

    def __init__(self, nodes: Sequence[torch.Tensor]) -> None:
        # The store finds a ticket by the identities of its tensors. They are kept here, so that no identity is reused.
        self._nodes = [(ids, _version(ids)) for ids in nodes]
        self._tickets: dict[tuple[_Key, int], RowTicket] = {}

    def done(self) -> bool:
        """Tell whether all rows not yet taken have arrived, or have failed."""
        return all(ticket.done() for ticket in list(self._tickets.values()))

    def cancel(self) -> None:
        """Give up the rows that were not taken."""
        while self._tickets:
            self._tickets.popitem()[1].cancel()

    def _take(self, key: _Key, ids: torch.Tensor) -> RowTicket | None:
        if any(ids is other and _version(ids) != version for other, version in self._nodes):
            return None  # changed in place since they were asked for
        return self._tickets.pop((key, id(ids)), None)


class RowFeatureStore(FeatureStore):  # type: ignore[misc] # torch_geometric has no types
    """A FeatureStore of PyG with attributes on disk, each a `fastpersist.RowStore`, and small ones in memory.

    Attributes on disk are named by `add`; others are put as in any FeatureStore, and stay in memory. Loaders take it
    in `data=(features, graph)`.

    An index is None for all rows, a slice, one number, a mask, or ids; of ids on disk, none is negative.

    Args:
        device: The device for rows from disk, as in `RowStore.gather`; they are copied there beside the caller. The
            other attributes stay where they are.

    Thread safety: any thread may get rows; `add`, `put_tensor`, `remove_tensor` and `close` belong to one at a time. A
    forked child may use it, as it may use a RowStore. It is pickled with the attributes that are in memory.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._device = device
        self._lock = threading.Lock()
        self._rows: dict[_Key, RowStore] = {}
        self._owned: list[RowStore] = []
        self._tensors: dict[_Key, torch.Tensor] = {}
        # By the identity of their ids. A ticket keeps these alive; only its owner keeps the ticket.
        self._ahead: weakref.WeakValueDictionary[int, NodeTicket] = weakref.WeakValueDictionary()

    def add(
        self,
        rows: RowStore | str | os.PathLike[str] | Sequence[Any],
        group_name: Any = None,
        attr_name: str = "x",
        **options: Any,
    ) -> RowStore:
        """Make a table the values of an attribute, row i those of node i.

        Args:
            rows: An open store, which stays the caller's; or what `fastpersist.RowStore` opens, closed by `close`.
            group_name: The type of the nodes; None in a graph with one type.
            attr_name: The name of the attribute in batches.
            **options: Options for `fastpersist.RowStore`: `cache_bytes`, `tensor` …

        Returns:
            The store, for its `keep` and `stats`.

        Raises:
            ConfigError: There is such an attribute already; options for a store that is open.
            FastPersistError: What `fastpersist.RowStore` raises.
        """
        key = (group_name, attr_name)
        if key in self._rows or key in self._tensors:
            raise ConfigError(f"there is an attribute {attr_name!r} of {group_name!r} already; remove_tensor it first")
        if isinstance(rows, RowStore):
            if options:
                raise ConfigError(f"options are for a store that is yet to be opened: {', '.join(options)}")
            self._rows[key] = rows
        else:
            self._rows[key] = RowStore(rows, **options)
            self._owned.append(self._rows[key])
        return self._rows[key]

    def prefetch(self, nodes: torch.Tensor | Mapping[Any, torch.Tensor]) -> NodeTicket:
        """Ask for the rows of nodes that will be wanted later, of all attributes on disk.

        A request for an attribute with the same, unchanged tensor gets these rows, once. All other requests read their
        own rows.

        Args:
            nodes: Ids; in a graph of several types, those of each.

        Returns:
            The ticket, which keeps the request alive.

        Raises:
            RowIndexError: An id is no row.
            StorageError: A file has changed since it was opened.
        """
        by_group = nodes if isinstance(nodes, Mapping) else None
        ticket = NodeTicket(list(by_group.values()) if by_group is not None else [nodes])  # type: ignore[list-item]
        for key, rows in self._rows.items():
            ids = nodes if by_group is None else by_group.get(key[0])
            if ids is not None:
                ticket._tickets[key, id(ids)] = rows.prefetch(ids, device=self._device)
        with self._lock:
            for ids, _ in ticket._nodes:
                self._ahead[id(ids)] = ticket
        return ticket

    def close(self) -> None:
        """Close the stores that `add` has opened. Does nothing when called again."""
        while self._owned:
            self._owned.pop().close()

    def __enter__(self) -> RowFeatureStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process; in another process, unpickling opens the stores."""
        state = {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_ahead")}
        return state | {"_owned": list(self._rows.values())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._ahead = weakref.WeakValueDictionary()

    # --- what PyG calls

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Return an attribute for each table and tensor; new objects, since loaders write into them."""
        return [self._tensor_attr_cls(*key) for key in (*self._rows, *self._tensors)]

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        key = (attr.group_name, attr.attr_name)
        if key in self._rows:
            raise UnsupportedError(
                f"attribute {attr.attr_name!r} of {attr.group_name!r} is a table on disk, which is never changed; "
                "write another one, and add it under this name after remove_tensor"
            )
        values = torch.as_tensor(tensor)
        if attr.index is None:
            self._tensors[key] = values
        else:
            self._memory(key)[attr.index] = values
        return True

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Change an attribute in memory, as `put_tensor` does; PyG's own removes all of it first."""
        return bool(self.put_tensor(tensor, *args, **kwargs))

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor:
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[torch.Tensor]:
        # All are asked for before the first is waited for.
        asked = [self._asked(attr) for attr in attrs]
        return [each.result() if isinstance(each, RowTicket) else each for each in asked]

    def _asked(self, attr: TensorAttr) -> torch.Tensor | RowTicket:
        key = (attr.group_name, attr.attr_name)
        rows = self._rows.get(key)
        if rows is None:
            values = self._memory(key)
            return values if attr.index is None else values[attr.index]
        if isinstance(attr.index, torch.Tensor):
            with self._lock:
                ahead = self._ahead.get(id(attr.index))
            ticket = None if ahead is None else ahead._take(key, attr.index)
            if ticket is not None:
                return ticket
        return rows.prefetch(_ids(attr.index, rows.row_count), device=self._device)

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        key = (attr.group_name, attr.attr_name)
        rows = self._rows.get(key)
        if rows is None:
            return tuple((self._memory(key) if attr.index is None else self._get_tensor(attr)).shape)
        shape = (rows.row_count,) if attr.index is None else tuple(_ids(attr.index, rows.row_count).shape)
        return (*shape, *rows.row_shape)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        key = (attr.group_name, attr.attr_name)
        rows = self._rows.pop(key, None)
        if rows in self._owned:
            self._owned.remove(rows)
            rows.close()
        return rows is not None or self._tensors.pop(key, None) is not None

    def _memory(self, key: _Key) -> torch.Tensor:
        if key not in self._tensors:
            known = ", ".join(f"{name!r} of {group!r}" for group, name in (*self._rows, *self._tensors))
            raise KeyError(f"there is no attribute {key[1]!r} of {key[0]!r}; there is {known or 'none at all'}")
        return self._tensors[key]


def _ids(index: Any, row_count: int) -> torch.Tensor:
    """Return an index of PyG as ids of rows."""
    if index is None or isinstance(index, slice):
        places = range(row_count)[index or slice(None)]
        if not places:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.arange(places.start, places.stop, places.step, device="cpu")
    ids = index if isinstance(index, torch.Tensor) else torch.as_tensor(index, device="cpu")
    if ids.dtype != torch.bool:
        return ids
    if ids.shape != (row_count,):
        raise ConfigError(f"a mask over {row_count} rows is of shape [{row_count}], not {list(ids.shape)}")
    return ids.nonzero().squeeze(1)


def _version(ids: torch.Tensor) -> int:
    """Return the version counter of a tensor, which grows when it is changed in place."""
    return 0 if ids.is_inference() else ids._version
