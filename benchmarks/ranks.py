"""What several ranks gain, and what it costs that they agree: saves by 1, 2 and 4 ranks of one machine, and their talk.

    python benchmarks/ranks.py DIR                                      everything; takes three minutes
    python benchmarks/ranks.py DIR --parts files --ranks 1 2 --rounds 9
    python benchmarks/ranks.py DIR --parts coordination --simulated 512

files: all ranks write one file in DIR, durably, in turn with fio with as many jobs (a range of one fresh file each),
and with one rank that saves without a group. memory: the same on tmpfs, where no disk is in the way. One rank alone
uses several cores, so ranks are kept on one core each, too. Beside them: bare pwrite of as many processes into one
fresh file there, which the kernel lets in one after the other, and into one each; the writer with its null engine,
which is all of a save but the kernel; and memcpy of as many to memory that was touched before. bytes: what each rank
writes. load: one file loaded by all ranks, in each of the ways that fastpersist/distributed/shared_reader.py knows,
and in the one it chooses ("auto"), with the file out of the page cache and in it. coordination: saves of 4 KiB on
tmpfs by real ranks, where agreement is most of the work; and many simulated ranks, who say to a real rank 0 what real
ones say about a state of 300 tensors. They are in one process and take turns, so the times at 512 are mostly its own.

One disk and two cores show that several writers do no harm, not what several disks would gain.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ranks_parts as parts
from overlap_report import machine_facts, report_facts
from tabulate import tabulate

from fastpersist.cli.bench.fio import fio_version
from fastpersist.cli.bench.load_rows import PageCache

_MIB = 1 << 20
_BLOCK_BYTES = 4096
_PARTS = ("files", "memory", "bytes", "load", "coordination")
_LOAD_WAYS = ("ahead", "exchange", "alone", "auto")
_OF_FIO_MIN = 0.9
_OF_ONE_MIN = 0.95  # not slower, as far as two medians on one disk can be told apart
_OF_BEST_MIN = 0.85  # no other way to load is faster, as far as medians of several busy processes can be told apart
_COMMIT_S_MAX = 0.1
_RANK_BYTES_MAX = 1024
_MESSAGE_COUNT_MAX = 4
_SIMULATED_MAX = 900  # descriptors of one process

Check = tuple[str, str, bool, bool]
"""What should be, what was found, whether that is so, and whether it is a matter of time, which others may spoil."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _several(text: str) -> int:
    value = int(text)
    if not 2 <= value <= _SIMULATED_MAX:
        raise argparse.ArgumentTypeError(f"must be 2 … {_SIMULATED_MAX}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ranks.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory on the disk to measure; left as it was")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="(default: all)")
    parser.add_argument("--ranks", nargs="+", type=_positive, default=[1, 2, 4], metavar="N", help="that save together")
    parser.add_argument("--size-mb", type=_positive, default=1024, metavar="MIB", help="state; each rank holds one")
    parser.add_argument("--rounds", type=_positive, default=5, metavar="N", help="saves of each way (default: 5)")
    parser.add_argument("--memory-dir", default="/dev/shm", metavar="DIR", help="in memory (default: /dev/shm)")
    parser.add_argument("--real", nargs="+", type=_several, default=[2, 4, 8], metavar="N", help="ranks that agree")
    parser.add_argument("--simulated", nargs="+", type=_several, default=[8, 64, 512], metavar="N")
    parser.add_argument("--saves", type=_positive, default=20, metavar="N", help="of each number of ranks that agree")
    parser.add_argument("--tensors", type=_positive, default=300, metavar="N", help="of the state they agree on")
    parser.add_argument("--json", metavar="PATH", help="write all samples there as well")
    parser.add_argument("--timeout", type=_positive, default=300, metavar="S", help="of one save (default: 300)")
    return parser


