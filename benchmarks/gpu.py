"""Device memory to disk and back: ours against torch.save, safetensors and DCP, and against the disk and PCIe.

    python benchmarks/gpu.py DIR                     about five minutes on a GPU; gpu.sh builds and tests first
    python benchmarks/gpu.py DIR --parts save load --size-mb 8192 --rounds 7
    python benchmarks/gpu.py DIR --device cpu --size-mb 64 --rounds 1        rehearses the script without a GPU

All rows of a part take their turn in every round, in one process. Each part has its own process, so that a crash, a
hang, or a broken CUDA context costs no other part its figures.

save      device → durable file: from the call to synced bytes and name. A state of bf16 and fp32 tensors.
overlap   a training under fused AdamW that saves every step: how much longer steps take, how long the host waits.
load      file → device: cold files, until all bytes are on the device.
tmpfs     saving to a file system in memory: the cost without a disk.
memory    host memory that saves take, in a process that has never saved; the first save, which pins the ring, apart.
gpudirect saves and loads by the engine "cufile"; last, as libcufile may never return.

Yardsticks: pinned copies by torch, the limit of PCIe; fio, if installed, and a loop with O_DIRECT, the limit of the
disk. The file of each way is loaded back by stock tools once, and compared on the device. Peers have their best
settings too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import gpu_disk
import gpu_plan as plan
import gpu_report as report

_MIB = 1 << 20
_SLOW_BYTES_PER_S = 0.5e9  # what a disk is taken for that could not be looked at
_RING_BYTES = 64 * _MIB  # the default; FASTPERSIST_RING_BYTES says otherwise


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", metavar="DIR", help="existing directory on the disk to measure; left as it was")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu, which only rehearses (default: cuda)")
    parser.add_argument("--size-mb", type=int, metavar="MIB", help="of the state (default: about 1 s of writing)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="as far as time allows (default: 7)")
    parser.add_argument("--budget", type=float, default=300.0, metavar="S", help="time for all parts (default: 300)")
    parser.add_argument("--parts", nargs="+", choices=[*plan.SHARES], default=[*plan.SHARES], help="what to measure")
    parser.add_argument("--parameters", type=int, metavar="N", help="of the training (default: 1e9, or what fits)")
    parser.add_argument("--memory-dir", metavar="DIR", help="a tmpfs for the part tmpfs (default: that with most room)")
    parser.add_argument("--memory-mount", metavar="DIR", help="where that part mounts one, in a namespace of its own")
    parser.add_argument("--json", metavar="PATH", help="write all samples there as well")
    # What the process of a part is told:
    parser.add_argument("--run-part", choices=[*plan.SHARES], help=argparse.SUPPRESS)
    parser.add_argument("--found", help=argparse.SUPPRESS)
    parser.add_argument("--write-rate", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(words)


# ------------------------------------------------------------------------------------------------ the process of a part


def _run_part(arguments: argparse.Namespace) -> None:
    """Measure one part; write the findings to arguments.found."""
    import warnings

    import gpu_measure as measure

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
    deadline_s = time.monotonic() + arguments.budget
    found = measure.Found(arguments.found)
    device = measure.Device(arguments.device)
    import fastpersist as fp

    found.values["facts"] = device.facts() | {"fastpersist": fp.__version__}
    found.keep()
    part = {
        "save": _save_part, "tmpfs": _tmpfs_part, "load": _load_part, "overlap": _overlap_part, "memory": _memory_part,
        "gpudirect": _gpudirect_part,
    }[arguments.run_part]  # fmt: skip
    part(arguments, found, device, deadline_s)
    found.values["complete"] = True
    found.keep()


def _save_part(arguments: argparse.Namespace, found: Any, device: Any, deadline_s: float) -> None:
    import gpu_measure as measure
    import gpu_ways as ways
    import gpu_yardsticks as yardsticks

    state = measure.make_state(device, arguments.size_mb * _MIB)
    size_bytes = measure.state_bytes(state)
    disk, note = yardsticks.disk_write_rows(arguments.directory, size_bytes)
    if note:
        found.note(note)
    rows = [
        *ways.save_rows(device, state, arguments.directory, only_files_of_torch=False),
        *disk,
        yardsticks.copy_row(device, "D2H", size_bytes),
    ]
    measure.take_turns(found, device, rows, arguments.rounds, deadline_s)


def _tmpfs_part(arguments: argparse.Namespace, found: Any, device: Any, deadline_s: float) -> None:
    import gpu_measure as measure
    import gpu_ways as ways
    import gpu_yardsticks as yardsticks

    place = arguments.memory_dir or gpu_disk.memory_file_system()
    room_bytes = gpu_disk.free_bytes(place) if place else 0
    size_bytes = min(arguments.size_mb * _MIB, room_bytes // 3)
    if place is None or size_bytes < min(256 * _MIB, arguments.size_mb * _MIB):
        why = f"no room in a file system in memory: {place or 'there is none'}, {room_bytes} bytes free"
        found.row("fp.save", "ours", size_bytes)["note"] = f"not measured: {why}"
        found.note(why)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=place) as directory:
        state = measure.make_state(device, size_bytes)
        size_bytes = measure.state_bytes(state)
        disk, _ = yardsticks.disk_write_rows(directory, size_bytes)
        rows = [
            *ways.save_rows(device, state, directory, only_files_of_torch=True),
            disk[-1],
            yardsticks.copy_row(device, "D2H", size_bytes),
        ]
        found.values["directory"] = place
        measure.take_turns(found, device, rows, arguments.rounds, deadline_s)


def _load_part(arguments: argparse.Namespace, found: Any, device: Any, deadline_s: float) -> None:
    import gpu_measure as measure
    import gpu_ways as ways
    import gpu_yardsticks as yardsticks

    from fastpersist.cli.bench.load_rows import PageCache

    state = measure.make_state(device, arguments.size_mb * _MIB)
    paths = ways.written_files(state, arguments.directory, found.note)
    cold = PageCache(warm=False, whole_machine=False)
    rows = [
        *ways.load_rows(device, state, paths, cold),
        *yardsticks.disk_read_rows(paths[".pt"], cold),
        yardsticks.copy_row(device, "H2D", measure.state_bytes(state)),
    ]
    try:
        measure.take_turns(found, device, rows, arguments.rounds, deadline_s)
    finally:
        found.note(cold.describe())


def _overlap_part(arguments: argparse.Namespace, found: Any, device: Any, deadline_s: float) -> None:
    import gpu_overlap as overlap

    count = arguments.parameters
    if count is None:
        count, why = plan.overlap_parameters(
            arguments.write_rate,
            arguments.budget,
            disk_bytes=gpu_disk.free_bytes(arguments.directory),
            device_bytes=device.total_bytes(),
            host_bytes=gpu_disk.available_host_bytes(),
        )
        if why:
            found.note(f"the training has {count / 1e9:.2f} billion parameters, since there is {why}")
    overlap.measure_overlap(found, device, arguments.directory, count, min(arguments.rounds, 3), deadline_s)


def _gpudirect_part(arguments: argparse.Namespace, found: Any, device: Any, deadline_s: float) -> None:
    import gpu_measure as measure
    import gpu_ways as ways

    import fastpersist as fp
    from fastpersist.cli.bench.load_rows import PageCache

    probes = fp.engines(arguments.directory)  # loads libcufile, which no part before this one does
    found.values["facts"]["engines"] = [
        {"name": probe.name, "usable": probe.usable, "why_not": probe.why_not} for probe in probes
    ]
    found.keep()
    why_not = next((probe.why_not for probe in probes if probe.name == "cufile" and not probe.usable), "")
    if why_not:
        found.note(f"not measured: GPUDirect Storage cannot be used: {why_not}")
        return
    state = measure.make_state(device, arguments.size_mb * _MIB)
    path = ways.written_files(state, arguments.directory, found.note)[".pt"]
    place = os.path.join(arguments.directory, "saves")
    os.mkdir(place)
    rows = ways.gpudirect_rows(device, state, place, path, PageCache(warm=False, whole_machine=False))
    measure.take_turns(found, device, rows, arguments.rounds, deadline_s)


def _memory_part(arguments: argparse.Namespace, found: Any, device: Any, _: float) -> None:
    import gpu_measure as measure
    import gpu_ways as ways
    import torch

    import fastpersist as fp

    state = measure.make_state(device, arguments.size_mb * _MIB)
    path = os.path.join(arguments.directory, "state")
    small = {"small": torch.ones(1000, device=device.torch)}
    torch.save(small, path)  # what torch itself takes for the first copy from the device is not ours
    torch.load(path, map_location=device.torch)
    arena_bytes = measure.state_bytes(state) // 2
    memory: dict[str, Any] = {
        "state_bytes": measure.state_bytes(state),
        "ring_bytes": int(os.environ.get("FASTPERSIST_RING_BYTES", _RING_BYTES)),
        "arena_bytes": arena_bytes,
        "saves": {},
    }
    found.values["memory"] = memory

    def watched(name: str, save: Any) -> None:
        try:
            with measure.MemoryWatch() as watch:
                start_s = time.perf_counter()
                save()
                seconds = time.perf_counter() - start_s
            memory["saves"][name] = {"seconds": seconds, **watch.as_dict()}
        except Exception as error:  # noqa: BLE001 - one way's failure is no other's
            memory["saves"][name] = {"note": f"{type(error).__name__}: {error}"[:300]}
        finally:
            gpu_disk.remove(path)
        found.keep()

    watched("fp.save, the first", lambda: fp.save(state, path))
    watched("fp.save, the second", lambda: fp.save(state, path))

    def save_twice() -> None:
        with fp.Checkpointer(path, max_host_bytes=arena_bytes, keep=1) as checkpointer:
            for step in range(2):
                checkpointer.save(step, state)

    watched("fp.Checkpointer, max_host_bytes = half of the state", save_twice)

    def save_with_dcp() -> None:
        saver = ways.DcpSaver(device, state, path)
        saver.save()
        saver.close()

    watched("torch.save", lambda: torch.save(state, path))
    watched("dcp.async_save, pinned staging", save_with_dcp)


# ------------------------------------------------------------------------------------------------ the process of all


def _own_process(
    arguments: argparse.Namespace, part: str, budget_s: float, limit_s: float, directory: str
) -> dict[str, Any]:
    """Run a part in its own process; return its findings, even if it failed."""
    found_path, log_path = (os.path.join(directory, f"{part}.{what}") for what in ("json", "log"))
    place = os.path.join(directory, part)
    os.mkdir(place)
    words = [
        sys.executable, "-X", "faulthandler", os.path.abspath(__file__), place, "--device", arguments.device,
        "--rounds", str(arguments.rounds), "--size-mb", str(arguments.size_mb), "--budget", str(budget_s),
        "--run-part", part, "--found", found_path, "--write-rate", str(arguments.write_rate),
    ]  # fmt: skip
    if arguments.parameters is not None:
        words += ["--parameters", str(arguments.parameters)]
    if arguments.memory_dir is not None:
        words += ["--memory-dir", arguments.memory_dir]
    elif arguments.memory_mount is not None and part == "tmpfs":
        words = _with_mount(arguments.memory_mount, [*words, "--memory-dir", arguments.memory_mount])
    print(f"--- {part}: {budget_s:.0f} s, {limit_s:.0f} s at most", file=sys.stderr, flush=True)
    start_s = time.monotonic()
    with open(log_path, "w") as log:
        # A session of its own, so that whatever it has started ends with it.
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            ending = f"exit status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ending = f"ended after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with open(log_path, errors="replace") as log:
        said = log.read()
    print(said[-4000:], file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)
    found: dict[str, Any] = {"rows": {}, "values": {}, "notes": []}
    with contextlib.suppress(OSError, ValueError), open(found_path) as file:
        found = json.load(file)
    found["wall_s"] = time.monotonic() - start_s
    found["is_complete"] = found["values"].pop("complete", False)
    if not found["is_complete"]:
        found["notes"].append(f"this part is incomplete: {ending}")
        found["log_tail"] = said[-3000:]
    return found


def _with_mount(directory: str, words: list[str]) -> list[str]:
    """Return the words that run others where a tmpfs is mounted, which goes when the last process there does."""
    mounted = 'mount -t tmpfs -o size=50% tmpfs "$1" && shift && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", directory, *words]


def _choose_size(arguments: argparse.Namespace, directory: str) -> list[str]:
    """Measure the speed of the disk, and choose the size of the state by it; return notes for the reader."""
    notes = []
    probe_bytes = min((arguments.size_mb or 512) * _MIB, 512 * _MIB)
    try:
        arguments.write_rate = max(gpu_disk.probe_write_bytes_per_s(directory, probe_bytes) for _ in range(2))
    except OSError as error:
        arguments.write_rate = _SLOW_BYTES_PER_S
        notes.append(f"how fast the disk is could not be seen, and sizes are those for 0.5 GB/s: {error}")
    if arguments.size_mb is None:
        arguments.size_mb = plan.state_mib(
            arguments.write_rate, arguments.budget, gpu_disk.free_bytes(directory), gpu_disk.available_host_bytes()
        )
    return notes


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the facts that need no torch; the parts add the rest."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "cpu": report.first_value("/proc/cpuinfo", "model name") or platform.machine(),
        "core_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "directory": os.path.realpath(arguments.directory),
        "file_system": report.mount_of(os.path.realpath(arguments.directory)),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that what was made is removed, and what was found is kept


def main() -> int:
    """Measure, print, and write; return 1 if a part is incomplete."""
    arguments = _arguments()
    if arguments.run_part:
        _run_part(arguments)
        return 0
    if not os.path.isdir(arguments.directory):
        raise SystemExit(f"{arguments.directory} is no directory; name one on the disk that shall be measured")
    signal.signal(signal.SIGTERM, _end)
    started_s = time.monotonic()
    results: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]), "facts": {}, "parts": {}, "bars": [],
    }  # fmt: skip

    def keep() -> None:
        results["bars"] = report.bars(results)
        if arguments.json:
            with open(f"{arguments.json}.new", "w") as file:
                json.dump(results, file, indent=1)
            os.replace(f"{arguments.json}.new", arguments.json)

    with tempfile.TemporaryDirectory(prefix=".gpu-", dir=arguments.directory) as directory:
        results["facts"] = _facts(arguments)
        results["facts"]["notes"] = _choose_size(arguments, directory)
        results["facts"] |= {"size_mb": arguments.size_mb, "probed_write_bytes_per_s": arguments.write_rate}
        keep()
        parts = [part for part in plan.SHARES if part in arguments.parts]
        for number, part in enumerate(parts):
            left_s = arguments.budget - (time.monotonic() - started_s)
            budget_s = plan.part_budget_s(part, left_s, parts[number:])
            if budget_s is None:
                results["parts"][part] = {
                    "rows": {}, "values": {}, "notes": ["no time was left for this part"], "is_complete": False,
                }  # fmt: skip
            else:
                limit_s = plan.part_limit_s(budget_s, left_s, len(parts) - number - 1)
                results["parts"][part] = _own_process(arguments, part, budget_s, limit_s, directory)
            results["facts"] |= results["parts"][part]["values"].pop("facts", {})
            keep()
    print(report.markdown(results))
    return 0 if all(found["is_complete"] for found in results["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
