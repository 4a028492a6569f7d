"""The examples of examples/file_access: each moves the right bytes, notices wrong ones, and says why it is left out."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fastpersist as fp

FOLDER = Path(__file__).parents[2] / "examples" / "file_access"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*_tensor.py"))
CPU_EXAMPLES = [name for name in EXAMPLES if "_cpu_" in name]
GPU_EXAMPLES = [name for name in EXAMPLES if "_gpu_" in name]
LEFT_OUT = 77

RunHere = Callable[..., None]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """Give the module that the examples share, in this process, to be tampered with."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module("command_line")
    for name in ("command_line", "run_all"):
        sys.modules.pop(name, None)


@pytest.fixture
def run_here(shared: ModuleType, monkeypatch: pytest.MonkeyPatch) -> RunHere:
    def run_one(name: str, *words: object) -> None:
        path = str(FOLDER / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, words)])
        runpy.run_path(path, run_name="__main__")

    return run_one


# --- as they are


def test_each_way_loads_and_stores() -> None:
    ways = {(name.split("_")[0], name.split("_")[2]) for name in EXAMPLES}
    assert ways == {("py", "cpu"), ("ring", "cpu"), ("py", "gpu"), ("ring", "gpu"), ("gds", "gpu")}
    assert EXAMPLES == sorted(f"{way}_{verb}_{kind}_tensor" for way, kind in ways for verb in ("load", "store"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_moves_the_bytes_or_says_in_one_line_why_it_cannot(
    name: str, run_here: RunHere, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In this process; that each is a program of its own, with the same ends, is seen by run_all."""
    code = 0
    try:
        run_here(name, "--size-mb", 3, "--loop", 2, "--validate")
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert not list(tmp_path.iterdir()), "an example cleans up after itself"
    if name.startswith("gds_"):
        line = "left out: fp.TensorFile does not use GPUDirect; fp.save and fp.load do, with engine='cufile'\n"
        assert (code, said.out, said.err) == (LEFT_OUT, "", line)
    elif "_gpu_" in name and not torch.cuda.is_available():
        assert (code, said.out, said.err) == (LEFT_OUT, "", "left out: this torch sees no GPU\n")
    else:
        assert (code, said.err) == (0, "")
        line, how = said.out.splitlines()
        assert re.fullmatch(rf"{name}: median \S+ GB/s, \S+–\S+ \(2 times 3 MiB, all bytes compared\)", line)
        assert how.startswith("reads were " if "_load_" in name else "into a new file each time, made durable")


def test_run_all_prints_a_row_for_each_with_its_numbers_or_its_reason(
    shared: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With an example of each kind and each end: each is a process that imports torch."""
    run_all = importlib.import_module("run_all")
    assert sorted(run_all.EXAMPLES) == EXAMPLES
    few = ("py_load_cpu_tensor", "ring_store_cpu_tensor", "ring_load_gpu_tensor", "gds_store_gpu_tensor")
    monkeypatch.setattr(run_all, "EXAMPLES", few)
    monkeypatch.setattr(sys, "argv", ["run_all.py", str(tmp_path), "--size-mb", "2", "--loop", "1", "--validate"])
    assert run_all.main() == 0
    said = capsys.readouterr()
    assert said.err == "round 1 of 1\n"
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.split()[0] in EXAMPLES}
    assert tuple(rows) == few
    for name, row in rows.items():
        if name.startswith("gds_") or ("_gpu_" in name and not torch.cuda.is_available()):
            assert "left out: " in row
        else:
            assert re.fullmatch(rf"{name} +\d+\.\d\d +\d+\.\d\d–\d+\.\d\d *", row)
    assert re.search("^loads: (cold|NOT COLD): ", said.out, re.MULTILINE)
    assert re.search("^stores: .* durable within the time", said.out, re.MULTILINE)
    assert re.search("^bytes: compared; the ring's engine: [a-z-]+$", said.out, re.MULTILINE)
    assert not list(tmp_path.iterdir())


# --- with something else in the place of a GPU


@pytest.mark.parametrize("name", GPU_EXAMPLES)
def test_the_lines_for_a_gpu_move_the_right_bytes_with_host_memory_in_its_place(
    name: str, shared: ModuleType, run_here: RunHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared.Command, "gpu", lambda _: torch.device("cpu"))
    monkeypatch.setattr(shared, "GPUDIRECT", "threads")
    size_mb = 104 if name.startswith("ring_") else 5  # these take parts of 32 MiB, and two buffers by turns
    file = ["--file", tmp_path / "file"] if "_store_" in name else []
    run_here(name, "--size-mb", size_mb, "--loop", 2, "--validate", *file)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [size_mb << 20 for _ in file[1:]]


# --- what is noticed


@pytest.mark.parametrize("name", CPU_EXAMPLES)
def test_one_damaged_byte_is_noticed_and_ends_with_1(
    name: str, shared: ModuleType, run_here: RunHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare = shared.compare

    def damage_and_compare(path: Path, tensor: torch.Tensor) -> None:
        if "_load_" in name:
            tensor[-1] ^= 1
        else:
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(bytes([int(tensor[-1]) ^ 1]))
        compare(path, tensor)

    monkeypatch.setattr(shared, "compare", damage_and_compare)
    run_here(name, "--size-mb", 1)  # nothing is compared: nothing is noticed
    with pytest.raises(SystemExit, match=r"^wrong bytes: byte 1048575 of .* is \d+ in the file, \d+ in the tensor$"):
        run_here(name, "--size-mb", 1, "--validate")  # a text as its code: Python prints it, and ends with 1
    assert not list(tmp_path.iterdir())


def test_damage_behind_the_first_piece_of_the_comparison_is_found_where_it_is(
    shared: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PIECE_BYTES", 4096)
    shared.make_file(tmp_path / "file", 10_000)
    tensor = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.uint8)
    shared.compare(tmp_path / "file", tensor)
    tensor[9_001] ^= 8
    with pytest.raises(SystemExit, match=r"^wrong bytes: byte 9001 of"):
        shared.compare(tmp_path / "file", tensor)
    os.truncate(tmp_path / "file", 9_000)
    with pytest.raises(SystemExit, match="ends at byte 9000, and the tensor has 10000"):
        shared.compare(tmp_path / "file", tensor)


def test_a_load_that_reads_nothing_the_second_time_is_noticed(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = fp.TensorFile.read, []

    def read_once(file: fp.TensorFile, tensor: torch.Tensor, offset_bytes: int = 0) -> int:
        calls.append(offset_bytes)
        return read(file, tensor, offset_bytes) if len(calls) == 1 else tensor.nbytes

    monkeypatch.setattr(fp.TensorFile, "read", read_once)
    with pytest.raises(SystemExit, match=r"^wrong bytes: "):
        run_here("ring_load_cpu_tensor", "--size-mb", 1, "--loop", 2, "--validate")
    assert len(calls) == 2


def test_a_store_that_leaves_too_much_or_nothing_is_noticed(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    for size_bytes in (0, (1 << 20) + 1):
        monkeypatch.setattr(fp.TensorFile, "sync", lambda file, size_bytes=size_bytes: file.truncate(size_bytes))
        with pytest.raises(SystemExit, match=f"has {size_bytes} bytes, not 1048576$"):
            run_here("ring_store_cpu_tensor", "--size-mb", 1, "--validate")


def test_run_all_goes_on_after_an_example_that_fails_and_ends_with_1(
    shared: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_all = importlib.import_module("run_all")
    monkeypatch.setattr(run_all, "EXAMPLES", ("no_such_load_example", "py_load_cpu_tensor"))
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--size-mb", "1", "--loop", "2"])
    assert run_all.main() == 1
    said = capsys.readouterr().out
    assert re.search("^no_such_load_example +FAILED with 2: ", said, re.MULTILINE)
    assert re.search(r"^py_load_cpu_tensor +\d+\.\d\d ", said, re.MULTILINE)
    assert "bytes: not compared (--validate)" in said


# --- the command line


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("py_load_cpu_tensor", ["--file", "absent/file"], "--file absent/file: there is no directory absent"),
        ("ring_store_cpu_tensor", ["--file", "absent/file"], "--file absent/file: there is no directory absent"),
        ("run_all", ["absent"], "there is no directory absent"),
        ("ring_load_cpu_tensor", ["--file", "absent"], "there is no such file; without --file, one is made"),
        ("ring_load_cpu_tensor", ["--file", "."], "there is no such file"),
        ("py_load_cpu_tensor", ["--file", "mine", "--size-mb", "1"], "it has 5 bytes, less than --size-mb"),
        ("py_load_cpu_tensor", ["--file", "empty"], "it has 0 bytes"),
        ("py_store_cpu_tensor", ["--file", "mine"], "it exists; a new file is stored, and nothing replaced"),
        ("py_store_cpu_tensor", ["--file", "dangling"], "it exists"),
        ("py_store_cpu_tensor", ["--size-mb", "0"], "0 is less than 1"),
        ("run_all", ["--loop", "x"], "invalid positive value: 'x'"),
    ],
)
def test_a_wrong_command_line_is_said_so_and_nothing_is_touched(
    name: str, words: list[str], message: str, run_here: RunHere, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_bytes(b"bytes")
    (tmp_path / "empty").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(SystemExit) as ended:
        run_here(name, *words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "empty", "mine"]
    assert (tmp_path / "mine").read_bytes() == b"bytes"


@pytest.mark.parametrize("way", ["py", "ring"])
def test_a_file_that_is_named_is_kept_and_loaded_by_the_other_way(
    way: str, run_here: RunHere, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(f"{way}_store_cpu_tensor", "--file", "kept", "--size-mb", 2, "--loop", 2, "--validate")
    with (tmp_path / "kept").open("ab") as file:
        file.write(b"and 17 more bytes")
    stored = (tmp_path / "kept").read_bytes()
    other = "ring" if way == "py" else "py"
    run_here(f"{other}_load_cpu_tensor", "--file", "kept", "--loop", 1, "--validate")  # all of it, an odd number
    run_here(f"{other}_load_cpu_tensor", "--file", "kept", "--loop", 1, "--validate", "--size-mb", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_bytes() == stored
    assert "(1 times 2.00002 MiB, all bytes compared)" in capsys.readouterr().out


# --- what is said of the conditions


def test_a_file_that_stays_in_the_page_cache_is_not_called_cold(
    run_here: RunHere, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm, whose files are in the page cache and nowhere else")
    path = Path(f"/dev/shm/file-access-{os.getpid()}")
    path.write_bytes(bytes(1 << 20))
    try:
        run_here("py_load_cpu_tensor", "--file", path, "--loop", 1)
    finally:
        path.unlink()
    assert "NOT COLD: up to 1.0 MiB of the file stayed in the page cache" in capsys.readouterr().out


def test_where_memory_cannot_be_locked_other_memory_is_taken_and_that_is_said(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise fp.StorageError(12, "no more than 8 MiB may be locked")

    monkeypatch.setattr(fp, "locked_tensor", refuse)
    run_here("ring_load_cpu_tensor", "--size-mb", 1, "--validate")
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "in memory that is not locked: no more than 8 MiB may be locked"
