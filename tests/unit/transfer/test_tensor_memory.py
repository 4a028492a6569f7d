"""Any tensor seen as bytes, and what cannot be; memory that is locked, and freed when nobody needs it."""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
import types
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forking import run_in_child
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from fastpersist import _native
from fastpersist.errors import ConfigError, StorageError
from fastpersist.transfer import tensor_memory
from fastpersist.transfer.tensor_memory import byte_tensor, byte_view, crc32_of, locked_tensor

# torch warns of what such tensors will become.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Sparse.*:UserWarning"),
]


def is_dtype(value: object) -> bool:
    return isinstance(value, torch.dtype)


ALL_DTYPES = sorted({value for value in vars(torch).values() if is_dtype(value)}, key=str)
PLAIN_DTYPES = [dtype for dtype in ALL_DTYPES if not str(dtype).startswith("torch.q")]
PACKED_DTYPES = [torch.quint4x2, torch.quint2x4]


class Subclass(torch.Tensor):
    """Memory of its own, and torch functions that give the subclass back."""


class Hollow(torch.Tensor):
    """A subclass that has sizes and a device, and no memory."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function: object, *arguments: object) -> Any:
        raise RuntimeError(f"{function} is not for it")


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Read a tensor's bytes by way of its whole storage."""
    storage = bytes(tensor.untyped_storage().tolist())
    start_bytes = tensor.storage_offset() * tensor.element_size()
    return storage[start_bytes : start_bytes + tensor.numel() * tensor.element_size()]


# --- byte_view


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d not in PACKED_DTYPES], ids=str)
def test_the_bytes_of_every_dtype_are_those_in_memory(dtype: torch.dtype) -> None:
    tensor = torch.empty((2, 3), dtype=dtype)
    tensor.untyped_storage().copy_(torch.arange(tensor.nbytes, dtype=torch.uint8).untyped_storage())
    view = byte_view(tensor)
    assert view.dtype == torch.uint8
    assert view.shape == (6 * dtype.itemsize,)
    assert view.data_ptr() == tensor.data_ptr()
    assert view.tolist() == list(range(tensor.nbytes))


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
def test_packed_dtypes_that_claim_more_bytes_than_they_have_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"storage has \d bytes.* reach to byte 6; its dtype is packed"):
        byte_view(torch.empty((2, 3), dtype=dtype))


