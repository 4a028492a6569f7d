"""`fastpersist tune DIR`: finds the fastest settings for saves to a file system, and stores them.

It saves fresh files to a scratch directory in DIR, in child processes (`tune.worker`), with settings that `tune.search`
chooses. It reports the gain over the defaults, and writes the file (`tune.file`) that later saves to this file system
use. It keeps a default where the difference is within the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastpersist.cli.argument_types import positive, positive_number
from fastpersist.cli.bench.places import require_space, scratch_directory
from fastpersist.cli.report.disk_rate import rate_line
from fastpersist.cli.terminal import EXIT_GOOD, printable, size_text
from fastpersist.transfer.arena import available_host_bytes

if TYPE_CHECKING:
    from fastpersist.cli.tune.search import Choice, Comparison
    from fastpersist.cli.tune.worker import Foreman

__all__ = ["add_parser", "run"]

_MIB = 1 << 20
_SIZE_MIN_BYTES = 64 * _MIB
_SIZE_MAX_BYTES = 1024 * _MIB
_RUN_SHARE = 1 / 240  # of the time, that one save shall take: a quarter of a second in a minute
_DISK_SHARE = 8  # the file is at most an eighth of what is free, and of the memory that is available
_PAIR_COUNTS = (7, 15)

# What is over by when, as parts of the time.
_SEARCH_UNTIL, _SIMPLIFY_UNTIL, _COMPARE_UNTIL, _LOAD_UNTIL = 0.45, 0.6, 0.75, 0.85

_EPILOG = """\
examples:
  fastpersist tune /mnt/nvme
  fastpersist tune /mnt/nvme --seconds 20 --dry-run

The command saves fresh files as fastpersist.save does, until they are durable. Choices take turns; each round drops
half of them. Further runs compare the last one with the defaults, in pairs; it is kept only if it is faster by at least
2 % (median of the pairs), and the 95 % confidence interval of that median lies above equal speed.

Loading uses these settings too, but never the page cache because of them. So the command also compares loading a file
from the disk; if the choice makes loading slower, all defaults stay.

--json prints one object:
  facts                  machine, file system, device, versions, date
  size_bytes, run_count  bytes of a file; how many were saved
  default_engine         what "auto" takes here
  rounds                 list of lists of {settings, seconds}
  failed                 list of {settings, why}
  comparison             {settings, gain, interval, pair_count, noise, is_kept}: the best against the defaults, or null
  loading                as comparison, for loading; null when the defaults are the best for saving
  writers                as comparison, for a number of writers against 8; null when none was tried
  settings               settings in the tuning file
  file, written          path of the tuning file, and whether it was written
  notes                  further remarks

