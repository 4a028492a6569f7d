"""Rows, samples, and the rounds in which the samples are taken.

All rows take their turn in every round, so drift of a shared machine affects all alike. Each round has another order,
so that no row always follows the same neighbour.
"""

from __future__ import annotations

import gc
import random
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastpersist.transfer.progress import progress_bar

__all__ = ["Kind", "Measured", "Row", "Sample", "exit_code", "measure"]

Kind = Literal["ceiling", "fastpersist", "peer"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one row.

    Attributes:
        seconds: The time from the call until all is durable (saves) or all bytes are in memory (loads).
        size_bytes: Bytes that the rate counts.
        engine: The engine that moved them; empty where there is none.
    """

    seconds: float
    size_bytes: int
    engine: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Something to measure.

    Attributes:
        name: Unique in a table.
        kind: Which sort of row it is: the ceiling, ours, or another library's.
        run: Write a fresh file at a path, or read the one that is there, once. None: it cannot be run.
        suffix: Ending of the file it writes or reads.
        why_not: Why it cannot be run.
    """

    name: str
    kind: Kind
    run: Callable[[str], Sample] | None
    suffix: str = ".pt"
    why_not: str = ""


@dataclass(slots=True)
class Measured:
    """The result of a row. `note` says why there are no samples, or fewer than rounds."""

    row: Row
    note: str
    samples: list[Sample] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def median_s(self) -> float:
        """Median of the seconds; there must be a sample."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def bytes_per_s(self) -> float:
        """The rate of the median."""
        return self.samples[0].size_bytes / self.median_s

    def time_cells(self) -> list[str]:
        """Return the cells of a table for the median, the range of the seconds, and the rate in GB/s."""
        seconds = [sample.seconds for sample in self.samples]
        return [f"{self.median_s:.3f}", f"{min(seconds):.3f} – {max(seconds):.3f}", f"{self.bytes_per_s / 1e9:.2f}"]


def exit_code(results: Iterable[Measured]) -> int:
    """Return 1 if a row of fastpersist failed, else 0: nothing fails because a machine is slow, or lacks something."""
    return int(any(one.row.kind == "fastpersist" and one.note.startswith("failed") for one in results))


def measure(
    rows: Sequence[Row],
    round_count: int,
    *,
    before: Callable[[str], str],
    after: Callable[[], None],
) -> list[Measured]:
    """Run every row once per round.

    A row that fails is not run again, and its note says why; the others go on.

    Args:
        rows: The rows, in the order of the table.
        round_count: The number of samples per row, at least 1.
        before: Takes a row's suffix, prepares a run outside its time, and returns the path that the run gets.
        after: Clears away what a run left, whether it failed or not.
    """
    results = [Measured(row, row.why_not) for row in rows]
    order = random.Random(0)
    with progress_bar(total=len(rows) * round_count, desc="bench", unit="run", leave=False, disable=None) as progress:
        for _ in range(round_count):
            for result in order.sample(results, len(results)):
                progress.set_postfix_str(result.row.name)
                if result.row.run is not None and not result.note:
                    _run_once(result, result.row.run, before, after)
                progress.update()
    return results


def _run_once(
    result: Measured,
    run: Callable[[str], Sample],
    before: Callable[[str], str],
    after: Callable[[], None],
) -> None:
    gc.collect()  # what the last row left must not be collected in this one's time
    path = before(result.row.suffix)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peers, on how they are used; they are used as intended
            result.samples.append(run(path))
    except Exception as error:  # noqa: BLE001 - an error of any writer spoils its row, not the run
        result.note = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        after()