def test_the_crc_of_a_tensor_is_that_of_its_bytes_and_goes_on_from_another() -> None:
    data = torch.arange(300, dtype=torch.int16)
    raw = data.numpy().tobytes()
    assert crc32_of(data) == zlib.crc32(raw)
    assert crc32_of(data[100:], crc32_of(data[:100])) == zlib.crc32(raw)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(1.5),
        lambda: torch.arange(12)[4:9],
        lambda: torch.arange(12).view(3, 4)[1],
        lambda: torch.arange(12, dtype=torch.float64).view(3, 4)[1:3],
        lambda: torch.arange(6).view(1, 6).t()[:, :1],  # strides of dimensions with one element say nothing
        lambda: torch.arange(6).to(torch.complex64).view(2, 3),
        lambda: torch.view_as_complex(torch.randn(4, 2)).conj().resolve_conj(),
        lambda: torch.randn(2, 3, requires_grad=True),
        lambda: torch.randn(2, 3, requires_grad=True) * 2,
        lambda: torch.nn.Parameter(torch.randn(5)),
        lambda: torch.nn.Buffer(torch.randn(5)),
        lambda: torch.randn(4).as_subclass(Subclass),
        lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_channel(torch.randn(4, 4), torch.ones(4), torch.zeros(4), 0, torch.qint8),
        lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint32)[1:3],
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).permute(0, 2, 3, 1),
        lambda: torch.frombuffer(bytearray(range(16)), dtype=torch.int16),
        lambda: torch._lazy_clone(torch.arange(4)),
    ],
)
def test_the_view_is_an_alias_without_a_gradient(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    view = byte_view(tensor)
    assert bytes(view.tolist()) == raw_bytes(tensor)
    assert type(view) is torch.Tensor
    assert not view.requires_grad
    assert view.grad_fn is None
    assert view.is_contiguous()
    view.fill_(1)
    assert set(raw_bytes(tensor)) == {1}


@pytest.mark.parametrize("make", [lambda: torch.empty(0), lambda: torch.empty(3, 0, 2), lambda: torch.ones(4)[4:]])
def test_no_elements_are_no_bytes(make: Callable[[], torch.Tensor]) -> None:
    view = byte_view(make())
    assert view.shape == (0,)
    assert view.dtype == torch.uint8


def test_the_view_keeps_the_memory() -> None:
    tensor = torch.full((1 << 16,), 7, dtype=torch.int64)
    storage = weakref.ref(tensor.untyped_storage())
    view = byte_view(tensor)
    del tensor
    gc.collect()
    assert view.view(torch.int64).eq(7).all()
    del view
    gc.collect()
    assert storage() is None


def test_a_write_through_the_view_counts_as_a_change_of_the_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    base = torch.ones(4)
    part = base[1:3]
    for tensor, counter in ((parameter, parameter), (part, base)):
        before = counter._version
        byte_view(tensor).zero_()
        assert counter._version == before + 1
    with torch.inference_mode():
        before = parameter._version
        byte_view(parameter).fill_(1)
    assert parameter._version == before + 1


def test_backward_notices_a_write_through_the_view() -> None:
    leaf = torch.ones(3, requires_grad=True)
    needed = leaf * 2
    result = (needed * needed).sum()
    byte_view(needed).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_inference_tensors_can_be_seen_and_written_anywhere() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        byte_view(tensor).zero_()
        assert tensor.tolist() == [0, 0, 0]
    view = byte_view(tensor)
    assert not view.is_inference()
    view.copy_(byte_view(torch.full((3,), 5.0)))
    assert tensor.tolist() == [5, 5, 5]


def test_compiled_code_passes_through() -> None:
    def function(tensor: torch.Tensor) -> torch.Tensor:
        return byte_view(tensor)[:2] + 1

    compiled = torch.compile(function, backend="eager")
    assert compiled(torch.zeros(4)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.arange(6).view(2, 3).t(), r"strides \(1, 3\)\); .permute(1, 0) is"),
        (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), ".permute(0, 2, 3, 1) is"),
        (lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), ".permute(0, 2, 3, 4, 1) is"),
        (lambda: torch.arange(6)[::2], "write .contiguous(), which is a copy"),
        (lambda: torch.ones(1, 3).expand(2, 3), "write .contiguous(), which is a copy"),
        (lambda: torch.arange(12).view(3, 4)[:, :2], "read into a contiguous tensor, and copy_() from that"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), ".resolve_conj()"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, ".resolve_neg()"),
        (lambda: torch.eye(3).to_sparse(), ".indices() and .values(), or .to_dense()"),
        (lambda: torch.eye(3).to_sparse_csr(), ".crow_indices(), .col_indices() and .values(), or .to_dense()"),
        (lambda: torch.eye(3).to_sparse_csc(), ".ccol_indices(), .row_indices() and .values(), or .to_dense()"),
        (lambda: torch.eye(4).to_sparse_bsr((2, 2)), ".crow_indices(), .col_indices() and .values(), or .to_dense()"),
        (lambda: torch.empty(2, 3, device="meta"), "on the meta device"),
        (lambda: torch.empty(0, device="meta"), "on the meta device"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "it is fake"),
        (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "pass .a and .b"),
        (lambda: Hollow(), "no memory of its own"),
        (lambda: torch._to_functional_tensor(torch.ones(2)), "no memory of its own"),
        (lambda: torch._efficientzerotensor(3), "no memory of its own"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ".values()"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), ".values()"),
    ],
)
def test_what_has_no_bytes_in_order_is_refused_with_what_helps(make: Callable[[], torch.Tensor], advice: str) -> None:
    tensor = make()
    pattern = advice if advice.startswith(r"strides \(") else re.escape(advice)
    with pytest.raises(ConfigError, match=pattern.replace("permute(1, 0)", r"permute\(1, 0\)")):
        byte_view(tensor)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no mkldnn")
def test_mkldnn_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout is torch._mkldnn; pass .to_dense\(\)"):
        byte_view(torch.ones(3, 3).to_mkldnn())


