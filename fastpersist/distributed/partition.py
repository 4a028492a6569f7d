"""Decides which ranks write, and which bytes of a shared file each writer owns: pure integers.

Large sources are *cut*: the whole blocks of each in the file, its interior, are divided among the writers. The
coordinator writes everything else. A writer's blocks are one range of the concatenated interiors, so the shares of two
writers differ by at most one block, and few sources are really cut. The CRCs of the parts are
combined here, too.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence

from fastpersist import _native
from fastpersist.config import BLOCK_BYTES
from fastpersist.errors import ConfigError, InternalError
from fastpersist.formats.byte_ranges import ByteRange, Extent
from fastpersist.formats.layout import align_up

__all__ = [
    "CUT_BYTES_MIN",
    "choose_writers",
    "combined_crcs",
    "common_block_bytes",
    "interior_of",
    "require_writers",
    "shard_of",
]

CUT_BYTES_MIN = 1 << 20
"""Smaller sources are not cut: their descriptors would cost more than their bytes."""

_AUTO_WRITER_COUNT_MAX = 8


def common_block_bytes(page_bytes: Iterable[int]) -> int:
    """Return the unit that two machines must not share: the larger of a block and the largest page of the machines.

    A network file system's client may write back a whole page of which only a part was written, and so undo another
    machine's write to the rest of the page. Machines of one run may have pages of 4, 16 and 64 KiB.

    Args:
        page_bytes: For each rank, the page size of its machine: a power of two.
    """
    return max([BLOCK_BYTES, *page_bytes])


def interior_of(offset_bytes: int, size_bytes: int, block_bytes: int) -> Extent:
    """Return the whole blocks of a source, counted from the source's start.

    Worked example: a source of 10,000 bytes at offset 4196 of the file, blocks of 4096: the first whole block starts
    at 8192, byte 3996 of the source; the last ends at 12288, so Extent(3996, 4096).

    Args:
        offset_bytes: The offset of the source in the file.
        size_bytes: The length of the source.
        block_bytes: The block size; every write is a multiple of it.
    """
    start = align_up(offset_bytes, block_bytes) - offset_bytes
    end = (offset_bytes + size_bytes) // block_bytes * block_bytes - offset_bytes
    return Extent.between(start, end) if end > start else Extent(0, 0)


def shard_of(interiors: Sequence[Extent], writer: int, writer_count: int, block_bytes: int) -> list[ByteRange]:
    """Return what one writer owns, in file order.

    Args:
        interiors: For each cut source, what `interior_of` returns; the index is the source in the result.
        writer: The number of the writer, 0 … writer_count - 1.
        writer_count: The number of writers, 1 or more.
        block_bytes: The block size; interiors are multiples of it.
    """
    ends = list(itertools.accumulate((interior.size_bytes for interior in interiors), initial=0))
    block_count = ends[-1] // block_bytes
    first = block_count * writer // writer_count * block_bytes
    end = block_count * (writer + 1) // writer_count * block_bytes
    ranges = []
    source = bisect.bisect_right(ends, first) - 1
    while source < len(interiors) and ends[source] < end:
        low, high = max(first, ends[source]), min(end, ends[source + 1])
        if low < high:
            ranges.append(ByteRange(source, interiors[source].offset_bytes + low - ends[source], high - low))
        source += 1
    return ranges


def require_writers(wanted: object) -> None:
    """Refuse what names no writers.

    Raises:
        ConfigError: It is none of "auto", "all", "node" or a number of ranks.
    """
    is_number = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1
    if not is_number and wanted not in ("auto", "all", "node"):
        raise ConfigError(f"writers must be 'auto', 'all', 'node' or a number of ranks, not {wanted!r}")


def choose_writers(wanted: str | int, nodes: Sequence[int], tuned_count: int | None = None) -> list[int]:
    """Return the ranks that write cut bytes, in order; rank 0 is always one of them.

    Args:
        wanted: "all"; "node": the first rank of each node; a number: so many, spread over the nodes; "auto": on one
            node all ranks up to 8, or up to `tuned_count`, else one of each node.
        nodes: For each rank, the number of its node.
        tuned_count: How many writers of one node were found to be best; the same on all ranks.

    Raises:
        ConfigError: `wanted` is none of these.
    """
    require_writers(wanted)
    count = len(nodes)
    first_ranks = [rank for rank in range(count) if nodes[rank] not in nodes[:rank]]
    if wanted == "all":
        return list(range(count))
    if wanted == "node":
        return first_ranks
    if wanted == "auto":
        most = tuned_count or _AUTO_WRITER_COUNT_MAX
        return list(range(min(count, most))) if len(first_ranks) == 1 else first_ranks
    # One of each node, then the second of each, and so on.
    turns: list[tuple[int, int]] = []
    seen: dict[int, int] = {}
    for rank, node in enumerate(nodes):
        turns.append((seen.get(node, 0), rank))
        seen[node] = seen.get(node, 0) + 1
    return sorted(rank for _, rank in sorted(turns)[: int(wanted)])


def combined_crcs(sizes: Sequence[int], parts: Iterable[tuple[ByteRange, int]]) -> list[int]:
    """Return the CRC of each source: 0 where its parts have none.

    Args:
        sizes: The sizes of the sources, in bytes.
        parts: Byte ranges that cover the sources, in any order, each with its CRC.

    Raises:
        InternalError: A source is not covered.
    """
    runs: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
    for part, crc in parts:
        runs[part.source].append((part.from_bytes, part.size_bytes, crc))
    crcs = []
    for source, (found, size_bytes) in enumerate(zip(runs, sizes, strict=True)):
        combined = _native.combine_runs(found, size_bytes)
        if combined is None:
            raise InternalError(f"source {source} is not covered by the parts that the ranks have")
        crcs.append(combined)
    return crcs
