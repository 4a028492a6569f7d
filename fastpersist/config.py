"""The tunables of the process: defaults, and the only place that reads the environment.

FASTPERSIST_ENGINE       what engine="auto" means: an engine name, or "auto" (default)
FASTPERSIST_RING_BYTES   host memory for the ring, all transfers together (default 67108864 = 64 MiB)
FASTPERSIST_CHUNK_BYTES  bytes of one request to the kernel (default 8388608 = 8 MiB; a ring is at least 4)
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fastpersist.errors import ConfigError

__all__ = ["BLOCK_BYTES", "Config", "config"]

BLOCK_BYTES = 4096
"""Storages start on multiples of this in every file: legal for direct I/O on all common devices, one page."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Config:
    """The values in force; frozen, because the ring is allocated once.

    Args:
        engine: What `engine="auto"` resolves to; "auto" walks the ladder.
        ring_bytes: Host memory of the ring, a multiple of `chunk_bytes` and at least four of them.
        chunk_bytes: Size of one request, a power of two, 64 KiB … 1 GiB.
    """

    engine: str = "auto"
    ring_bytes: int = 64 * _MIB
    chunk_bytes: int = 8 * _MIB

    def __post_init__(self) -> None:
        if self.chunk_bytes & (self.chunk_bytes - 1) or not 1 << 16 <= self.chunk_bytes <= 1 << 30:
            raise ConfigError(
                f"FASTPERSIST_CHUNK_BYTES must be a power of two from 65536 to 1073741824, not {self.chunk_bytes}"
            )
        if self.ring_bytes % self.chunk_bytes or self.ring_bytes < 4 * self.chunk_bytes:
            raise ConfigError(
                f"FASTPERSIST_RING_BYTES must be a multiple of the chunk ({self.chunk_bytes} bytes) and at least "
                f"four chunks, not {self.ring_bytes}"
            )


def config() -> Config:
    """Read the configuration from the environment.

    Raises:
        ConfigError: A variable is set to something that is no legal value; the message names it.
    """
    return Config(
        engine=os.environ.get("FASTPERSIST_ENGINE", "auto"),
        ring_bytes=_integer("FASTPERSIST_RING_BYTES", 64 * _MIB),
        chunk_bytes=_integer("FASTPERSIST_CHUNK_BYTES", 8 * _MIB),
    )


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number of bytes, not {text!r}") from None
