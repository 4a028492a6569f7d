"""What is known of a run: the saves in its log of events, and the steps that are there, as their manifests say.

Logs and manifests are untrusted: figures that are not finite or out of range are dropped, and long texts are cut. The
number of saves, ranks and failures that are kept is bounded, so a log of any length takes bounded memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fastpersist.commit.directory_commit import committed_path
from fastpersist.commit.step_listing import candidate_steps, check_files, read_manifest
from fastpersist.errors import CheckpointNotFoundError, CorruptionError, StorageError
from fastpersist.events.event import Event
from fastpersist.formats.manifest import CheckpointManifest, step_name, writer_of

__all__ = ["DURATIONS", "Rank", "Run", "Save", "bytes_of", "is_sane", "read_run", "steps_there"]

DURATIONS = ("stall_s", "capture_s", "write_s", "sync_s", "commit_s")
_STEP_TIMES = ("step_s", "step_beside_save_s")

_SAVES_MAX = 100_000  # the last ones
_RANKS_MAX = 4096
_FAILURES_MAX = 50
_OPEN_MAX = 4096  # saves that have begun and not ended yet, of all ranks
_KEPT_MAX = 200_000
_TEXT_MAX = 400
_NUMBER_MAX = 1e18
_TIME_MAX_S = float(1 << 36)  # as in a manifest
_ENDS = ("committed", "failed", "skipped")


@dataclass(slots=True)
class Save:
    """A save of one rank, or a step of which only the manifest is left.

    Attributes:
        step: The step that is saved; -1 if the save has none.
        rank: The rank that reported the save.
        begun_s: When the save began, Unix time; 0.0 if not known.
        end_s: When the save ended, Unix time.
        kind: "committed", "failed" or "skipped".
        figures: Seconds, by the names of DURATIONS, "step_s" and "step_beside_save_s"; and bytes: "bytes",
            "bytes_by_writer", "bytes_at_gate" and "bytes_before_return".
        engine: The engine that wrote it.
    """

    step: int
    rank: int
    begun_s: float
    end_s: float
    kind: str
    figures: dict[str, float]
    engine: str

    def get(self, name: str) -> float | None:
        """Return a figure; None if it is not known."""
        return self.figures.get(name)

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Bytes by the time of writing and syncing; None if that is not known."""
        written_s = self.figures.get("write_s", 0.0) + self.figures.get("sync_s", 0.0)
        size = self.figures.get("bytes", 0.0)
        return size / written_s if written_s > 0 and size > 0 else None


@dataclass(slots=True)
class Rank:
    """What is added up of a rank.

    Attributes:
        save_count, stall_s, write_s, bytes: Sums over its saves.
        slowest_count: In how many steps it took the longest of all ranks to write and sync.
    """

    save_count: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    bytes: float = 0.0
    slowest_count: int = 0


@dataclass(slots=True)
class Run:
    """All that the report shows.

    Attributes:
        path: The root.
        has_log: Whether there are events; without them, only the steps that are still there are known.
        saves: The saves of rank 0, in the order in which they ended; the last 100,000.
        left_out_count: Earlier saves that are not among them.
        kept: For each change of the kept steps: the Unix time, the number of steps, and their bytes.
        failures: (Unix time, step, rank, message), the last 50.
        failure_count, skipped_count: The number of failed and of skipped saves, over all ranks.
        ranks: The sums for each rank, by rank; one entry for a run of one process.
        content_bytes: Bytes of the newest step, by what they belong to: "model", "optimizer", "rest".
        content_note: What content_bytes is of, or why it is empty.
        steps_there: The numbers of the steps that are there, in ascending order.
        disk_bytes_per_s: The disk's own rate; None if not known.
        disk_note: Where `disk_bytes_per_s` comes from.
    """

    path: str
    has_log: bool = False
    saves: list[Save] = field(default_factory=list)
    left_out_count: int = 0
    kept: list[tuple[float, int, float]] = field(default_factory=list)
    failures: list[tuple[float, int, int, str]] = field(default_factory=list)
    failure_count: int = 0
    skipped_count: int = 0
    ranks: dict[int, Rank] = field(default_factory=dict)
    content_bytes: dict[str, float] = field(default_factory=dict)
    content_note: str = ""
    steps_there: list[int] = field(default_factory=list)
    disk_bytes_per_s: float | None = None
    disk_note: str = ""


def is_sane(value: object, limit: float = _NUMBER_MAX) -> bool:
    """Tell whether a figure is a number from 0 to a limit."""
    return type(value) in (int, float) and 0 <= value <= limit  # type: ignore[operator]  # NaN is not


def steps_there(root: str) -> list[CheckpointManifest]:
    """Return the manifests of the committed steps, by step.

    Nothing is held meanwhile, which takes half of the time for thousands of steps: one that is removed at this moment
    is left out, as are damaged ones.

    Raises:
        StorageError: The root is no directory, or cannot be listed.
    """
    found = []
    for step in sorted(candidate_steps(root)):
        path = committed_path(root, step_name(step))
        if path is None:
            continue
        try:
            manifest = read_manifest(path)
            check_files(path, manifest)
        except (CorruptionError, StorageError, CheckpointNotFoundError):
            continue
        found.append(manifest)
    return found


def bytes_of(found: CheckpointManifest) -> int:
    """Return the bytes of all files of a step."""
    return sum(entry.size_bytes for entry in found.files)


