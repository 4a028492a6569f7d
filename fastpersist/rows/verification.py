"""Verifies a table: reads all of it, and compares checksums.

A sidecar that does not fit is reported as damage here: our writer never leaves a table with another's sidecar, so
either the table was damaged, or another program has written it anew. `sidecar` has the CRCs, and the reading.
"""

from __future__ import annotations

import os
from dataclasses import replace

from fastpersist import _native
from fastpersist.arguments import local_path
from fastpersist.errors import ConfigError, CorruptionError
from fastpersist.formats import npy
from fastpersist.loading.checkpoint_file import CheckpointSource
from fastpersist.loading.file_inspection import Damage, VerifyReport, verify_source
from fastpersist.rows.sidecar import CHUNK_BYTES, Sidecar, chunk_crcs, read_positions, read_sidecar

__all__ = ["verify_rows"]

_DAMAGE_COUNT_MAX = 1000


def verify_rows(path: str | os.PathLike[str], *, engine: str = "auto") -> VerifyReport:
    """Read a table, and compare the CRC of each MiB with that in its sidecar.

    Args:
        path: The table's path: .npy, or safetensors. Without a sidecar, the CRCs in a safetensors header count, unless
            its rows are packed, which is damage; a .npy file without one has no checksums: only its header is checked.
        engine: "auto", or an engine's name, as in `save`.

    Returns:
        The report, as of `verify`; it is true if nothing is wrong. At most 1000 damages are listed.

    Raises:
        CheckpointNotFoundError: There is no such file.
        ConfigError, UnsupportedError: The engine, or the file, cannot be used.
        StorageError: An error of the disk.

    Thread safety: any thread.
    """
    name = local_path(path)
    with CheckpointSource(name) as source:
        try:
            facts = read_sidecar(name)
        except CorruptionError as error:
            return VerifyReport(name, (Damage(f"the sidecar is damaged: {error}"),), 0, False)
        if facts is None:
            return _without_sidecar(source, engine) if source.kind == "safetensors" else _parsed(source)
        if facts.file_bytes != source.size_bytes:
            said = f"the file has {source.size_bytes} bytes, its sidecar says {facts.file_bytes}"
            return VerifyReport(name, (Damage(said),), 0, True)
        damages = []
        if _native.crc32(source.read_at(0, facts.offset_bytes)) != facts.header_crc32:
            damages.append(Damage("the header is not the one that was written", offset_bytes=0))
        found = chunk_crcs(source.fd, name, facts.offset_bytes, facts.file_bytes, engine=engine)
        for index, (crc, recorded) in enumerate(zip(found, facts.crcs, strict=True)):
            if crc != recorded and len(damages) < _DAMAGE_COUNT_MAX:
                damages.append(_damaged_chunk(index, facts, f"their CRC is {crc:08x}, not {recorded:08x}"))
        if not damages:
            try:
                read_positions(source, facts.offset_bytes, facts.row_count)
            except CorruptionError as error:
                damages.append(Damage(str(error)))
        return VerifyReport(name, tuple(damages), facts.file_bytes, True)


def _without_sidecar(source: CheckpointSource, engine: str) -> VerifyReport:
    """Compare the CRCs in a safetensors header; a packed table needs its sidecar besides."""
    report = verify_source(source, engine=engine)
    if report.ok:
        try:
            read_positions(source, 0, 0)
        except CorruptionError as error:
            return replace(report, damages=(Damage(error.message),))
    return report


def _parsed(source: CheckpointSource) -> VerifyReport:
    """Check what can be checked of a .npy file without checksums."""
    if not npy.is_npy(source.read_at(0, min(8, source.size_bytes))):
        source.refuse_incomplete()
        raise ConfigError(f"{source.path} is {source.looks_like()}; tables with checksums are .npy or safetensors")
    try:
        npy.read_header(source.read_at, source.size_bytes, path=source.path)
    except CorruptionError as error:
        return VerifyReport(source.path, (Damage(error.message, offset_bytes=error.offset_bytes),), 0, False)
    return VerifyReport(source.path, (), 0, False)


def _damaged_chunk(index: int, facts: Sidecar, why: str) -> Damage:
    start_bytes = facts.offset_bytes + index * CHUNK_BYTES
    end_bytes = min(start_bytes + CHUNK_BYTES, facts.file_bytes)
    row_bytes = max(1, (facts.file_bytes - facts.offset_bytes) // max(1, facts.row_count))
    first, last = (at // row_bytes for at in (index * CHUNK_BYTES, end_bytes - facts.offset_bytes - 1))
    where = f"at the positions {first} to {last} (bytes {start_bytes} to {end_bytes - 1})"
    return Damage(f"some of the rows {where} are damaged: {why}", offset_bytes=start_bytes)