def test_the_permutation_that_is_advised_works() -> None:
    tensor = torch.randn(2, 1, 3, 4, 1).permute(3, 0, 4, 2, 1)
    with pytest.raises(ConfigError) as raised:
        byte_view(tensor)
    numbers = re.search(r"\.permute\(([\d, ]+)\)", str(raised.value))
    assert numbers is not None
    view = byte_view(tensor.permute([int(number) for number in numbers[1].split(",")]))
    assert bytes(view.tolist()) == raw_bytes(tensor)


def test_memory_that_was_given_back_is_not_looked_at() -> None:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=r"storage has 0 bytes, .* reach to byte 32; .*FSDP"):
        byte_view(tensor)
    part = torch.ones(8)[2:6]
    part.untyped_storage().resize_(20)
    with pytest.raises(ConfigError, match=r"storage has 20 bytes, .* reach to byte 24"):
        byte_view(part)


def test_tensors_of_transforms_are_refused() -> None:
    def function(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ConfigError, match=r"torch\.func"):
            byte_view(tensor)
        return tensor.sum()

    torch.func.vmap(function)(torch.ones(2, 3))
    torch.func.grad(function)(torch.ones(3))


def test_a_mode_that_takes_over_torch_is_said() -> None:
    tensor = torch.ones(3)
    with FakeTensorMode(), pytest.raises(ConfigError, match=r"shape \(3,\) cannot be seen as bytes: torch says: "):
        byte_view(tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ConfigError, match="FakeTensorMode is active"):
        byte_view(tensor)


@pytest.mark.parametrize(
    "nonsense", [None, 5, b"bytes", [torch.ones(3)], torch.ones(3).numpy(), torch.UntypedStorage(3)]
)
def test_what_is_no_tensor_is_refused(nonsense: Any) -> None:
    with pytest.raises(ConfigError, match=f"a tensor is needed, not {type(nonsense).__name__}"):
        byte_view(nonsense)


# --- locked_tensor


