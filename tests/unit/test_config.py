"""The values in force for a file: environment before tuning file before default, and refused by name when they make no
sense. A tuning file that nobody has named can do no harm.
"""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.forking import run_in_child

from fastpersist import _native
from fastpersist import config as config_module
from fastpersist.config import (
    TUNING_KEYS,
    Config,
    check_named_tuning,
    config,
    config_at,
    config_for,
    network,
    read_tuning,
    tuning_path,
)
from fastpersist.errors import ConfigError

NAMES = (
    "FASTPERSIST_ENGINE",
    "FASTPERSIST_RING_BYTES",
    "FASTPERSIST_CHUNK_BYTES",
    "FASTPERSIST_QUEUE_DEPTH",
    "FASTPERSIST_THREADS",
)
MIB = 1 << 20

EVERY_KEY = """
engine = "libaio"  # comments may stand anywhere
chunk_bytes = 4194304
queue_depth = 5
ring_bytes = 33554432
threads = 3
writers = 2
"""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No value is set, and tuning files are looked for below tmp_path."""
    for name in (*NAMES, "FASTPERSIST_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture
def directory_fd(tmp_path: Path) -> Iterator[int]:
    """A descriptor on the file system of tmp_path."""
    fd = os.open(tmp_path, os.O_PATH)
    yield fd
    os.close(fd)


@pytest.fixture
def found_file(tmp_path: Path, directory_fd: int) -> Path:
    """Where the tuning file of tmp_path's file system is looked for; its directory is there."""
    path = tuning_path(directory_fd)
    assert path is not None
    file = Path(path)
    assert file.parent == tmp_path / "home" / "fastpersist"
    file.parent.mkdir(parents=True)
    return file


@pytest.fixture
def warnings_of_ours(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(config_module, "_warned", {})
    caplog.set_level(logging.WARNING, logger="fastpersist")
    return lambda: [record.getMessage() for record in caplog.records]


# --- the environment


def test_defaults_are_64_mib_in_chunks_of_8() -> None:
    assert config() == Config(engine="auto", ring_bytes=64 << 20, chunk_bytes=8 << 20)


def test_environment_is_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("threads", "262144", "65536", "3", "2"), strict=True):
        monkeypatch.setenv(name, value)
    assert config() == Config("threads", 262144, 65536, 3, 2)
    monkeypatch.delenv("FASTPERSIST_ENGINE")
    assert config().engine == "auto"


@pytest.mark.parametrize("chunk_bytes", [1 << 16, 1 << 20, 1 << 30])
def test_powers_of_two_are_chunks(chunk_bytes: int) -> None:
    assert Config(ring_bytes=4 * chunk_bytes, chunk_bytes=chunk_bytes).chunk_bytes == chunk_bytes


