"""Rows gathered from a table are the ones asked for, whatever the ids, the dtype, the file and the engine; arguments
that do not fit are refused before anything is read.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import leaks
from support.row_tables import make_rows
from torch._subclasses.fake_tensor import FakeTensorMode

from fastpersist import _native
from fastpersist.errors import (
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    RowIndexError,
    StorageError,
    UnsupportedError,
)
from fastpersist.rows import store as store_module
from fastpersist.rows.opening import RowSource, open_rows
from fastpersist.rows.store import RowStore
from fastpersist.rows.writer import RowWriter, write_rows
from fastpersist.transfer import arena

nothing_is_left_behind = leaks.nothing_is_left_behind

COUNT = 5000

# int64 tensors have a way of their own through the native side; everything else is checked in Python.
ids_both_ways = pytest.mark.parametrize("given", [list, torch.tensor], ids=["list", "tensor"])
Given = Callable[[list[int]], Any]


# --------------------------------------------------------------------------------------------------------- gathers


@pytest.mark.parametrize("cache_bytes", [0, 100_000, "auto"])
def test_rows_come_in_the_order_of_their_ids(cache_bytes: int | str, path: Path, rows: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    with RowStore(path, cache_bytes=cache_bytes) as store:
        for count in (1, 10, 64, 65, 3000, 20_000, 10):
            ids = torch.randint(COUNT, (count,), generator=generator)
            assert torch.equal(store.gather(ids), rows[ids])
        assert torch.equal(store.gather(range(COUNT)), rows)


def test_a_cache_takes_a_quarter_of_the_share_of_its_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_host_bytes", lambda: 12 << 20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for cache_bytes, taken_bytes in (("auto", 1 << 20), (2 << 20, 2 << 20)):
        with RowStore(path, cache_bytes=cache_bytes) as store:
            assert store._cache_bytes == taken_bytes


def test_shapes_are_those_of_an_embedding(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path) as store:
        for ids in (7, [7], [[1, 2], [3, 4], [3, 4]], torch.zeros(2, 1, 3, dtype=torch.int32), np.array([[5]], "u2")):
            wanted = torch.nn.functional.embedding(torch.as_tensor(ids).long(), rows.double()).int()
            assert torch.equal(store.gather(ids), wanted)
        for shape in [(0,), (0, 3), (2, 0)]:
            empty = store.gather(torch.empty(shape, dtype=torch.int64))
            assert empty.shape == (*shape, 32)
            assert empty.dtype == torch.int32
        assert store.gather([]).shape == (0, 32)


def test_nothing_is_read_for_no_ids(path: Path) -> None:
    with RowStore(path) as store:
        store.gather([])
        store.prefetch([]).result()
        store.gather_unique([])
        store.keep([])
        assert (store.stats().read_count, store.stats().row_count) == (0, 0)


@pytest.mark.parametrize(
    "name",
    [
        *"bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 uint16 uint32 uint64".split(),
        "float8_e4m3fn",
    ],
)
def test_every_dtype_comes_as_it_is(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (50, 8 * dtype.itemsize), dtype=torch.uint8)
    table = raw.view(dtype)
    (tmp_path / "raw").write_bytes(raw.numpy().tobytes())
    stores = [RowStore(tmp_path / "raw", shape=(-1, 8), dtype=dtype)]
    save_file({"x": table}, str(tmp_path / "x.safetensors"))
    stores.append(RowStore(tmp_path / "x.safetensors"))
    if name not in ("bfloat16", "float8_e4m3fn"):
        np.save(tmp_path / "x.npy", table.numpy())
        stores.append(RowStore(tmp_path / "x.npy"))
    for store in stores:
        with store:
            found = store.gather([[49, 0], [7, 49]])
            assert (found.dtype, found.shape, store.dtype, len(store)) == (dtype, (2, 2, 8), dtype, 50)
            wanted = raw[[49, 0, 7, 49]].reshape(-1)
            assert torch.equal(found.view(-1).view(torch.uint8), wanted)


def test_rows_may_be_numbers_or_have_many_dimensions(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.arange(100, dtype="f8"))
    np.save(tmp_path / "deep.npy", np.arange(2400, dtype="i2").reshape(100, 2, 3, 4))
    with RowStore(tmp_path / "flat.npy") as store:
        assert store.row_shape == ()
        assert store.gather([[5, 99]]).tolist() == [[5.0, 99.0]]
        assert store.gather(3).shape == ()
    with RowStore(tmp_path / "deep.npy") as store:
        assert (store.row_count, store.row_shape, store.row_bytes) == (100, (2, 3, 4), 48)
        assert store.gather([1]).flatten().tolist() == list(range(24, 48))


def test_pieces_are_joined_by_rows(tmp_path: Path, rows: torch.Tensor) -> None:
    write_rows(tmp_path / "a.npy", rows[:1000])
    save_file({"p": rows[1000:1000].clone(), "q": rows[1000:3000].clone()}, str(tmp_path / "b.safetensors"))
    write_rows(tmp_path / "c.safetensors", rows[3000:])
    shards = str(tmp_path / "b.safetensors")
    with RowStore([tmp_path / "a.npy", (shards, "p"), (shards, "q"), str(tmp_path / "c.safetensors")]) as store:
        ids = torch.randint(COUNT, (4000,), generator=torch.Generator().manual_seed(2))
        assert torch.equal(store.gather(ids), rows[ids])
        assert torch.equal(store.gather([999, 1000, 2999, 3000]), rows[[999, 1000, 2999, 3000]])


@pytest.mark.parametrize("row_bytes", [1025, 2050, 4097])
def test_rows_that_all_straddle_blocks_are_scanned(row_bytes: int, tmp_path: Path) -> None:
    table = make_rows(3000, row_bytes)[:, :row_bytes].to(torch.uint8)
    write_rows(tmp_path / "t.npy", table)
    with RowStore(tmp_path / "t.npy") as store:
        assert torch.equal(store.gather(range(3000)), table)
        assert torch.equal(store.gather(range(1, 700)), table[1:700])


def test_unique_rows_are_read_once(path: Path, rows: torch.Tensor) -> None:
    ids = torch.tensor([[4000, 3, 4000], [3, 3, 10]])
    with RowStore(path, cache_bytes=0) as store:
        unique, inverse = store.gather_unique(ids)
        assert unique.shape == (3, 32)
        assert (inverse.shape, inverse.dtype) == (ids.shape, torch.int64)
        assert torch.equal(unique[inverse], rows[ids])
        assert store.stats().row_count == 3
        store.gather([4000] * 1000)
        assert store.stats().read_count <= 4
        with pytest.raises(RowIndexError, match=r"ids\[1\] is 5000"):
            store.gather_unique([1, 5000])


def test_neighbours_share_a_read(path: Path) -> None:
    with RowStore(path, cache_bytes=0) as store:
        store.gather([0, 1, 2, 3])
        assert store.stats().read_count == 1
        store.gather(range(COUNT))
        assert store.stats().read_count <= 1 + (COUNT * 128 >> 17) + 2


def test_a_row_that_was_read_is_a_hit(path: Path) -> None:
    with RowStore(path, cache_bytes="1MiB") as store:
        store.gather([1, 2, 2, 3])
        assert store.stats().hit_rate == 0.0
        store.gather([1, 2, 2, 3])
        stats = store.stats()
        assert (stats.row_count, stats.hit_count, stats.hit_rate, stats.cached_row_count) == (8, 4, 0.5, 3)
        assert stats.cache_row_limit >= COUNT
        assert stats.row_bytes == 128
        assert stats.read_bytes >= 3 * 128


# --------------------------------------------------------------------------------------------------- results, out=


def test_results_are_fresh(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path) as store:
        store.gather([5, 6]).zero_()
        assert torch.equal(store.gather([5, 6]), rows[[5, 6]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_out_is_filled_and_returned(dtype: torch.dtype, path: Path, rows: torch.Tensor) -> None:
    with RowStore(path) as store:
        out = torch.zeros(2, 3, 32, dtype=torch.int32)
        version = out._version
        ids = torch.tensor([[1, 2, 3], [9, 8, 7]], dtype=dtype)
        assert store.gather(ids, out=out) is out
        assert torch.equal(out, rows[ids])
        assert out._version > version
        part = torch.zeros(10, 32, dtype=torch.int32)
        store.gather(torch.tensor([4], dtype=dtype), out=part[3:4])
        assert torch.equal(part[3], rows[4])
        assert not part[:3].any()
        assert not part[4:].any()
        assert store.gather(torch.tensor([], dtype=dtype), out=part[:0]).shape == (0, 32)


@ids_both_ways
def test_out_may_be_a_tensor_of_inference_mode(given: Given, path: Path, rows: torch.Tensor) -> None:
    with RowStore(path) as store:
        with torch.inference_mode():
            out = torch.empty(1, 32, dtype=torch.int32)
            assert torch.equal(store.gather(given([3]), out=out), rows[[3]])
        assert torch.equal(store.gather(given([4]), out=out), rows[[4]])


def test_results_are_ordinary_tensors_in_inference_mode_too(path: Path) -> None:
    with RowStore(path) as store, torch.inference_mode():
        assert not store.gather(torch.tensor([3])).is_inference()


@ids_both_ways
@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(3, 32),
        torch.zeros(2, 32, dtype=torch.int32),
        torch.zeros(3, 1, 32, dtype=torch.int32),
        torch.zeros(32, 3, dtype=torch.int32).t(),
        torch.zeros(6, 32, dtype=torch.int32)[::2],
        torch.zeros(3, 32, dtype=torch.int32, device="meta"),
        torch.zeros(3, 32, dtype=torch.int32).to_sparse(),
        np.zeros((3, 32), "i4"),
    ],
    ids=["dtype", "count", "dimensions", "transposed", "strided", "meta", "sparse", "array"],
)
def test_an_out_that_does_not_fit_is_refused_before_any_read(given: Given, out: Any, path: Path) -> None:
    with RowStore(path) as store:
        with pytest.raises(ConfigError, match=r"^out is a"):
            store.gather(given([1, 2, 3]), out=out)
        assert store.stats().read_count == 0


DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf support|torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.int16, torch.uint8, torch.float32, torch.complex64], ids=str)
def test_no_other_dtype_is_taken_for_that_of_the_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.npy", torch.ones(4, 2, dtype=dtype))
    ids = torch.tensor([1, 3])
    with RowStore(tmp_path / "rows.npy") as store:
        for other in DTYPES:
            try:
                out = torch.empty(2, 2, dtype=other)
            except (RuntimeError, TypeError, NotImplementedError):  # quantized: it needs a scale
                continue
            if other == dtype:
                assert torch.equal(store.gather(ids, out=out), torch.ones(2, 2, dtype=dtype))
            else:
                with pytest.raises(ConfigError, match="out is a contiguous tensor"):
                    store.gather(ids, out=out)


@ids_both_ways
def test_an_out_that_needs_a_gradient_is_refused(given: Given, tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.ones((4, 2), "f4"))
    out = torch.zeros(1, 2, requires_grad=True)
    with RowStore(tmp_path / "f.npy") as store:
        with pytest.raises(ConfigError, match="gradient"):
            store.gather(given([0]), out=out)
        with torch.no_grad():
            assert store.gather(given([0]), out=out) is out


@ids_both_ways
@pytest.mark.parametrize("left_bytes", [0, 100])
def test_an_out_whose_memory_was_given_back_is_refused(given: Given, left_bytes: int, path: Path) -> None:
    out = torch.zeros(4, 32, dtype=torch.int32)[1:]
    out.untyped_storage().resize_(left_bytes)
    with RowStore(path) as store, pytest.raises(ConfigError, match="given back"):
        store.gather(given([1, 2, 3]), out=out)


def test_a_device_of_the_caller_is_where_rows_go(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path) as store:
        assert torch.equal(store.gather([1], device="cpu"), rows[[1]])
        assert store.gather([1], device="meta").device.type == "meta"
        assert store.prefetch([1], device="meta").result().device.type == "meta"
        unique, inverse = store.gather_unique([1, 1], device="meta")
        assert unique.device == inverse.device == torch.device("meta")
        for device in ("nowhere", 3.5):
            with pytest.raises(ConfigError, match="device is"):
                store.gather([1], device=device)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(path: Path) -> None:
    with RowStore(path) as store:
        for call in (store.gather, store.prefetch, store.gather_unique):
            with pytest.raises(ConfigError, match="no CUDA device"):
                call([1], device="cuda")
        assert store.stats().read_count == 0


@pytest.mark.parametrize("ids", [[0, COUNT], [[-1]], [3, 1 << 40], [1.0], ["a"], None])
@pytest.mark.parametrize("name", ["gather", "gather_unique", "prefetch", "keep"])
def test_bad_ids_are_found_before_any_read(ids: Any, name: str, path: Path) -> None:
    with RowStore(path) as store:
        with pytest.raises(ConfigError, match=r"^ids"):
            getattr(store, name)(ids)
        assert store.stats().read_count == 0
        assert store.stats().row_count == 0


# --------------------------------------------------------------------------------------------------------- opening


def test_attributes_say_what_the_table_is(path: Path) -> None:
    with RowStore(path) as store:
        assert (store.row_count, len(store), store.row_shape, store.row_bytes) == (COUNT, COUNT, (32,), 128)
        assert store.dtype == torch.int32
        assert repr(store) == f"<RowStore {str(path)!r} (5000, 32) torch.int32>"
    assert repr(store).endswith(" closed>")


def test_an_interrupt_in_close_leaves_no_descriptor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a signal's handler, which runs when the native side has closed."""
    store = RowStore(path)
    [fd] = store._fds
    close = _native.RowStore.close

    def interrupted(native: _native.RowStore) -> None:
        close(native)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_native.RowStore, "close", interrupted)
        store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("source", "options", "error"),
    [
        ("missing.npy", {}, CheckpointNotFoundError),
        ("table", {"cache_bytes": -1}, ConfigError),
        ("table", {"cache_bytes": "much"}, ConfigError),
        ("table", {"cache_bytes": None}, ConfigError),
        ("table", {"ahead_bytes": 1.5}, ConfigError),
        ("table", {"queue_depth": 0}, ConfigError),
        ("table", {"queue_depth": 4097}, ConfigError),
        ("table", {"queue_depth": True}, ConfigError),
        ("table", {"engine": "abacus"}, ConfigError),
        ("table", {"engine": "null"}, ConfigError),
        ("table", {"tensor": "x"}, ConfigError),
        ("table", {"shape": (-1, 32), "dtype": torch.int32}, ConfigError),
        ("table", {"dtype": torch.float64}, ConfigError),
        ("short.npy", {}, FormatError),
        ("objects.npy", {}, UnsupportedError),
        (None, {}, ConfigError),
        (3, {}, ConfigError),
        ([], {}, ConfigError),
        ([None], {}, ConfigError),
        ([("a",)], {}, ConfigError),
        ([(1, "x")], {}, ConfigError),
    ],
    ids=repr,
)
def test_what_makes_no_sense_is_refused(
    source: Any, options: dict[str, Any], error: type[Exception], path: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "objects.npy", np.array([[object()]]), allow_pickle=True)
    (tmp_path / "short.npy").write_bytes(path.read_bytes()[:-1])
    given = path if source == "table" else tmp_path / source if isinstance(source, str) else source
    with leaks.no_leaks(), pytest.raises(error):
        RowStore(given, **options)


