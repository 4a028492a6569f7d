"""TensorFile between files and the memory of a GPU: the right bytes, in the order of the caller's stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.gpu_device import DEVICE, GPU, PATIENCE_S, keep_busy, random_tensor, synchronize

import fastpersist as fp

pytestmark = GPU

COUNT = 5_000_003  # 20 MB and some: several chunks, and an end that fills no block


@pytest.mark.parametrize("shift", [0, 1, 4095, 4096])
@pytest.mark.parametrize("first", [0, 1, 1024])
def test_bytes_go_and_come_back(first: int, shift: int, tmp_path: Path) -> None:
    """From any place in memory, to any place in a file."""
    tensor = random_tensor(COUNT)[first:]
    expected = tensor.cpu()
    with fp.TensorFile(tmp_path / "x", "w") as file:
        assert file.write(tensor, shift) == tensor.nbytes
        found = torch.zeros_like(tensor)
        assert file.read(found, shift) == tensor.nbytes
        assert torch.equal(found.cpu(), expected)
        host = torch.zeros_like(expected)
        assert file.read(host, shift) == tensor.nbytes
    assert torch.equal(host, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_every_kind_of_number(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = random_tensor(100_001).to(dtype)
    with fp.TensorFile(tmp_path / "x", "w") as file:
        file.write(tensor)
        found = torch.zeros_like(tensor)
        file.read(found)
    assert torch.equal(found.cpu().view(torch.uint8), tensor.cpu().view(torch.uint8))


def test_a_write_comes_after_what_the_stream_holds_and_before_what_it_is_given(tmp_path: Path) -> None:
    tensor = torch.zeros(COUNT, device=DEVICE)
    with fp.TensorFile(tmp_path / "x", "w") as file:
        keep_busy()
        tensor.fill_(5)
        file.write(tensor)
        tensor.fill_(7)
        found = torch.zeros(COUNT)
        file.read(found)
    assert bool((found == 5).all())


def test_a_read_comes_after_readers_of_its_target(tmp_path: Path) -> None:
    with fp.TensorFile(tmp_path / "x", "w") as file:
        file.write(torch.full((COUNT,), 2.0))
        target = torch.ones(COUNT, device=DEVICE)
        keep_busy()
        before = target * 10
        file.read(target)
        after = target * 10
    synchronize()
    assert bool((before == 10).all())
    assert bool((after == 20).all())


def test_many_requests_of_devices_and_the_host_at_once(tmp_path: Path) -> None:
    tensors = [random_tensor(COUNT // (number + 1), number) for number in range(6)]
    tensors = [tensor if number % 3 else tensor.cpu() for number, tensor in enumerate(tensors)]
    offsets = [sum(tensor.nbytes for tensor in tensors[:number]) for number in range(6)]
    with fp.TensorFile(tmp_path / "x", "w") as file:
        for pending in [file.write_async(*one) for one in zip(tensors, offsets, strict=True)]:
            pending.wait(PATIENCE_S)
        found = [torch.zeros_like(tensor) for tensor in tensors]
        for pending in [file.read_async(*one) for one in zip(found, offsets, strict=True)]:
            assert pending.result(PATIENCE_S)
    for one, tensor in zip(found, tensors, strict=True):
        assert torch.equal(one.cpu(), tensor.cpu())


def test_a_tensor_that_is_dropped_before_it_is_written_stays_as_it_was(tmp_path: Path) -> None:
    expected = random_tensor(COUNT).cpu()
    with fp.TensorFile(tmp_path / "x", "w") as file:
        tensor = expected.to(DEVICE)
        keep_busy(100)
        pending = file.write_async(tensor)
        del tensor
        others = [torch.full((COUNT,), 9.0, device=DEVICE) for _ in range(3)]
        pending.wait(PATIENCE_S)
        found = torch.zeros(COUNT)
        file.read(found)
    assert torch.equal(found, expected)
    assert all(bool((other == 9).all()) for other in others)