@pytest.mark.parametrize("chunk_bytes", [-1, 0, 1, 4096, 1 << 15, (1 << 16) + 4096, 3 << 20, 1 << 31])
def test_other_chunks_are_refused(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_CHUNK_BYTES", str(chunk_bytes))
    monkeypatch.setenv("FASTPERSIST_RING_BYTES", str(8 * chunk_bytes))
    with pytest.raises(ConfigError, match=f"FASTPERSIST_CHUNK_BYTES must be a power of two .* not {chunk_bytes}$"):
        config()


@pytest.mark.parametrize("ring_bytes", [-(64 << 20), 0, 8 << 20, 24 << 20, (32 << 20) + 1, (64 << 20) - 4096])
def test_other_rings_are_refused(ring_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_RING_BYTES", str(ring_bytes))
    with pytest.raises(ConfigError, match=f"FASTPERSIST_RING_BYTES must be a multiple .* not {ring_bytes}$"):
        config()


@pytest.mark.parametrize("ring_bytes", [1 << 60, 1 << 65])
def test_a_ring_that_is_larger_than_the_memory_is_refused(ring_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_RING_BYTES", str(ring_bytes))
    with pytest.raises(ConfigError, match=f"FASTPERSIST_RING_BYTES is {ring_bytes}, more than this machine's memory"):
        config()


@pytest.mark.parametrize(("name", "low", "high"), [("QUEUE_DEPTH", 1, 4096), ("THREADS", 0, 1024)])
def test_numbers_beyond_the_limits_of_the_engines_are_refused(
    name: str, low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (low, high):
        monkeypatch.setenv(f"FASTPERSIST_{name}", str(value))
        config()
    for value in (low - 1, high + 1):
        monkeypatch.setenv(f"FASTPERSIST_{name}", str(value))
        with pytest.raises(ConfigError, match=f"FASTPERSIST_{name} must be from {low} to {high}, not {value}$"):
            config()


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("text", ["", "64M", "1e6", "0x1000", "much"])
def test_what_is_no_whole_number_is_refused(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    unit = " of bytes" if name.endswith("BYTES") else ""
    with pytest.raises(ConfigError, match=f"{name} must be a whole number{unit}, not {text!r}"):
        config()


def test_values_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        config().ring_bytes = 1  # type: ignore[misc]


# --- tuning files


def test_tuning_file_of_the_file_system_is_found(found_file: Path, directory_fd: int) -> None:
    assert config_for(directory_fd) == Config()
    found_file.write_text(EVERY_KEY)
    assert config_for(directory_fd) == Config("auto", 32 * MIB, 4 * MIB, 5, 3, 2, engine_wish="libaio")
    assert config() == Config()


def test_every_key_is_a_value_of_the_configuration() -> None:
    assert set(TUNING_KEYS) < set(Config.__dataclass_fields__)
    assert sorted(line.split(" = ")[0] for line in EVERY_KEY.split("\n") if line) == sorted(TUNING_KEYS)


def test_environment_goes_before_the_file_value_by_value(
    found_file: Path, directory_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_file.write_text(EVERY_KEY)
    for name, value in zip(NAMES, ("threads", str(128 * MIB), str(2 * MIB), "7", "1"), strict=True):
        before = config_for(directory_fd)
        monkeypatch.setenv(name, value)
        assert config_for(directory_fd) != before
    assert config_for(directory_fd) == Config("threads", 128 * MIB, 2 * MIB, 7, 1, 2)


def test_auto_in_the_environment_takes_the_wish_back(
    found_file: Path, directory_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_file.write_text(EVERY_KEY)
    monkeypatch.setenv("FASTPERSIST_ENGINE", "auto")
    found = config_for(directory_fd)
    assert (found.engine, found.engine_wish) == ("auto", "")


def test_file_systems_have_files_of_their_own(directory_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {tuning_path(directory_fd)}
    for number, name in ((0x58465342, "xfs"), (0x1234, "1234")):
        monkeypatch.setattr(_native, "filesystem_type", lambda fd, number=number: number)
        path = tuning_path(directory_fd)
        assert path is not None
        assert Path(path).name == f"{name}-{os.fstatvfs(directory_fd).f_fsid:016x}.toml"
        paths.add(path)
    with open("/proc/self/status") as file:  # another id
        paths.add(tuning_path(file.fileno()))
    assert len(paths) == 4


def test_path_that_is_not_there_yet_has_the_values_of_its_file_system(found_file: Path, tmp_path: Path) -> None:
    found_file.write_text("writers = 3")
    assert config_at(str(tmp_path / "not" / "there" / "yet")).writers == 3
    assert config_at("/proc/nothing").writers is None


@pytest.mark.parametrize("home", ["relative", ""])
def test_home_that_is_no_absolute_path_is_not_used(
    home: str, directory_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", home)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    path = tuning_path(directory_fd)
    assert path is not None
    assert Path(path).parent == tmp_path / "me" / ".config" / "fastpersist"


def test_nobodys_home_holds_no_file(directory_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "nowhere")
    assert tuning_path(directory_fd) is None
    assert config_for(directory_fd) == Config()


def test_named_file_counts_for_every_file_system(
    found_file: Path, directory_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_file.write_text(EVERY_KEY)
    named = tmp_path / "named.toml"
    named.write_text("queue_depth = 6")
    monkeypatch.setenv("FASTPERSIST_CONFIG", str(named))
    assert config_for(directory_fd) == config_at("/proc/x") == Config(queue_depth=6)
    monkeypatch.setenv("FASTPERSIST_CONFIG", "")
    assert config_for(directory_fd) == Config()


def test_python_without_a_toml_reader_takes_the_one_we_depend_on(
    found_file: Path, directory_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = types.ModuleType("tomli")
    toml.loads = lambda text: {"queue_depth": len(text)}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tomli", toml)
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    found_file.write_text("12345")
    assert config_for(directory_fd).queue_depth == 5


# --- each change is seen, and nothing is read twice


def test_file_is_read_once_and_again_when_it_has_changed(
    found_file: Path, directory_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = config_module._read
    monkeypatch.setattr(config_module, "_read", lambda path, signature: reads.append(path) or read(path, signature))
    found_file.write_text("queue_depth = 2")
    for _ in range(3):
        assert config_for(directory_fd).queue_depth == 2
    assert len(reads) == 1
    new = found_file.with_name("new")
    new.write_text("queue_depth = 3")  # as long as the old one
    new.replace(found_file)
    for _ in range(3):
        assert config_for(directory_fd).queue_depth == 3
    assert len(reads) == 2
    found_file.unlink()
    assert config_for(directory_fd).queue_depth is None
    assert len(reads) == 2


def test_threads_and_forked_children_read_what_is_there(found_file: Path, directory_fd: int) -> None:
    found_file.write_text("queue_depth = 1")
    wanted = list(range(1, 40))

    def look(_number: int) -> bool:
        return all(config_for(directory_fd).queue_depth in wanted for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        looks = pool.map(look, range(8))
        for depth in wanted:
            new = found_file.with_name("new")
            new.write_text(f"queue_depth = {depth}")
            new.replace(found_file)
        assert all(looks)

    def work(_report: object) -> None:
        assert config_for(directory_fd).queue_depth == wanted[-1]
        found_file.write_text("queue_depth = 77")
        assert config_for(directory_fd).queue_depth == 77

    run_in_child(work)
    assert config_for(directory_fd).queue_depth == 77


# --- files that cannot be used

DAMAGED = {
    "no TOML": b"engine = ",
    "no text": b"\xff\xfe",
    "another key": b"buffer_count = 7",
    "another engine": b'engine = "warp"',
    "the engine that saves nothing": b'engine = "null"',
    "an engine of tests": b'engine = "fault:threads"',
    "a number as an engine": b"engine = 3",
    "a text as a number": b'queue_depth = "8"',
    "a truth as a number": b"threads = true",
    "a fraction": b"queue_depth = 1.5",
    "a list as an engine": b"engine = ['threads']",
    "too much": b"#" * (1 << 17),
    "a table": b"[writers]\ncount = 2",
    "a key of older versions": b"gpudirect = true",
    "another one of them": b'cufile_api = "batch"',
    "an engine for those who name it": b'engine = "cufile"',
    "an odd chunk": b"chunk_bytes = 3000000",
    "an odd ring": b"ring_bytes = 3000000",
    "a ring larger than the memory": b"ring_bytes = 1152921504606846976",
    "no depth": b"queue_depth = 0",
    "no writers": b"writers = 0",
    "a bottomless list": b"engine = " + b"[" * 60000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_file_that_was_found_is_warned_of_once_and_left_out(
    content: bytes, found_file: Path, directory_fd: int, warnings_of_ours: Callable[[], list[str]]
) -> None:
    found_file.write_bytes(content)
    for _ in range(3):
        assert config_for(directory_fd) == Config()
    (message,) = warnings_of_ours()
    assert str(found_file) in message


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_file_that_was_named_is_refused(
    content: bytes, directory_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named.toml"
    named.write_bytes(content)
    monkeypatch.setenv("FASTPERSIST_CONFIG", str(named))
    for look in (check_named_tuning, lambda: config_for(directory_fd), lambda: config_at(str(tmp_path))):
        with pytest.raises(ConfigError, match=r"FASTPERSIST_CONFIG names .*named\.toml, which cannot be used"):
            look()
    with pytest.raises(ConfigError, match=r"named\.toml cannot be used"):
        read_tuning(str(named))


def test_named_file_has_to_be_there(directory_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match=r"nowhere\.toml, which cannot be read"):
        config_for(directory_fd)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_what_is_no_file_keeps_nobody_waiting(
    make: Callable[[Path], None], found_file: Path, directory_fd: int, warnings_of_ours: Callable[[], list[str]]
) -> None:
    make(found_file)
    assert config_for(directory_fd) == Config()
    assert len(warnings_of_ours()) == 1


def test_ring_and_chunk_of_the_file_that_do_not_fit_the_environment_are_left_out(
    found_file: Path,
    directory_fd: int,
    monkeypatch: pytest.MonkeyPatch,
    warnings_of_ours: Callable[[], list[str]],
) -> None:
    found_file.write_text(EVERY_KEY)
    monkeypatch.setenv("FASTPERSIST_CHUNK_BYTES", str(16 * MIB))  # fits the default ring, not the file's
    found = config_for(directory_fd)
    assert (found.ring_bytes, found.chunk_bytes) == (64 * MIB, 16 * MIB)
    assert (found.queue_depth, found.threads, found.writers, found.engine_wish) == (5, 3, 2, "libaio")
    (message,) = warnings_of_ours()
    assert "does not fit the environment" in message
    monkeypatch.setenv("FASTPERSIST_CONFIG", str(found_file))
    with pytest.raises(ConfigError, match="does not fit the environment"):
        config_for(directory_fd)


# --- how ranks connect


def test_ports_are_one_or_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTPERSIST_PORTS", raising=False)
    monkeypatch.delenv("FASTPERSIST_INTERFACE", raising=False)
    assert network() == (range(1), "")
    monkeypatch.setenv("FASTPERSIST_PORTS", "20000-20100")
    monkeypatch.setenv("FASTPERSIST_INTERFACE", "ib0")
    assert network() == (range(20000, 20101), "ib0")
    monkeypatch.setenv("FASTPERSIST_PORTS", "65535")
    assert network().ports == range(65535, 65536)


@pytest.mark.parametrize("text", ["0", "20100-20000", "1-65536", "a-b", "-5", "5-", "1-2-3", " 1"])
def test_other_ports_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_PORTS", text)
    with pytest.raises(ConfigError, match="FASTPERSIST_PORTS"):
        network()
