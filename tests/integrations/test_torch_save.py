"""Installed, torch.save does what torch's own does: same contents, same errors and warnings, for every way to call it.

Each case is one call, made twice, with torch's own functions and with ours, and the outcomes are compared.
"""

from __future__ import annotations

import copyreg
import errno
import gzip
import io
import os
import pathlib
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import run_in_child
from support.sameness import assert_same
from support.torch_save_calls import (
    FUNCTION_PICKLE,
    STOCK_LOAD,
    STOCK_SAVE,
    Outcome,
    is_ours,
    outcome,
    registered_device,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

import fastpersist as fp
from fastpersist.integrations.torch_save import TorchStorageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning"),
]

Case = Callable[[], Any]


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # so that messages name the same paths
    yield
    assert (torch.save, torch.load) == (STOCK_SAVE, STOCK_LOAD)
    assert (torch.serialization.save, torch.serialization.load) == (STOCK_SAVE, STOCK_LOAD)


def state() -> dict[str, Any]:
    return {"weight": torch.arange(3000.0), "step": 7, "text": "é", "tied": [torch.ones(3)] * 2}


def weight() -> torch.Tensor:
    return torch.arange(20.0)


# --------------------------------------------------------------------------------------------- saving

OURS: dict[str, Case] = {}
"""Calls of torch.save that we do."""

THEIRS: dict[str, Case] = {}
"""Those that we pass on."""


def ours(call: Case) -> Case:
    OURS[call.__name__] = call
    return call


def theirs(call: Case) -> Case:
    THEIRS[call.__name__] = call
    return call


class OwnPathLike:
    def __init__(self, path: Any) -> None:
        self._path = path

    def __fspath__(self) -> Any:
        return self._path


class OwnPath(type(Path())):  # type: ignore[misc]
    """A subclass of a path class."""


class OwnStr(str):
    """A subclass of str."""