class _Bench:
    """Runs the parts, prints their tables, and collects samples and checks.

    Args:
        arguments: Of the command line.
        disk: An empty directory in DIR.
        memory: One on tmpfs; None if there is none.
    """

    def __init__(self, arguments: argparse.Namespace, disk: str, memory: str | None) -> None:
        self.arguments, self._disk, self._memory = arguments, disk, memory
        self._counts = sorted(set(arguments.ranks))
        self._number = 0
        self._said: list[list[str]] = []  # by the first rank and another one
        self.output: dict[str, Any] = {}
        self.checks: list[Check] = []

    def run(self) -> None:
        """Measure what was asked for."""
        wanted = self.arguments.parts
        if {"files", "memory", "bytes", "load"} & set(wanted):
            with parts.RankProcesses(self._counts, self._disk, self.arguments.timeout) as ranks:
                _say(f"{max(self._counts)} ranks make their states")
                size_bytes = ranks.call(max(self._counts), parts.hold_state, self.arguments.size_mb * _MIB)[0]
                self._meet(ranks)
                if "files" in wanted:
                    self._files(ranks, size_bytes)
                if "memory" in wanted:
                    self._in_memory(ranks, size_bytes)
                if "bytes" in wanted:
                    self._bytes(ranks)
                if "load" in wanted:
                    self._load(ranks)
        if "coordination" in wanted:
            self._real_talk()
            self._simulated_talk()

    @contextlib.contextmanager
    def _fresh(self, directory: str) -> Iterator[str]:
        """Give a path at which nothing is, and remove what is there afterwards, or at longer names."""
        self._number += 1
        path = os.path.join(directory, f"{self._number}.pt")
        try:
            yield path
        finally:
            for name in os.listdir(directory):
                if name.startswith(os.path.basename(path)):
                    each = os.path.join(directory, name)
                    shutil.rmtree(each) if os.path.isdir(each) else os.unlink(each)
            descriptor = os.open(directory, os.O_RDONLY)
            os.fsync(descriptor)  # lest removing a gigabyte costs the next one its time
            os.close(descriptor)

    def _meet(self, ranks: parts.RankProcesses) -> None:
        """Have each group save once, which is not counted: its ranks connect, and map their memory."""
        for count in self._counts:
            with self._fresh(self._disk) as path:
                ranks.call(count, parts.save_together, path, count)

    # --- files on disk

    def _files(self, ranks: parts.RankProcesses, size_bytes: int) -> None:
        ways: dict[str, Callable[[str], Sample]] = {}
        for count in self._counts:
            ways[f"fio, {_plural(count, 'job')}"] = functools.partial(_fio, size_bytes, count)
        ways["one rank alone"] = functools.partial(_alone, ranks, size_bytes)
        for count in self._counts:
            ways[_plural(count, "rank")] = functools.partial(_together, ranks, size_bytes, count)
        samples: dict[str, list[Sample]] = {way: [] for way in ways}
        why_not = ""
        for number in range(self.arguments.rounds):
            for way in list(ways) if number % 2 == 0 else list(ways)[::-1]:
                if why_not and way.startswith("fio"):
                    continue
                _say(f"files: round {number + 1} of {self.arguments.rounds}, {way}")
                with self._fresh(self._disk) as path:
                    try:
                        samples[way].append(ways[way](path))
                    except parts.FioMissing as error:
                        why_not = str(error)
        rows = []
        for way, found in samples.items():
            count = int(way.split()[1 if way.startswith("fio") else 0]) if way != "one rank alone" else 1
            of_fio = [] if way.startswith("fio") else _ratios(found, samples.get(f"fio, {_plural(count, 'job')}", []))
            of_one = [] if way.startswith("fio") else _ratios(found, samples["one rank alone"])
            rows.append([way, *_rate_cells(found), _ratio_cell(of_fio), _ratio_cell(of_one)])
            if of_fio and way != "one rank alone":
                self._check(f"{way}: 90 % of fio", of_fio, _OF_FIO_MIN)
            if of_one and count > 1:
                self._check(f"{way}: not slower than one", of_one, _OF_ONE_MIN)
        print(f"\nFiles: {size_bytes / 1e9:.2f} GB, durable, fresh files in turn, {self.arguments.rounds} rounds\n")
        _print_table(rows, ["way", "engine", "median s (min – max)", "GB/s", "of fio (by round)", "of one rank alone"])
        if why_not:
            print(f"\n{why_not}")
        self.output["files"] = {"size_bytes": size_bytes, "samples": samples, "no_fio": why_not}

    # --- files in memory

    def _in_memory(self, ranks: parts.RankProcesses, size_bytes: int) -> None:
        if self._memory is None:
            print(f"\nMemory: left out, {self.arguments.memory_dir} is missing or has not enough room (--memory-dir)")
            return
        kinds = ("saved", "on one core", "one file", "a file each", "pumped", "copied")
        samples: dict[int, dict[str, list[float]]] = {count: {kind: [] for kind in kinds} for count in self._counts}
        for number in range(self.arguments.rounds):
            for count in self._counts if number % 2 == 0 else self._counts[::-1]:
                _say(f"memory: round {number + 1} of {self.arguments.rounds}, {_plural(count, 'rank')}")
                found = samples[count]
                for kind, one_each in (("saved", False), ("on one core", True)):
                    ranks.call(count, parts.stay_on_cores, one_each)
                    with self._fresh(self._memory) as path:
                        found[kind].append(_together(ranks, size_bytes, count, path).seconds)
                for kind, one_each in (("one file", False), ("a file each", True)):  # on one core each
                    with self._fresh(self._memory) as path:
                        spans = ranks.call(count, parts.fill_file, path, count, one_each)
                        found[kind].append(parts.whole_span(spans))
                with self._fresh(self._memory) as path:
                    found["pumped"].append(parts.whole_span(ranks.call(count, parts.pump_nowhere, path, count)))
                copies = ranks.call(count, parts.copy_memory, count, 1)
                found["copied"].append(parts.whole_span([copy[0] for copy in copies]))
                ranks.call(count, parts.stay_on_cores, False)
        rows = []
        core_count = len(os.sched_getaffinity(0))
        first = before = samples[self._counts[0]]
        for count, found in samples.items():
            rates = {kind: f"{size_bytes / _median(found[kind]) / 1e9:.2f}" for kind in kinds}
            own, pinned = (_gains(first[kind], found[kind]) for kind in kinds[:2])
            rows.append(
                [str(count), _seconds_cell(found["saved"]), rates["saved"], _ratio_cell(own)]
                + [_seconds_cell(found["on one core"]), rates["on one core"], _ratio_cell(pinned)]
                + [rates[kind] for kind in kinds[2:]]
            )
            if self._counts[0] < count <= core_count:
                gains = _gains(before["on one core"], found["on one core"])
                self._check(f"{count} ranks in memory, a core each: faster than fewer", gains, 1)
            before = found
        kind = machine_facts(self._memory)["file_system"]
        print(
            f"\nMemory: {size_bytes / 1e9:.2f} GB to fresh files in {self.arguments.memory_dir} ({kind}), in turn, "
            f"{self.arguments.rounds} rounds. This machine has {core_count} cores: of ranks with a core "
            f"each, no more than {core_count} can be faster than fewer.\n"
        )
        rate = ["median s (min – max)", "GB/s", "of the fewest"]
        bare = ["bare pwrite, one file: GB/s", "a file each: GB/s", "null engine: GB/s", "memcpy GB/s"]
        _print_table(rows, ["ranks", *rate, *(f"a core each: {name}" for name in rate), *bare])
        self.output["memory"] = {"size_bytes": size_bytes, "core_count": core_count, "samples": samples}

    # --- bytes of each rank

    def _bytes(self, ranks: parts.RankProcesses) -> None:
        rows, output = [], {}
        for count in self._counts:
            if count == 1:
                continue
            _say(f"bytes: {count} ranks")
            with self._fresh(self._disk) as root:
                told = ranks.call(count, parts.save_and_count, root, count)
            by_rank, own = told[0][0], [size_bytes for _, size_bytes in told]
            apart = max(by_rank) - min(by_rank)
            rows.append([str(count), *(f"{size(by_rank):,}" for size in (min, max, sum)), str(apart)])
            agrees = len(by_rank) == count and by_rank[1:] == own[1:]
            found = f"{apart} bytes apart{'' if agrees else ', and the ranks themselves say otherwise'}"
            self._require(f"{count} ranks: equal within a block", found, apart <= _BLOCK_BYTES and agrees)
            output[count] = {"by_rank": by_rank, "as_ranks_say": own}
        print("\nBytes: shared bytes that each rank wrote of a Checkpointer's save\n")
        _print_table(rows, ["ranks", "least of a rank", "most of a rank", "all", "apart"])
        self.output["bytes"] = output

    # --- one file loaded by all

    def _load(self, ranks: parts.RankProcesses) -> None:
        counts = [count for count in self._counts if count > 1]
        cases = [(count, is_cold, way) for count in counts for is_cold in (True, False) for way in _LOAD_WAYS]
        samples: dict[tuple[int, bool, str], list[float]] = {case: [] for case in cases}
        caches = {is_cold: PageCache(warm=not is_cold, whole_machine=False) for is_cold in (True, False)}
        with self._fresh(self._disk) as path:
            ranks.call(1, parts.save_alone, path)
            size_bytes = os.path.getsize(path)
            for number in range(-1, self.arguments.rounds):  # the first is not counted: the ranks map their memory
                _say(f"load: round {number + 1} of {self.arguments.rounds}")
                for count, is_cold, way in cases if number % 2 == 0 else cases[::-1]:
                    caches[is_cold].prepare(path)
                    spans = ranks.call(count, parts.load_together, path, count, way)
                    if number >= 0:
                        samples[count, is_cold, way].append(parts.whole_span(spans))
        rows, output = [], {}
        for count in counts:
            for is_cold in (True, False):
                name = f"{count} ranks, {'cold' if is_cold else 'warm'}"
                found = {way: samples[count, is_cold, way] for way in _LOAD_WAYS}
                rows.append([name, *(_seconds_cell(seconds) for seconds in found.values())])
                best = min(_LOAD_WAYS, key=lambda way: _median(found[way]))
                self._check(f"{name}: no way to load is faster", _gains(found[best], found["auto"]), _OF_BEST_MIN)
                output[name] = found
        print(
            f"\nLoad: {size_bytes / 1e9:.2f} GB by all ranks, seconds until the last has the object, in turn, "
            f"{self.arguments.rounds} rounds\n"
            + "".join(f"\n- {name}: {caches[name == 'cold'].describe()}" for name in ("cold", "warm"))
            + "\n"
        )
        _print_table(rows, ["ranks", *(f"{way}: median s (min – max)" for way in _LOAD_WAYS)])
        self.output["load"] = {"size_bytes": size_bytes, "samples": output}

    # --- what agreement costs

    def _real_talk(self) -> None:
        """Save next to nothing with real ranks; and once a state of many tensors, to hear what they say about it."""
        place = self._memory or self._disk  # on a disk, its syncs are most of it
        counts = [1, *sorted(set(self.arguments.real))]
        rows, samples, alone_s = [], {}, 0.0
        with parts.RankProcesses(counts, self._disk, self.arguments.timeout) as ranks:
            for count in counts:
                _say(f"coordination: {_plural(count, 'real rank')}")
                with self._fresh(place) as root:
                    by_rank = ranks.call(count, parts.save_tiny, root, count, self.arguments.saves)
                seconds = [
                    parts.whole_span([(start, end) for start, _, end in save]) for save in zip(*by_rank, strict=True)
                ]
                stalls = [returned - start for own in by_rank for start, returned, _ in own]
                alone_s = alone_s or _median(seconds)
                samples[count] = {"seconds": seconds, "stall_s": stalls}
                message_count, message_bytes = "", ""
                if count > 1:
                    with self._fresh(place) as root:
                        told = ranks.call(count, parts.save_and_listen, root, count, self.arguments.tensors)
                    self._said = [told[0][0], told[1][0]]
                    per_rank = told[0][1] / (count - 1), told[0][2] / (count - 1)
                    message_count, message_bytes = f"{per_rank[0]:g}", f"{per_rank[1]:.0f}"
                    self._check_messages(f"{count} ranks", per_rank[0])
                    samples[count].update(messages_per_rank=per_rank[0], message_bytes_per_rank=per_rank[1])
                more = f"{1e3 * (_median(seconds) - alone_s):+.1f}" if count > 1 else ""
                times = [_milliseconds_cell(seconds), more, _milliseconds_cell(stalls)]
                rows.append([str(count), *times, message_count, message_bytes])
        print(
            f"\nCoordination, real ranks on {len(os.sched_getaffinity(0))} cores: saves of 4 KiB on "
            f"{machine_facts(place)['file_system']}, {self.arguments.saves} each; messages and bytes: of a state of "
            f"{self.arguments.tensors} tensors\n"
        )
        headers = ["ranks", "published after ms", "more than one rank", "inside save() ms", "messages", "bytes"]
        _print_table(rows, [*headers[:4], *(f"{what} per rank on rank 0" for what in headers[4:])])
        self.output["real"] = samples

    def _simulated_talk(self) -> None:
        """Have simulated ranks say what the real ones have said."""
        (go, end), (plan, told_done) = (said[:2] for said in self._said)
        text, _, _ = told_done.partition("\n")
        rows, samples = [], {}
        for count in sorted(set(self.arguments.simulated)):
            _say(f"coordination: {count} simulated ranks")
            done = text + "\n" + "x" * 4 * self._range_count(count)  # in place of the CRCs: nobody looks at them
            words = [word.encode("latin-1") for word in (plan, go, done, end)]
            seconds, *per_rank = parts.simulate(count, 2 + self.arguments.saves, *words)
            agreed, committed = (list(each) for each in zip(*seconds, strict=True))
            times = [_milliseconds_cell(agreed), _milliseconds_cell(committed)]
            rows.append([str(count), *times, f"{per_rank[0]:g}", f"{per_rank[1]:.0f}"])
            name = f"{count} simulated ranks"
            in_time = _median(committed) <= _COMMIT_S_MAX
            self.checks.append((f"{name}: commit in 100 ms", _milliseconds_cell(committed), in_time, True))
            self._check_messages(name, per_rank[0])
            # Not of few ranks: the CRCs of all ranges are told, and the fewer ranks, the more ranges each has.
            self._require(f"{name}: 1 KiB", f"{per_rank[1]:.0f}", per_rank[1] <= _RANK_BYTES_MAX)
            samples[count] = {"agreed_s": agreed, "committed_s": committed, "per_rank": per_rank}
        print("\nCoordination, simulated ranks that take turns in one process, to a real rank 0\n")
        headers = ["ranks", "last plan → all go ms", "last done → all end ms"]
        _print_table(rows, [*headers, "messages per rank on rank 0", "bytes per rank on rank 0"])
        self.output["simulated"] = samples

    def _range_count(self, count: int) -> int:
        """Return how many ranges a rank writes if all do: there is one more at each border of two shards."""
        tensor_count: int = self.arguments.tensors
        return -(-(tensor_count + count - 1) // count)

    def _check_messages(self, name: str, message_count: float) -> None:
        self._require(f"{name}: 4 messages", f"{message_count:g}", message_count <= _MESSAGE_COUNT_MAX)

    def _check(self, what: str, ratios: Sequence[float], ratio_min: float) -> None:
        """Note whether the median of the ratios is large enough; that is a matter of time, which others may spoil."""
        self.checks.append((what, _ratio_cell(ratios), _median(ratios) >= ratio_min, True))

    def _require(self, what: str, found: str, is_so: bool) -> None:
        """Note something that has to be so at any time."""
        self.checks.append((what, found, is_so, False))


# --- ways of writing one file ---


class Sample(NamedTuple):
    """One file written."""

    seconds: float
    size_bytes: int
    engine: str


def _fio(size_bytes: int, count: int, path: str) -> Sample:
    return Sample(*parts.fio_write(path, size_bytes, count))


def _alone(ranks: parts.RankProcesses, size_bytes: int, path: str) -> Sample:
    ((span, engine),) = ranks.call(1, parts.save_alone, path)
    return Sample(parts.whole_span([span]), size_bytes, engine)


def _together(ranks: parts.RankProcesses, size_bytes: int, count: int, path: str) -> Sample:
    results = ranks.call(count, parts.save_together, path, count)
    return Sample(parts.whole_span([span for span, _ in results]), size_bytes, results[0][1])


# --- tables ---


def _say(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _ratios(found: Sequence[Sample], others: Sequence[Sample]) -> list[float]:
    """Return by how much each rate is that of the other in the same round."""
    pairs = zip(found, others)  # noqa: B905 - of fio there may be none
    return [(one.size_bytes / one.seconds) / (other.size_bytes / other.seconds) for one, other in pairs]


def _gains(before_s: Sequence[float], after_s: Sequence[float]) -> list[float]:
    """Return by how much it became faster, round by round."""
    return [before / after for before, after in zip(before_s, after_s, strict=True)]


def _ratio_cell(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{100 * _median(ratios):.0f} % ({100 * min(ratios):.0f} – {100 * max(ratios):.0f})"


def _seconds_cell(seconds: Sequence[float]) -> str:
    return f"{_median(seconds):.3f} ({min(seconds):.3f} – {max(seconds):.3f})"


def _milliseconds_cell(seconds: Sequence[float]) -> str:
    return f"{1e3 * _median(seconds):.1f} ({1e3 * min(seconds):.1f} – {1e3 * max(seconds):.1f})"


def _rate_cells(samples: Sequence[Sample]) -> list[str]:
    if not samples:
        return ["", "left out", ""]
    rates = [sample.size_bytes / sample.seconds / 1e9 for sample in samples]
    return [samples[0].engine, _seconds_cell([sample.seconds for sample in samples]), f"{_median(rates):.2f}"]


def _print_table(rows: list[list[str]], headers: list[str]) -> None:
    print(tabulate(rows, headers, disable_numparse=True, tablefmt="pipe"))


# --- the program ---


def _make_below(directory: str, size_bytes: int) -> str | None:
    """Return a new directory below one with room for so many bytes, None if there is none."""
    if not os.path.isdir(directory) or shutil.disk_usage(directory).free < size_bytes:
        return None
    return tempfile.mkdtemp(prefix=".ranks-", dir=directory) if os.access(directory, os.W_OK) else None


def _require_room(arguments: argparse.Namespace) -> None:
    """Refuse to fill the disk or the memory."""
    size_bytes = arguments.size_mb * _MIB
    free_bytes = shutil.disk_usage(arguments.directory).free
    if free_bytes < 2 * size_bytes:
        raise SystemExit(f"{arguments.directory} has {free_bytes / 1e9:.1f} GB free, less than two states (--size-mb)")
    needed_bytes = (max(arguments.ranks) + 2) * size_bytes  # a file on tmpfs, and what memcpy copies to
    with open("/proc/meminfo") as lines:
        facts = dict(line.split(":", 1) for line in lines)
    available_bytes = int(facts["MemAvailable"].split()[0]) * 1024
    if available_bytes < needed_bytes:
        raise SystemExit(
            f"{max(arguments.ranks)} states, a file on tmpfs and a copy need {needed_bytes / 1e9:.1f} GB of memory, "
            f"and {available_bytes / 1e9:.1f} are available; choose a smaller --size-mb"
        )


def main() -> int:
    """Measure, print and write what was asked for.

    Returns:
        0, or 1 if a rank failed, or a check that has nothing to do with time.
    """
    arguments = _parser().parse_args()
    if not os.path.isdir(arguments.directory):
        raise SystemExit(f"{arguments.directory} is no directory; name one on the disk that shall be measured")
    if set(arguments.parts) != {"coordination"}:
        _require_room(arguments)
    command_line = shlex.join(["python", "benchmarks/ranks.py", *sys.argv[1:]])
    facts = {**machine_facts(arguments.directory), "fio": fio_version()}
    print(report_facts(command_line, facts))
    print(f"gloo, all ranks on this machine, {facts['fio'] or 'no fio'}", flush=True)
    failed = ""
    memory = _make_below(arguments.memory_dir, 2 * _MIB * max(arguments.size_mb, arguments.tensors))
    # Any exception removes them, Ctrl-C included; only a SIGKILL leaves them behind.
    try:
        with tempfile.TemporaryDirectory(prefix=".ranks-", dir=arguments.directory) as disk:
            bench = _Bench(arguments, disk, memory)
            try:
                bench.run()
            except parts.Failed as error:
                failed = str(error)
    finally:
        if memory is not None:
            shutil.rmtree(memory)
    print()
    verdicts = [[what, found, "PASS" if is_so else "FAIL"] for what, found, is_so, _ in bench.checks]
    _print_table(verdicts, ["check", "found", ""])
    if failed:
        print(f"\n{failed}", file=sys.stderr)
    if arguments.json:
        with open(arguments.json, "w") as file:
            output = {"command_line": command_line, "machine": facts, **bench.output, "checks": verdicts}
            json.dump(output, file, indent=1)
            file.write("\n")
    return int(bool(failed) or any(not is_so and not timed for _, _, is_so, timed in bench.checks))


if __name__ == "__main__":
    sys.exit(main())
