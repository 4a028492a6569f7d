"""The environment's values are taken, and refused by name when they make no sense."""

from __future__ import annotations

import pytest

from fastpersist.config import Config, config
from fastpersist.errors import ConfigError

NAMES = ("FASTPERSIST_ENGINE", "FASTPERSIST_RING_BYTES", "FASTPERSIST_CHUNK_BYTES")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_64_mib_in_chunks_of_8() -> None:
    assert config() == Config(engine="auto", ring_bytes=64 << 20, chunk_bytes=8 << 20)


def test_environment_is_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", "threads")
    monkeypatch.setenv("FASTPERSIST_CHUNK_BYTES", "65536")
    monkeypatch.setenv("FASTPERSIST_RING_BYTES", "262144")
    assert config() == Config("threads", 262144, 65536)
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


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("text", ["", "64M", "1e6", "0x1000", "much"])
def test_what_is_no_whole_number_is_refused(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of bytes, not {text!r}"):
        config()


def test_values_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        config().ring_bytes = 1  # type: ignore[misc]