class Writer:
    """The least that torch.save takes as a file."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)

    def flush(self) -> None:
        pass


for number, path in enumerate(
    [
        "x.pt",
        "x.safetensors",
        "two.suffixes.pt",
        "no_suffix",
        "ünï–文.pt",
        "not utf-8 \udcff.pt",
        "spaces and\ttabs.pt",
        "~tilde.pt",
        "./here.pt",
        "n" * 255,
        OwnStr("own.pt"),
        Path("path.pt"),
        OwnPath("own_path.pt"),
        pathlib.PurePosixPath("pure.pt"),
        OwnPathLike("like.pt"),
    ]
):
    OURS[f"path_{number}"] = lambda path=path: torch.save(state(), path)

for number, path in enumerate(
    [
        "",
        ".pt",
        "directory",
        "directory/",
        "directory/.pt",
        ".",
        "..",
        "/",
        "missing/x.pt",
        "missing/ü.pt",
        "x.pt/",
        "n" * 256,
        "nul\0byte.pt",
        "back\\slash.pt",
        "loop.pt",
        "/proc/x.pt",
        "/sys/x.pt",
        "/dev/full",
        b"bytes.pt",
        OwnPathLike(b"bytes.pt"),
        OwnPathLike(5),
        Path("missing/x.pt"),
        None,
        5,
        object(),
    ]
):
    THEIRS[f"path_{number}"] = lambda path=path: torch.save(state(), path)


@ours
def positional() -> None:
    torch.save(state(), "x.pt", pickle, 2, True, False)


@ours
def by_name() -> None:
    torch.save(obj=state(), f="x.pt", pickle_module=pickle, pickle_protocol=2, _use_new_zipfile_serialization=True)


@ours
def from_its_module() -> None:
    torch.serialization.save(state(), "x.pt")


@ours
def over_an_older_file() -> None:
    STOCK_SAVE(torch.zeros(100_000), "x.pt")
    os.chmod("x.pt", 0o640)
    torch.save(state(), "x.pt")
    assert os.stat("x.pt").st_mode & 0o777 == 0o640


@ours
def through_a_link() -> None:
    os.symlink("target.pt", "link.pt")
    torch.save(state(), "link.pt")
    assert os.readlink("link.pt") == "target.pt"
    torch.save(state(), "link.pt")


@ours
def without_checksums() -> list[int]:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile("x.pt") as archive:
        return [record.CRC for record in archive.infolist() if "data/" in record.filename]


@ours
def with_a_smaller_alignment_asked_for() -> None:
    with config.patch({"save.storage_alignment": 512}):
        torch.save(state(), "x.pt")


@ours
def of_tensors_of_a_registered_device() -> None:
    with registered_device():
        torch.save({"own": torch.ones(3)}, "x.pt")


@ours
def inside_no_grad_and_a_default_device() -> None:
    with torch.no_grad(), torch.device("meta"):
        torch.save({"meta": torch.ones(3), "cpu": torch.ones(3, device="cpu")}, "x.pt")


@ours
def of_tensors_with_hooks() -> None:
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_hook(backward_hook)
    with pytest.warns(UserWarning, match="backward hook "):
        torch.save(tensor, "x.pt")


def backward_hook(gradient: torch.Tensor) -> None:
    pass


@ours
def of_one_row_of_a_large_tensor() -> None:
    torch.save(torch.ones(1000, 300)[3], "x.pt")


@ours
def of_huge_strides() -> None:
    torch.save(torch.zeros(20_000).as_strided((2, 2), (10_000, 5_000)), "x.pt")


@ours
def with_a_reducer_of_the_users_own() -> None:
    copyreg.pickle(Special, lambda special: (Special, ()))
    try:
        torch.save([Special()], "x.pt")
    finally:
        del copyreg.dispatch_table[Special]


class Special:
    """Something for which the user has registered a reducer."""


@ours
def what_cannot_be_pickled() -> None:
    torch.save({"weight": weight(), "function": lambda: 0}, "x.pt")


@ours
def one_memory_as_two_types() -> None:
    bits = torch.arange(4.0)
    torch.save([bits, bits.view(torch.int32)], "x.pt")


@ours
def what_fails_when_it_is_pickled_which_happens_once() -> None:
    calls = []

    class Failing:
        def __reduce__(self) -> Any:
            calls.append(1)
            raise TorchStorageError(errno.EROFS, "on purpose")

    try:
        torch.save([weight(), Failing()], "x.pt")
    finally:
        assert len(calls) == 1


@ours
def what_fails_when_it_is_pickled() -> None:
    class Failing:
        def __reduce__(self) -> Any:
            raise LookupError("on purpose")

    torch.save([weight(), Failing()], "x.pt")


@theirs
def to_hard_links() -> None:
    STOCK_SAVE(torch.zeros(3), "x.pt")
    os.link("x.pt", "other_name.pt")
    torch.save(state(), "x.pt")


@theirs
def to_a_temporary_file_that_is_open() -> Any:
    with tempfile.NamedTemporaryFile() as file:
        torch.save(torch.zeros(5), file.name)
        torch.save(weight(), file.name)
        return STOCK_LOAD(file)


@theirs
def to_a_descriptor_that_is_open() -> Any:
    fd = os.open("x.pt", os.O_WRONLY | os.O_CREAT)
    torch.save(weight(), "x.pt")
    assert os.fstat(fd).st_size > 80
    os.close(fd)


@ours
def over_a_file_that_is_being_read() -> Any:
    STOCK_SAVE(torch.zeros(5), "x.pt")
    with open("x.pt", "rb"):
        torch.save(weight(), "x.pt")


@ours
def over_a_file_that_is_mapped() -> Any:
    STOCK_SAVE(torch.zeros(5), "x.pt")
    zeros = STOCK_LOAD("x.pt", mmap=True)
    torch.save(torch.ones(5), "x.pt")
    return zeros.shape


@theirs
def to_a_device() -> None:
    torch.save(state(), "/dev/null")


@theirs
def to_an_open_file() -> None:
    with open("x.pt", "wb") as file:
        torch.save(state(), file)
        torch.save(weight(), file)


@theirs
def to_memory() -> bytes:
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    return buffer.getvalue()


@theirs
def to_an_own_writer() -> bytes:
    writer = Writer()
    torch.save(state(), writer)
    return bytes(writer.data)


@theirs
def to_a_compressing_file() -> None:
    with gzip.GzipFile("x.gz", "wb", mtime=0) as file:
        torch.save(state(), file)


@theirs
def to_a_text_file() -> None:
    with open("x.pt", "w") as file:
        torch.save(state(), file)


@theirs
def to_a_closed_file() -> None:
    with open("x.pt", "wb") as file:
        pass
    torch.save(state(), file)


@theirs
def with_a_pickle_module_that_can_more() -> None:
    torch.save({"function": lambda: 5, "weight": weight()}, "x.pt", pickle_module=FUNCTION_PICKLE)


for protocol in (-1, 0, 3, 4, 5, 9):
    THEIRS[f"with_protocol_{protocol}"] = lambda protocol=protocol: torch.save(
        {"weight": weight()}, "x.pt", pickle_protocol=protocol
    )


WEIGHT = weight()


@theirs
def in_the_legacy_format() -> None:
    torch.save({"weight": WEIGHT}, "x.pt", _use_new_zipfile_serialization=False)  # holds the address of its storage


@theirs
def without_a_byte_order_record() -> None:
    torch.save(state(), "x.pt", _disable_byteorder_record=True)


@theirs
def without_data() -> None:
    with torch.serialization.skip_data():
        torch.save(weight(), "x.pt")
    os.truncate("x.pt", os.stat("x.pt").st_size)


@theirs
def without_data_in_the_legacy_format() -> None:
    with torch.serialization.skip_data():
        torch.save(weight(), "x.pt", _use_new_zipfile_serialization=False)


@theirs
def fake_tensors() -> None:
    with FakeTensorMode():
        torch.save(torch.ones(3), "x.pt")


@theirs
def fake_tensors_as_real_ones_without_data() -> None:
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(torch.ones(3), "x.pt")


@theirs
def with_a_larger_alignment_asked_for() -> None:
    with config.patch({"save.storage_alignment": 16384}):
        torch.save(state(), "x.pt")


@theirs
def with_unknown_options() -> None:
    torch.save(weight(), "x.pt", unknown=1)


@theirs
def without_arguments() -> None:
    torch.save()  # type: ignore[call-arg]


def made_files(call: Case, directory: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, dict[str, Path]]:
    """Make a call in a directory; return how it ended, and the files."""
    os.makedirs(f"{directory}/directory")
    os.symlink("loop.pt", f"{directory}/loop.pt")
    with monkeypatch.context() as patch:
        patch.chdir(directory)
        ended = outcome(call)
    return ended, {path.name: path for path in sorted(Path(directory).rglob("*")) if path.is_file()}


def contents(path: Path) -> Any:
    """Return what torch's own torch.load finds in a file, whatever its name."""
    with registered_device(), path.open("rb") as file:
        return STOCK_LOAD(file, weights_only=False)


