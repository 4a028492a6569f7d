"""The skeleton of an object is the pickle that torch.save writes, and its storages are the live ones, each once."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch
from support.specimens import SPECIMENS

from fastpersist.formats.pickle_scan import scan_pickle, storage_references
from fastpersist.pickling import pickle_skeleton

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|CSC|BSR|BSC)|The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning"),
]


@pytest.mark.parametrize("name", SPECIMENS)
def test_pickle_is_torchs_and_the_scan_finds_the_storages(name: str) -> None:
    with SPECIMENS[name].made() as obj:
        skeleton = pickle_skeleton(obj)
        stock = io.BytesIO()
        torch.save(obj, stock)
    with zipfile.ZipFile(stock) as archive:
        assert skeleton.pickle == archive.read("archive/data.pkl")
        sizes = [archive.getinfo(name).file_size for name in archive.namelist() if name.startswith("archive/data/")]
    assert [storage.nbytes() for storage in skeleton.storages] == sizes
    references = storage_references(scan_pickle(skeleton.pickle))
    by_key = {int(reference.key): reference.size_bytes for reference in references}
    assert by_key == dict(enumerate(sizes))


def test_storages_are_the_live_ones() -> None:
    tensor = torch.zeros(3)
    skeleton = pickle_skeleton({"a": tensor, "b": tensor[1:], "c": torch.ones(1)})
    assert len(skeleton.storages) == 2
    assert skeleton.storages[0].data_ptr() == tensor.data_ptr()


def test_storages_made_by_a_reduction_are_kept_alive() -> None:
    class Fresh:
        def __reduce__(self) -> Any:
            return list, ([torch.full((1000,), 7.0)],)

    skeleton = pickle_skeleton([Fresh() for _ in range(50)])
    assert len(skeleton.storages) == 50
    assert len({storage.data_ptr() for storage in skeleton.storages}) == 50
    for storage in skeleton.storages:
        assert torch.empty(0).set_(storage).unique().tolist() == [7.0]


def test_same_memory_under_two_storages_of_one_dtype_is_stored_twice() -> None:
    tensor = torch.zeros(4)
    other = torch.frombuffer(tensor.numpy(), dtype=torch.float32)
    assert len(pickle_skeleton([tensor, other]).storages) == 2
    with pytest.raises(RuntimeError, match="different types"):
        pickle_skeleton([tensor, torch.frombuffer(tensor.numpy(), dtype=torch.int32)])