Exit codes: 0 good, 2 the directory is missing, full, or takes no file.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest settings for the file system of a directory, and use them from then on",
        description="Find the fastest settings for saves to a file system, and write them to a file that\n"
        "fastpersist finds by itself. Takes about a minute, in which the machine should be idle.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", metavar="DIR", help="existing directory; the command removes its scratch directory in it"
    )
    parser.add_argument(
        "--seconds", type=positive_number, default=60.0, metavar="S", help="approximate duration (default: 60)"
    )
    parser.add_argument(
        "--size-mb",
        type=positive,
        metavar="N",
        help="MiB of a file (default: by memory, free space and speed)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--dry-run", action="store_true", help="measure, and print the file instead of writing it")
    parser.add_argument("--output", metavar="FILE", help="write there, for FASTPERSIST_CONFIG=FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the findings, write the file.

    Raises:
        ConfigError: DIR is no directory, or there is no place for the file that can be written.
        NoSpaceError: DIR has no room.
        StorageError: DIR takes no files, or the tuning file cannot be written.
    """
    from fastpersist.cli.bench.report import machine_facts
    from fastpersist.cli.tune.file import tuning_text, write_tuning

    directory = arguments.directory
    place = _place(arguments)
    tell = _silent if arguments.json else _tell
    facts = machine_facts(directory)
    tell(f"tuning for {printable(facts['file_system'])} on {printable(facts['device'])}, in {printable(directory)}")
    with scratch_directory(directory, "tune") as scratch:
        found = _tune(scratch, arguments.seconds, arguments.size_mb, tell)
    text = tuning_text(found.settings, facts, found.findings())
    is_written = not arguments.dry_run
    if is_written:
        write_tuning(place, text, found.settings, make_parents=arguments.output is None)
    notes = _notes(place, is_automatic=arguments.output is None)
    if arguments.json:
        print(json.dumps(found.as_json(facts, place, is_written, notes), indent=2))
        return EXIT_GOOD
    if not is_written:
        print(f"\nnot written, as this is a dry run: {printable(place)}\n\n{text}", end="")
    elif not found.settings:
        print(f"wrote {printable(place)}, which says that the defaults are best")
    elif arguments.output is None:
        print(f"wrote {printable(place)}, which saves to this file system use from now on")
    else:
        print(f"wrote {printable(place)}, which FASTPERSIST_CONFIG={printable(place)} puts in force")
    for note in notes:
        print(printable(note))
    return EXIT_GOOD


def _silent(_line: str) -> None:
    pass


def _tell(line: str) -> None:
    print(line, flush=True)


def _place(arguments: argparse.Namespace) -> str:
    """Return the tuning file's path; raise before measuring if it cannot be written."""
    from fastpersist.commit.filesystem import absolute_path, storage_errors
    from fastpersist.config import tuning_path
    from fastpersist.errors import ConfigError

    if not os.path.isdir(arguments.directory):
        raise ConfigError(f"{arguments.directory} is no directory; name one on the disk that shall be tuned for")
    if arguments.output is not None:
        if os.path.isdir(arguments.output) or not os.path.isdir(os.path.dirname(absolute_path(arguments.output))):
            raise ConfigError(f"--output {arguments.output} is no name for a file in a directory that is there")
        return _writable(str(arguments.output), arguments)
    with storage_errors("opening", arguments.directory):
        fd = os.open(arguments.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        place = tuning_path(fd, named=False)
    finally:
        os.close(fd)
    if place is None:
        raise ConfigError("there is no home directory for the tuning file; name one with --output FILE")
    return _writable(place, arguments)


def _writable(place: str, arguments: argparse.Namespace) -> str:
    """Return the path if its directory can be written, or made; a dry run does not need that."""
    from fastpersist.errors import ConfigError

    above = os.path.dirname(os.path.realpath(place))
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not arguments.dry_run and not (os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)):
        raise ConfigError(f"the tuning file {place} cannot be written; name another with --output FILE")
    return place


def _notes(place: str, *, is_automatic: bool) -> list[str]:
    """Warn of environment variables that override the file."""
    notes = []
    chosen = os.environ.get("FASTPERSIST_CONFIG")
    if is_automatic and chosen is not None and (not chosen or os.path.realpath(chosen) != os.path.realpath(place)):
        notes.append(f"note: FASTPERSIST_CONFIG is set to {chosen!r}, so this file does not count until it is unset")
    keys = ("ENGINE", "CHUNK_BYTES", "QUEUE_DEPTH", "RING_BYTES", "THREADS")
    names = [name for key in keys if (name := f"FASTPERSIST_{key}") in os.environ]
    if names:
        notes.append(f"note: {', '.join(names)} set in the environment: what it says goes before the file")
    return notes


# ------------------------------------------------------------------------------------------------- measuring


@dataclasses.dataclass(slots=True)
class _Found:
    """All results of a tuning run.

    Attributes:
        size_bytes: Size of a file.
        default_engine: The engine that "auto" takes here.
        rounds: Seconds by choice, round by round.
        failed: Reason of failure by choice.
        best: The choice that was compared with the defaults at last; None if no choice beat them.
        comparison: Comparison of `best` with the defaults.
        loading: The same comparison for loading; None if `best` is not kept.
        writer_count: The number of writers that was compared with the default.
        writers: The comparison of this number with the default.
        run_count: Number of saved files.
        seconds: Duration.
    """

    size_bytes: int
    default_engine: str
    rounds: list[dict[Choice, list[float]]]
    failed: dict[Choice, str]
    best: Choice | None = None
    comparison: Comparison | None = None
    loading: Comparison | None = None
    writer_count: int | None = None
    writers: Comparison | None = None
    run_count: int = 0
    seconds: float = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the tuning file."""
        found: dict[str, Any] = {}
        if self.best is not None and self.saves_faster and not self.loads_slower:
            found |= self.best.settings()
        if self.writers is not None and self.writers.is_faster:
            found["writers"] = self.writer_count
        return found

    @property
    def saves_faster(self) -> bool:
        """Whether saving is faster with the best choice than with the defaults."""
        return self.comparison is not None and self.comparison.is_faster

    @property
    def loads_slower(self) -> bool:
        """Whether loading is slower with it, by more than the noise."""
        return self.loading is not None and self.loading.is_slower

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of the fastest choice of the last round."""
        last = self.rounds[-1] if self.rounds else {}
        fastest_s = min((statistics.median(seconds) for seconds in last.values() if seconds), default=0.0)
        return self.size_bytes / fastest_s if fastest_s > 0 else None

    def findings(self) -> list[str]:
        """Return the findings, a line each."""
        rate = [] if self.bytes_per_s is None else [rate_line(self.bytes_per_s)]
        lines = [
            *rate,
            f"Measured: {self.run_count} saves of {self.size_bytes // _MIB} MiB into fresh files, until they were "
            f"durable, in {self.seconds:.0f} s.",
            self.verdict(),
        ]
        if self.loading is not None:
            lines.append(self.loading_verdict())
        if self.writers is not None:
            lines.append(self.writers_verdict())
        return lines

    def verdict(self) -> str:
        """Describe the gain over the defaults, if any."""
        if self.best is None or self.comparison is None:
            return f"The defaults ({self.default_engine}) are the best that was found."
        than = f"the defaults ({self.default_engine})"
        text = f"{self.best} {_gain_text(self.comparison, than)}{_consequence(self.comparison)}"
        return f"{text} Half of the runs with the defaults lie within ±{self.comparison.noise:.1%}."

    def loading_verdict(self) -> str:
        """Describe the effect on loading."""
        if self.loading is None:
            return ""
        text = f"Loading from the disk with it {_gain_text(self.loading, 'with the defaults')}"
        return text + (": slower, so the defaults stay after all." if self.loading.is_slower else ".")

    def writers_verdict(self) -> str:
        """Describe the best number of writers."""
        from fastpersist.cli.tune.search import WRITER_COUNTS

        if self.writers is None or self.writer_count == WRITER_COUNTS[-1]:
            return f"writers {WRITER_COUNTS[-1]}, as by default, are the best that was found."
        text = _gain_text(self.writers, f"{WRITER_COUNTS[-1]} of them")
        return f"writers {self.writer_count} {text}{_consequence(self.writers)}"

    def as_json(self, facts: dict[str, Any], place: str, is_written: bool, notes: Sequence[str]) -> dict[str, Any]:
        """Return all results as plain values for JSON."""
        return {
            "facts": facts,
            "size_bytes": self.size_bytes,
            "run_count": self.run_count,
            "default_engine": self.default_engine,
            "rounds": [
                [{"settings": choice.settings(), "seconds": seconds} for choice, seconds in found.items()]
                for found in self.rounds
            ],
            "failed": [{"settings": choice.settings(), "why": why} for choice, why in self.failed.items()],
            "comparison": self.best and self.comparison and _as_json(self.comparison, self.best.settings()),
            "loading": self.best and self.loading and _as_json(self.loading, self.best.settings()),
            "writers": self.writers and _as_json(self.writers, {"writers": self.writer_count}),
            "settings": self.settings,
            "file": place,
            "written": is_written,
            "notes": list(notes),
        }


def _gain_text(comparison: Comparison, than: str) -> str:
    low, high = comparison.interval
    count = len(comparison.ratios)
    if not count:
        return f"could not be compared with {than}"
    if not low or not math.isfinite(high):
        return f"is {comparison.gain:.2f} times as fast as {than} ({count} pairs of runs, too few to tell)"
    return f"is {comparison.gain:.2f} times as fast as {than} (95 %: {low:.2f} to {high:.2f}; {count} pairs of runs)"


def _consequence(comparison: Comparison) -> str:
    if comparison.is_faster:
        return "."
    why = "less than 2 %" if comparison.interval[0] > 1 else "inside the noise" if comparison.ratios else "unknown"
    return f": {why}, so the default stays."


def _as_json(comparison: Comparison, settings: dict[str, Any]) -> dict[str, Any]:
    low, high = comparison.interval
    return {
        "settings": settings,
        "gain": comparison.gain,
        "interval": [low, high] if math.isfinite(high) else None,
        "pair_count": len(comparison.ratios),
        "noise": comparison.noise,
        "is_kept": comparison.is_faster,
    }


def _tune(scratch: str, seconds: float, size_mib: int | None, tell: Callable[[str], None]) -> _Found:
    from fastpersist.cli.bench.save_rows import usable_engines
    from fastpersist.cli.tune import search
    from fastpersist.cli.tune.search import DEFAULTS, Choice, Race
    from fastpersist.cli.tune.worker import Foreman

    with Foreman(scratch) as foreman:  # starts while the engines are probed
        usable = usable_engines(scratch, buffered=True)
        size_bytes, run_s, engine = _sized(foreman, scratch, size_mib, seconds)
        started_s = time.monotonic()
        rate = size_bytes / run_s[0]
        tell(f"the defaults take {engine}: {size_text(size_bytes)} in {run_s[0]:.2f} s, {size_text(int(rate))}/s")

        def save(choice: Choice) -> float:
            require_space(scratch, 2 * size_bytes, instead="a smaller --size-mb")
            return foreman.save(choice.environment(), (choice.ring_bytes, choice.chunk_bytes))[0]

        race = Race(save, time.monotonic)
        choices = search.choices_for(usable, engine, ring_limit_bytes=size_bytes // 4)

        def tell_round(things: Sequence[Choice], repeat_count: int) -> None:
            foreman.keep({(choice.ring_bytes, choice.chunk_bytes) for choice in things})
            tell(f"{len(things) - 1} choices beside the defaults, {repeat_count} runs of each")

        deadline_s = started_s + _SEARCH_UNTIL * seconds
        best, rounds = search.search(race, choices, DEFAULTS, deadline_s, run_s[1], tell_round)
        found = _Found(size_bytes, engine, rounds, race.failed)
        if best != DEFAULTS:
            found.best = search.simplify(race, best, 6, started_s + _SIMPLIFY_UNTIL * seconds)
            found.comparison = search.compare(
                race,
                DEFAULTS,
                found.best,
                started_s + _COMPARE_UNTIL * seconds,
                pair_count_min=_PAIR_COUNTS[0],
                pair_count_max=_PAIR_COUNTS[1],
            )
        tell(found.verdict())
        found.run_count = race.run_count
        if found.best is not None and found.saves_faster:
            found.loading = _compare_loading(foreman, found.best, started_s + _LOAD_UNTIL * seconds)
            tell(found.loading_verdict())
        chosen = Choice(**found.settings)
        _compare_writers(foreman, scratch, chosen, found, started_s + seconds)
        if found.writers is not None:
            tell(found.writers_verdict())
        found.seconds = time.monotonic() - started_s
    return found


def _compare_loading(foreman: Foreman, choice: Choice, deadline_s: float) -> Comparison:
    """Compare loading with the best choice for saving. This needs one more file than saving."""
    from fastpersist.cli.tune import search
    from fastpersist.cli.tune.search import DEFAULTS, Race

    def load(choice: Choice) -> float:
        if choice.engine.endswith("-buffered"):
            choice = choice._replace(engine=DEFAULTS.engine)  # as engine_selection.engine_ladder has it
        return foreman.load(choice.environment(), (choice.ring_bytes, choice.chunk_bytes))

    race = Race(load, time.monotonic)
    race.round([DEFAULTS, choice], 1, math.inf)  # the first one finds a process that has loaded nothing yet
    return search.compare(race, DEFAULTS, choice, deadline_s, pair_count_min=_PAIR_COUNTS[0], pair_count_max=11)


def _compare_writers(foreman: Foreman, scratch: str, choice: Choice, found: _Found, deadline_s: float) -> None:
    """Find the best number of processes to write one file."""
    from fastpersist.cli.tune import search
    from fastpersist.cli.tune.search import WRITER_COUNTS, Race

    if WRITER_COUNTS[-1] * choice.ring_bytes > available_host_bytes() // 2:
        return
    foreman.keep(set())

    def share(count: int) -> float:
        require_space(scratch, 2 * found.size_bytes, instead="a smaller --size-mb")
        return foreman.share(choice.environment(), (choice.ring_bytes, choice.chunk_bytes), count)

    race = Race(share, time.monotonic)
    default = WRITER_COUNTS[-1]
    first = race.round([default, *WRITER_COUNTS[:-1]], 2, deadline_s)
    if default in first:
        found.writer_count = min(first, key=lambda count: statistics.median(first[count]))
        found.writers = search.Comparison(first[default], first[default])
        if found.writer_count != default:
            found.writers = search.compare(
                race, default, found.writer_count, deadline_s, pair_count_min=_PAIR_COUNTS[0], pair_count_max=9
            )
    found.run_count += race.run_count


def _sized(
    foreman: Foreman, scratch: str, size_mib: int | None, seconds: float
) -> tuple[int, tuple[float, float], str]:
    """Prepare the bytes to save; return their number, the seconds of a save and of a whole run, and the engine."""
    from fastpersist.cli.tune.search import DEFAULTS

    most = min(shutil.disk_usage(scratch).free, available_host_bytes()) // _DISK_SHARE
    size_bytes = max(_MIB, min(_SIZE_MIN_BYTES, most // _MIB * _MIB)) if size_mib is None else size_mib * _MIB
    require_space(scratch, 2 * size_bytes, instead="a smaller --size-mb")
    while True:
        foreman.fill(size_bytes)
        inside, around = [], []
        for _ in range(3):
            started_s = time.monotonic()
            run_s, engine = foreman.save(DEFAULTS.environment(), (DEFAULTS.ring_bytes, DEFAULTS.chunk_bytes))
            inside.append(run_s)
            around.append(time.monotonic() - started_s)
        if size_mib is not None or size_bytes != _SIZE_MIN_BYTES:
            return size_bytes, (statistics.median(inside), statistics.median(around)), engine
        wanted = size_bytes / min(inside) * seconds * _RUN_SHARE
        wanted = min(wanted, most, _SIZE_MAX_BYTES)
        if wanted < 2 * size_bytes:
            return size_bytes, (statistics.median(inside), statistics.median(around)), engine
        size_bytes = 1 << int(math.log2(wanted))
