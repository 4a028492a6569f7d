"""What a file takes from memory comes in columns, which look like sequences of sources where somebody wants one."""

from __future__ import annotations

import torch

from fastpersist.saving.sources import Holders, Source, SourceTable, StorageFacts, facts_of


def table_of(*storages: torch.UntypedStorage) -> SourceTable:
    table = SourceTable([], [], [])
    for index, storage in enumerate(storages):
        table.append(Source(storage, index, storage.nbytes() - index))
    return table


def test_a_table_is_a_sequence_of_its_sources() -> None:
    storages = [torch.UntypedStorage(size) for size in (10, 20, 30)]
    table = table_of(*storages)
    assert len(table) == 3
    assert list(table) == [Source(storages[0], 0, 10), Source(storages[1], 1, 19), Source(storages[2], 2, 28)]
    assert table[-1] == Source(storages[2], 2, 28)
    assert list(table[1:]) == list(table)[1:]
    assert table.sizes_bytes == [10, 19, 28]


def test_facts_are_those_of_the_storages() -> None:
    storages = [torch.UntypedStorage(10), torch.UntypedStorage(0)]
    facts = facts_of(storages)
    assert list(facts.keys) == [storage._cdata for storage in storages]
    assert list(facts.addresses) == [storages[0].data_ptr(), 0]
    assert list(facts.sizes_bytes) == [10, 0]
    assert facts.are_on_host
    assert not facts_of([*storages, torch.UntypedStorage(5, device="meta")]).are_on_host


def test_addresses_are_those_of_facts_and_offsets() -> None:
    storages = [torch.UntypedStorage(10), torch.UntypedStorage(20)]
    known = StorageFacts([1, 2], [1000, 2000], [10, 20], True)
    assert list(table_of(*storages).addresses(known)) == [1000, 2001]
    assert SourceTable(storages, None, [10, 20]).addresses(known) is known.addresses


def test_known_facts_are_not_looked_up_again_and_end_with_the_next_source() -> None:
    storage = torch.UntypedStorage(10)
    known = StorageFacts([1], [2], [3], False)
    table = SourceTable([storage], [0], [10], known)
    assert table.facts() is known
    table.append(Source(storage, 0, 10))
    assert table.facts() == facts_of([storage, storage])


def test_a_tensor_stands_among_the_holders_as_often_as_it_holds_something() -> None:
    tensor = torch.zeros(3)
    holders = Holders([], [])
    holders.add(tensor, 7)
    holders.add(tensor, 8)
    assert holders.held == [7, 8]
    assert all(one is tensor for one in holders.tensors)