@pytest.mark.parametrize("name", OURS)
def test_our_file_holds_what_torchs_own_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, stock_files = made_files(OURS[name], "stock", monkeypatch)
    with fp.installed():
        ended, files = made_files(OURS[name], "ours", monkeypatch)
    ended.assert_like(stock)
    if stock.error is not None:
        assert not files, "torch leaves half a file"
        return
    assert list(files) == list(stock_files)
    for file, stock_file in zip(files.values(), stock_files.values(), strict=True):
        assert is_ours(file)
        assert not is_ours(stock_file)
        assert_same(contents(file), contents(stock_file))


@theirs
def into_a_directory_that_is_called_tilde() -> None:
    os.mkdir("~")
    torch.save(weight(), "~/x.pt")
    assert_same(torch.load("~/x.pt"), weight())


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_passed_on_ends_as_torch_ends_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, stock_files = made_files(THEIRS[name], "stock", monkeypatch)
    with fp.installed():
        ended, files = made_files(THEIRS[name], "ours", monkeypatch)
    ended.assert_like(stock)
    assert [(name, file.read_bytes()) for name, file in files.items()] == [
        (name, file.read_bytes()) for name, file in stock_files.items()
    ]


def test_directory_that_may_not_be_written_is_no_obstacle_to_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(report: Callable[[int], None]) -> None:
        if os.geteuid() == 0:
            os.seteuid(65534)  # nobody
        for name in ("old.pt", "new.pt", "ü.pt"):
            expected = outcome(lambda name=name: STOCK_SAVE(weight(), name))
            for is_async in (False, True):
                with fp.installed(async_=is_async):
                    outcome(lambda name=name: torch.save(weight(), name)).assert_like(expected)
            assert (expected.error is None) == (name == "old.pt")
        assert_same(STOCK_LOAD("old.pt"), weight())

    with tempfile.TemporaryDirectory() as directory:  # tmp_path is below directories that nobody else may enter
        monkeypatch.chdir(directory)
        STOCK_SAVE(torch.zeros(3), "old.pt")
        os.chmod("old.pt", 0o666)
        os.chmod(directory, 0o555)
        run_in_child(work)
        monkeypatch.undo()