def read_run(path: str, events: Iterable[Event], checkpoints: Iterable[CheckpointManifest]) -> Run:
    """Put a run together.

    Args:
        path: The root.
        events: The events, in the order of time.
        checkpoints: The manifests of the steps that are there, in ascending order of the step.
    """
    run = Run(path)
    found = _Log(run)
    for event in events:
        found.add(event)
    there = [one for one in checkpoints if one.step is not None]
    run.steps_there = [one.step for one in there if one.step is not None]
    known = {save.step for save in run.saves if save.kind == "committed"}
    missing = [_from_manifest(one) for one in there if one.step not in known]
    if missing:  # the log is younger than the run, or there is none
        run.saves = sorted([*run.saves, *missing], key=lambda save: save.end_s)
        if not run.has_log:
            _add_kept_of(run, there)
    found.finish()
    if not run.has_log or not any(rank.bytes for rank in run.ranks.values()):
        _add_ranks_of_files(run, there)
    return run


class _Log:
    """Adds events to a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._open: dict[tuple[int, int, str], float] = {}
        self._sizes: dict[int, float] = {}
        self._kept_bytes = 0.0
        self._slowest: dict[int, tuple[float, int]] = {}
        self._counts: Counter[int] = Counter()

    def add(self, event: Event) -> None:
        run = self._run
        if event.root is None or not is_sane(event.time_s, _TIME_MAX_S):
            return
        run.has_log = True
        step = -1 if event.step is None or not is_sane(event.step, 2.0**63) else event.step
        key = (event.rank, step, event.path)
        if event.kind == "save_begun":
            if len(self._open) >= _OPEN_MAX:
                self._open.pop(next(iter(self._open)))
            self._open[key] = event.time_s
        elif event.kind in _ENDS:
            self._end(event, step, self._open.pop(key, 0.0))
        elif event.kind == "removed" and event.rank == 0:
            self._change(event.time_s, step, None)

    def _end(self, event: Event, step: int, begun_s: float) -> None:
        run = self._run
        figures = {
            name: float(event.figures[name])
            for name in (*DURATIONS, *_STEP_TIMES, "bytes", "bytes_by_writer", "bytes_at_gate", "bytes_before_return")
            if is_sane(event.figures.get(name))
        }
        engine = str(event.figures.get("engine", ""))[:40]
        if event.kind == "failed":
            run.failure_count += 1
            run.failures.append((event.time_s, step, event.rank, str(event.figures.get("error", ""))[:_TEXT_MAX]))
            del run.failures[:-_FAILURES_MAX]
        run.skipped_count += event.kind == "skipped"
        if event.kind == "committed" and (event.rank in run.ranks or len(run.ranks) < _RANKS_MAX):
            self._count(run.ranks.setdefault(event.rank, Rank()), step, event.rank, figures)
        if event.rank == 0:
            run.saves.append(Save(step, 0, begun_s, event.time_s, event.kind, figures, engine))
            if len(run.saves) > 2 * _SAVES_MAX:
                run.left_out_count += len(run.saves) - _SAVES_MAX
                del run.saves[:-_SAVES_MAX]
            if event.kind == "committed":
                self._change(event.time_s, step, figures.get("bytes", 0.0))

    def _count(self, rank: Rank, step: int, number: int, figures: Mapping[str, float]) -> None:
        rank.save_count += 1
        rank.stall_s += figures.get("stall_s", 0.0)
        # Of a file that ranks write together, "bytes" of the coordinator are those of all.
        own = sum(figures.get(name, 0.0) for name in ("bytes_by_writer", "bytes_at_gate", "bytes_before_return"))
        rank.bytes += own or figures.get("bytes", 0.0)
        written_s = figures.get("write_s", 0.0) + figures.get("sync_s", 0.0)
        rank.write_s += written_s
        if written_s > self._slowest.get(step, (0.0, 0))[0]:
            if step not in self._slowest and len(self._slowest) >= _SAVES_MAX:
                self._settle(next(iter(self._slowest)))
            self._slowest[step] = (written_s, number)

    def _settle(self, step: int) -> None:
        self._counts[self._slowest.pop(step)[1]] += 1

    def _change(self, time_s: float, step: int, size: float | None) -> None:
        """Note what is there from now on: a step of so many bytes more, or a step less."""
        self._kept_bytes -= self._sizes.pop(step, 0.0)
        if size is not None and len(self._sizes) < _SAVES_MAX:
            self._sizes[step] = size
            self._kept_bytes += size
        self._run.kept.append((time_s, len(self._sizes), max(0.0, self._kept_bytes)))
        if len(self._run.kept) > 2 * _KEPT_MAX:
            del self._run.kept[:-_KEPT_MAX]

    def finish(self) -> None:
        """Add what is known when all events have been seen."""
        for step in list(self._slowest):
            self._settle(step)
        for number, count in self._counts.items():
            self._run.ranks[number].slowest_count = count
        self._run.left_out_count += max(0, len(self._run.saves) - _SAVES_MAX)
        del self._run.saves[:-_SAVES_MAX]


def _from_manifest(found: CheckpointManifest) -> Save:
    figures = {name: float(value) for name, value in found.stats.items() if is_sane(value)}
    figures["bytes"] = float(bytes_of(found))
    engine = str(found.stats.get("engine", ""))[:40]
    return Save(-1 if found.step is None else found.step, 0, 0.0, found.time_s, "committed", figures, engine)


def _add_kept_of(run: Run, there: Iterable[CheckpointManifest]) -> None:
    size = 0.0
    for count, one in enumerate(sorted(there, key=lambda one: one.time_s), 1):
        size += bytes_of(one)
        run.kept.append((one.time_s, count, size))


def _add_ranks_of_files(run: Run, there: Iterable[CheckpointManifest]) -> None:
    """Take the bytes of each rank from the names of files; those that name no rank are of rank 0."""
    for one in there:
        for entry in one.files:
            number = writer_of(entry.name) or 0
            if number in run.ranks or len(run.ranks) < _RANKS_MAX:
                run.ranks.setdefault(number, Rank()).bytes += entry.size_bytes