def locked_kib() -> int:
    """Return how much memory this process has locked."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmLck:"))
    return int(line.split()[1])


def test_the_memory_is_locked_aligned_and_zero() -> None:
    before_kib = locked_kib()
    tensor = locked_tensor((100, 100))
    assert locked_kib() - before_kib == 40  # 40,000 bytes are ten pages
    assert tensor.data_ptr() % 4096 == 0
    assert tensor.shape == (100, 100)
    assert tensor.dtype == torch.float32
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert not tensor.any()
    assert tensor._base is None
    tensor += 1
    assert tensor.sum() == 10_000


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_can_be_locked(dtype: torch.dtype) -> None:
    tensor = locked_tensor((2, 3), dtype)
    assert tensor.dtype == dtype
    assert tensor.shape == (2, 3)
    assert byte_view(tensor).tolist() == [0] * (6 * dtype.itemsize)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (5, (5,)),
        ((), ()),
        ([2, 3], (2, 3)),
        (torch.Size([4, 1]), (4, 1)),
        (torch.arange(6).numpy()[5], (5,)),
        (0, (0,)),
        ((3, 0, 2), (3, 0, 2)),
    ],
)
def test_shapes_are_what_torch_takes(shape: Any, expected: tuple[int, ...]) -> None:
    tensor = locked_tensor(shape, torch.int16)
    assert tuple(tensor.shape) == expected
    assert tensor.is_contiguous()


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        assert locked_tensor(3).device.type == "cpu"
        assert locked_tensor(0).device.type == "cpu"


@pytest.mark.parametrize("shape", [-1, (2, -1), 1.5, "12", None, (2, None), ((1, 2),), (1 << 62, 1 << 62), 1 << 63])
def test_what_is_no_shape_is_refused(shape: Any) -> None:
    with pytest.raises(ConfigError, match="locked_tensor: "):
        locked_tensor(shape)


@pytest.mark.parametrize("dtype", [None, "float32", float, torch.qint8, torch.quint4x2])
def test_what_is_no_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        locked_tensor(3, dtype)


@pytest.mark.parametrize(
    "holder",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[1],
        lambda tensor: tensor.view(-1)[7:9],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: byte_view(tensor),
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: tensor.numpy(),
    ],
)
def test_it_is_unlocked_with_the_last_reference(holder: Callable[[torch.Tensor], object]) -> None:
    before_kib = locked_kib()
    tensor = locked_tensor((64, 256))
    held = holder(tensor)
    assert locked_kib() - before_kib == 64
    del tensor
    gc.collect()
    assert locked_kib() - before_kib == 64
    del held
    gc.collect()
    assert locked_kib() == before_kib


def test_it_may_be_freed_on_another_thread() -> None:
    before_kib = locked_kib()
    tensors = [locked_tensor(1 << 16, torch.uint8)]
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert locked_kib() == before_kib


def test_the_limit_is_a_clear_error() -> None:
    def work(_report: object) -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        if os.geteuid() == 0:
            os.setuid(65534)  # root may lock all it likes
        kept = locked_tensor(1 << 18, torch.uint8)
        before_kib = locked_kib()
        with pytest.raises(StorageError, match=r"locking 2097152 bytes .*1048576 bytes.*RLIMIT_MEMLOCK.*ulimit -l"):
            locked_tensor((1 << 19,))
        assert locked_kib() == before_kib
        assert locked_tensor(1 << 18, torch.uint8).numel() == kept.numel()

    run_in_child(work)


def test_more_than_there_is_is_an_error_of_storage() -> None:
    with pytest.raises(StorageError) as raised:
        locked_tensor(1 << 61, torch.uint8)
    assert raised.value.errno


def test_a_forked_child_has_a_copy() -> None:
    tensor = locked_tensor(4096, torch.uint8).fill_(3)

    def work(_report: object) -> None:
        assert tensor.eq(3).all()
        tensor.fill_(4)

    run_in_child(work)
    assert tensor.eq(3).all()


# --- CUDA, as far as it goes without a device


class Runtime:
    """Takes the place of torch.cuda.cudart(): writes down who is registered, and what memory was there then."""

    cudaError = types.SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.result = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 0
        self.calls.append(("register", address, size_bytes))
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, locked_kib()))
        return 0

    def cudaGetErrorString(self, result: int) -> str:
        return f"error {result}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_with_cuda_it_is_registered_and_unregistered_before_it_is_freed(cuda: Runtime) -> None:
    before_kib = locked_kib()
    tensor = locked_tensor((2, 1024))
    address = tensor.data_ptr()
    assert cuda.calls == [("register", address, 8192)]
    part = tensor[1]
    del tensor
    gc.collect()
    assert len(cuda.calls) == 1
    del part
    gc.collect()
    assert cuda.calls[1:] == [("unregister", address, before_kib + 8)]  # the memory was still there
    assert locked_kib() == before_kib


def test_what_cuda_refuses_is_locked_all_the_same(cuda: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    cuda.result = 2
    before_kib = locked_kib()
    tensor = locked_tensor(1024)
    assert locked_kib() == before_kib + 4
    assert "CUDA did not register 4096 bytes of locked memory (error 2)" in caplog.text
    del tensor
    gc.collect()
    assert [call[0] for call in cuda.calls] == ["register"]
    assert locked_kib() == before_kib


def test_no_elements_are_not_registered(cuda: Runtime) -> None:
    locked_tensor(0)
    assert cuda.calls == []


def test_cuda_that_nobody_has_initialised_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("this initialises CUDA"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert locked_tensor(3).numel() == 3


def test_a_process_that_has_lost_cuda_unregisters_nothing(cuda: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = locked_tensor(1024)
    before_kib = locked_kib()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # as in a forked child
    del tensor
    gc.collect()
    assert [call[0] for call in cuda.calls] == ["register"]
    assert locked_kib() == before_kib - 4


def test_the_error_of_a_refused_call_can_be_taken_back() -> None:
    tensor_memory._forget_cuda_error()  # nothing to take back, and nothing to call, without CUDA
    assert _native.LockedMemory(1).size_bytes == 1


# --- bytes of a storage


def test_byte_tensor_shares_the_storage() -> None:
    tensor = torch.arange(6, dtype=torch.int16)[2:].view(2, 2)
    view = byte_tensor(tensor.untyped_storage())
    assert view.shape == (12,)
    assert view.dtype == torch.uint8
    view[4] = 77
    assert tensor[0, 0] == 77