@pytest.mark.parametrize("name", ["cache_bytes", "ahead_bytes"])
def test_who_gives_another_word_reads_that_auto_is_one(name: str, path: Path) -> None:
    given: dict[str, Any] = {name: "automatic"}
    with pytest.raises(ConfigError, match=f'^{name} is \'automatic\'; .*"800MB", or "auto"'):
        RowStore(path, **given)


def test_rows_are_at_most_a_gibibyte(tmp_path: Path) -> None:
    with open(tmp_path / "wide", "wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(ConfigError, match="at most"):
        RowStore(tmp_path / "wide", shape=(-1, (1 << 30) + 1), dtype=torch.uint8)


def test_elements_may_be_taken_for_others_of_their_width(path: Path, rows: torch.Tensor) -> None:
    with RowStore(path, dtype=torch.float32) as store:
        assert torch.equal(store.gather([3]).view(torch.int32), rows[[3]])


@pytest.mark.parametrize(
    "engine", ["uring", "libaio", "threads", "uring-buffered", "libaio-buffered", "threads-buffered"]
)
def test_every_engine_that_is_named_reads(engine: str, path: Path, rows: torch.Tensor) -> None:
    try:
        store = RowStore(path, engine=engine, queue_depth=7, cache_bytes=50_000)
    except UnsupportedError as reason:
        pytest.skip(str(reason))
    with store:
        for count in (3, 500):
            ids = torch.randint(COUNT, (count,))
            assert torch.equal(store.gather(ids), rows[ids])
        assert store.stats().engine == engine


def test_a_table_in_the_page_cache_is_read_there(tmp_path: Path, rows: torch.Tensor) -> None:
    path = tmp_path / "t.npy"
    np.save(path, rows.numpy())
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if _native.cached_bytes(fd):
            pytest.skip("the page cache of this file system cannot be emptied")
        os.pread(fd, 1 << 20, 0)
        if not 2 * _native.cached_bytes(fd) > path.stat().st_size:
            pytest.skip("this file system does not tell what the page cache holds")
        with RowStore(path) as store:
            assert store.stats().engine.endswith("-buffered")
            assert torch.equal(store.gather([1]), rows[[1]])
    finally:
        os.close(fd)


def test_tmpfs_is_read_through_the_page_cache(rows: torch.Tensor) -> None:
    path = Path(f"/dev/shm/fastpersist-rows-{os.getpid()}.npy")
    try:
        np.save(path, rows.numpy())
    except OSError as reason:
        pytest.skip(str(reason))
    try:
        with RowStore(path) as store:
            assert torch.equal(store.gather(range(COUNT)), rows)
            assert store.stats().engine.endswith("-buffered")
    finally:
        path.unlink()


def test_the_working_directory_may_change(path: Path, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    store = RowStore(path.name)
    monkeypatch.chdir("/")
    call: Callable[..., Any] = store.__reduce__()[0]
    with store, call(*store.__reduce__()[1]) as again:
        assert torch.equal(again.gather([1, 2]), rows[[1, 2]])


# ------------------------------------------------------------------------------------- memory that is not as it looks


@pytest.mark.parametrize("is_packed", [False, True])
def test_out_may_share_memory_with_the_ids(tmp_path: Path, is_packed: bool) -> None:
    table, path = torch.arange(20_000, dtype=torch.int64).view(5000, 4) * 1000, tmp_path / "table.npy"
    with RowWriter(path, (4,), torch.int64) as writer:
        writer.append(table)
        if is_packed:
            writer.keep_positions(torch.arange(5000))
    shared = torch.zeros(16_000, dtype=torch.int64)
    ids = shared[:4000]
    with RowStore(path) as store:
        store.keep(range(5000))
        ids.copy_(torch.arange(4000))
        assert torch.equal(store.gather(ids, out=shared.view(4000, 4)), table[:4000])


@ids_both_ways
def test_out_has_the_values_as_they_are(given: Given, tmp_path: Path) -> None:
    write_rows(tmp_path / "complex.npy", torch.randn(10, 3, dtype=torch.complex64))
    write_rows(tmp_path / "real.npy", torch.randn(10, 3))
    conjugated = torch.empty(2, 3, dtype=torch.complex64).conj()
    negated = torch._neg_view(torch.empty(2, 3))
    for name, out in [("complex.npy", conjugated), ("real.npy", negated)]:
        with RowStore(tmp_path / name) as store, pytest.raises(ConfigError, match="only when it is read"):
            store.gather(given([1, 2]), out=out)


@ids_both_ways
def test_fake_tensors_have_no_memory_for_rows(given: Given, path: Path) -> None:
    with RowStore(path) as store:
        with FakeTensorMode():
            fake_ids, fake_out = torch.arange(2), torch.empty(1, *store.row_shape, dtype=store.dtype)
            with pytest.raises(ConfigError):
                store.gather(given([1]))
        with pytest.raises(ConfigError):
            store.gather(fake_ids)
        with pytest.raises(ConfigError):
            store.gather(given([1]), out=fake_out)


def test_rows_of_transforms_are_refused(path: Path) -> None:
    with RowStore(path) as store:
        ids = torch.tensor([1])
        with pytest.raises(ConfigError, match=r"torch\.func"):
            torch.func.functionalize(store.gather)(ids)
        with pytest.raises(ConfigError, match="no memory here"):  # the result's; these ids are plain
            torch.func.functionalize(lambda _: store.gather(ids))(torch.ones(1))
        with pytest.raises(ConfigError, match=r"torch\.func"):
            torch.func.vmap(lambda id_: store.gather(id_))(ids)
        for transform in (torch.func.functionalize, torch.func.grad):
            with pytest.raises(ConfigError):
                transform(lambda out: store.gather(ids, out=out).sum())(torch.ones(1, 32, dtype=torch.float32))


def test_compiled_code_calls_the_store(path: Path, rows: torch.Tensor) -> None:
    ids = torch.tensor([1, 2])
    with RowStore(path) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(lambda some: store.gather(some) + 1, backend="eager")
        assert torch.equal(compiled(ids), rows[ids] + 1)


def test_pieces_may_come_as_lists_or_from_a_generator(path: Path, rows: torch.Tensor) -> None:
    pieces: Any = [path, [str(path), "rows"]]
    with pytest.raises(ConfigError, match="tensor"):  # a .npy has no names
        RowStore(pieces)
    with RowStore(one for one in [path, path]) as store:
        again = pickle.loads(pickle.dumps(store))
        assert torch.equal(again.gather([COUNT + 3]), rows[3:4])
        again.close()


def test_an_engine_is_a_name(path: Path) -> None:
    engine: Any = None
    with pytest.raises(ConfigError, match="engine"):
        RowStore(path, engine=engine)


def test_a_table_replaced_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.npy"
    write_rows(path, torch.arange(6.0).view(3, 2))
    write_rows(tmp_path / "new.npy", torch.arange(12, dtype=torch.int16).view(3, 4))

    def open_slowly(*arguments: Any, **options: Any) -> RowSource:
        found = open_rows(*arguments, **options)
        (tmp_path / "new.npy").rename(path)
        return found

    monkeypatch.setattr(store_module, "open_rows", open_slowly)
    with pytest.raises(StorageError, match="was replaced or changed since its header was read"):
        RowStore(path)
    monkeypatch.undo()
    assert RowStore(path).gather([1]).tolist() == [[4, 5, 6, 7]]


def pinned_kibibytes() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmPin:")[2].split()[0])


@pytest.mark.parametrize(("row_bytes", "limit_kibibytes"), [(512, 6 << 10), (2 << 20, 0)])
def test_only_a_small_ring_is_pinned(tmp_path: Path, row_bytes: int, limit_kibibytes: int) -> None:
    write_rows(tmp_path / "rows.npy", torch.arange(3 * row_bytes, dtype=torch.int64).to(torch.uint8).view(3, -1))
    before = pinned_kibibytes()
    with RowStore(tmp_path / "rows.npy", cache_bytes=0) as rows:
        assert rows.gather(torch.tensor([2])).shape == (1, row_bytes)
        assert pinned_kibibytes() - before <= limit_kibibytes


def test_rows_do_not_overwrite_ids_that_lie_in_the_same_memory(path: Path, rows: torch.Tensor) -> None:
    memory = np.zeros(3 * rows[0].nbytes + 100, np.uint8)
    out = torch.from_numpy(memory[: 3 * rows[0].nbytes]).view(rows.dtype).view(3, *rows.shape[1:])
    for start in (40, 3 * rows[0].nbytes - 8):
        ids = torch.from_numpy(memory[start : start + 24]).view(torch.int64)  # another storage
        ids.copy_(torch.tensor([COUNT - 1, 7, 8]))
        with RowStore(path) as store:
            assert torch.equal(store.gather(ids, out=out), rows[[COUNT - 1, 7, 8]])
