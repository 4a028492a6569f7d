"""Room in the arena: for all files of a save together, for those of the save after it, and how much a machine has."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist import _native
from fastpersist.transfer import arena as arena_module
from fastpersist.transfer.arena import Arena, ArenaOfSave, available_bytes_per_rank, available_host_bytes

MIB = 1 << 20
GIB = 1 << 30


def test_files_of_one_save_have_room_together() -> None:
    arena = ArenaOfSave(Arena())
    files = [torch.ones(20 * MIB, dtype=torch.uint8) for _ in range(4)]
    snapshots = [_native.Snapshot(arena.for_state(file.nbytes)) for file in files]
    for snapshot, file in zip(snapshots, files, strict=True):
        snapshot.add([file.data_ptr()], [file.nbytes], [_native.SourceKind.STABLE], [None])
    for snapshot in snapshots:
        snapshot.capture(_native.SourceKind.STABLE, False)  # without a writer that would make room
    assert [snapshot.counts()["stable_remaining_bytes"] for snapshot in snapshots] == [0, 0, 0, 0]
    for snapshot in snapshots:
        snapshot.close()


def test_a_limit_holds_for_all_files_of_a_save() -> None:
    arena = ArenaOfSave(Arena(30 * MIB))
    files = [torch.ones(20 * MIB, dtype=torch.uint8) for _ in range(2)]
    snapshots = [_native.Snapshot(arena.for_state(file.nbytes)) for file in files]
    for snapshot, file in zip(snapshots, files, strict=True):
        snapshot.add([file.data_ptr()], [file.nbytes], [_native.SourceKind.STABLE], [None])
        snapshot.capture(_native.SourceKind.STABLE, False)
    assert [snapshot.counts()["stable_remaining_bytes"] for snapshot in snapshots] == [0, 10 * MIB]
    for snapshot in snapshots:
        snapshot.close()


def test_a_directory_asks_for_room_for_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Recording(Arena):
        def for_state(self, state_bytes: int) -> _native.Arena:
            asked.append(state_bytes)
            return super().for_state(state_bytes)

    arena = Recording()
    for step in range(2):
        save = fp.DirectorySave(tmp_path / str(step), _arena=arena)
        for name, count in (("a.pt", 1000), ("b.pt", 500)):
            save.save({"w": torch.ones(count)}, name)
        save.publish().result(30)
    assert asked == [4000, 6000, 4000, 6000]


# --- what is available


class Files:
    """Stands in for /proc and /sys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
        real = builtins.open

        def open_file(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if not str(path).startswith(("/proc/", "/sys/")):
                return real(path, *arguments, **keywords)
            self.asked.append(str(path))
            if str(path) not in files:
                raise FileNotFoundError(path)
            return io.StringIO(files[str(path)])

        self.asked: list[str] = []
        monkeypatch.setattr(builtins, "open", open_file)


MEMINFO = {"/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable:   {8 << 20} kB\nBuffers: 1 kB\n"}
UNIFIED = "/sys/fs/cgroup"
LEGACY = "/sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (MEMINFO, 8 * GIB),
        ({**MEMINFO, "/proc/self/cgroup": "0::/\n"}, 8 * GIB),
        (
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/\n",
                f"{UNIFIED}/memory.max": f"{5 * GIB}\n",
                f"{UNIFIED}/memory.current": f"{2 * GIB}\n",
            },
            3 * GIB,
        ),
        (  # what only caches files is as good as free
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/job\n",
                f"{UNIFIED}/job/memory.max": f"{5 * GIB}\n",
                f"{UNIFIED}/job/memory.current": f"{5 * GIB}\n",
                f"{UNIFIED}/job/memory.stat": f"anon {GIB}\nfile {4 * GIB}\nshmem {GIB}\n"
                f"inactive_file {2 * GIB}\nactive_file {GIB}\nworkingset_refault_file 7\n",
            },
            3 * GIB,
        ),
        (
            {
                **MEMINFO,
                "/proc/self/cgroup": "7:memory:/job\n",
                f"{LEGACY}/job/memory.limit_in_bytes": f"{5 * GIB}\n",
                f"{LEGACY}/job/memory.usage_in_bytes": f"{5 * GIB}\n",
                f"{LEGACY}/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
            },
            2 * GIB,
        ),
        (  # the parent's limit counts, and "max" is none
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/user.slice/job\n",
                f"{UNIFIED}/user.slice/job/memory.max": "max\n",
                f"{UNIFIED}/user.slice/job/memory.current": f"{GIB}\n",
                f"{UNIFIED}/user.slice/memory.max": f"{6 * GIB}\n",
                f"{UNIFIED}/user.slice/memory.current": f"{5 * GIB}\n",
            },
            GIB,
        ),
        (  # over its limit: nothing, not less than nothing
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/job\n",
                f"{UNIFIED}/job/memory.max": f"{GIB}\n",
                f"{UNIFIED}/job/memory.current": f"{2 * GIB}\n",
            },
            0,
        ),
        (  # the older hierarchy, among others; an unlimited one has a huge number
            {
                **MEMINFO,
                "/proc/self/cgroup": "9:cpu,cpuacct:/a\n7:hugetlb,memory:/docker/b:c\n1:name=systemd:/x\n0::/\n",
                f"{LEGACY}/docker/b:c/memory.limit_in_bytes": f"{4 * GIB}\n",
                f"{LEGACY}/docker/b:c/memory.usage_in_bytes": f"{2 * GIB}\n",
                f"{LEGACY}/memory.limit_in_bytes": "9223372036854771712\n",
                f"{LEGACY}/memory.usage_in_bytes": f"{9 * GIB}\n",
            },
            2 * GIB,
        ),
        (  # inside a container the group's own path may not be there, its root is
            {
                **MEMINFO,
                "/proc/self/cgroup": "0::/../../host/path\n",
                f"{UNIFIED}/memory.max": f"{2 * GIB}\n",
                f"{UNIFIED}/memory.current": "0\n",
            },
            2 * GIB,
        ),
        ({**MEMINFO, "/proc/self/cgroup": "0::/job\n", f"{UNIFIED}/job/memory.max": "garbage\n"}, 8 * GIB),
    ],
)
def test_available_memory_is_what_the_tightest_limit_leaves(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], available: int
) -> None:
    Files(monkeypatch, files)
    assert available_host_bytes() == available


def test_without_proc_there_is_a_number_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    Files(monkeypatch, {})
    assert available_host_bytes() > 0


def test_available_memory_of_this_machine_is_plausible() -> None:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 <= available_host_bytes() <= total_bytes
    assert Path("/proc/meminfo").exists()


# --- the share of a rank


@pytest.mark.parametrize(
    ("variable", "met_count", "count"),
    [("4", 1, 4), ("1", 1, 1), ("2", 8, 2), (None, 1, 1), (None, 3, 3)]
    + [(nonsense, met, met) for nonsense in ("", "0", "x", "-2", "1.5", "²") for met in (1, 3)],
)
def test_available_memory_is_shared_out_among_the_ranks_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, met_count: int, count: int
) -> None:
    monkeypatch.setattr(arena_module, "available_host_bytes", lambda: 12 * GIB)
    monkeypatch.setattr(arena_module, "_met_count", 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if variable is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    for met in (1, met_count, 1):  # a smaller group may be a part of the machine's ranks
        arena_module.note_ranks_of_machine(met)
    assert available_bytes_per_rank() == 12 * GIB // count


def test_an_arena_takes_half_of_the_share_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "available_host_bytes", lambda: 96 * MIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    state = torch.ones(64 * MIB, dtype=torch.uint8)
    for memory, taken_bytes in ((Arena(), 16 * MIB), (Arena(40 * MIB), 40 * MIB)):
        native = memory.for_state(state.nbytes)
        snapshot = _native.Snapshot(native)
        snapshot.add([state.data_ptr()], [state.nbytes], [_native.SourceKind.STABLE], [None])
        snapshot.capture(_native.SourceKind.STABLE, False)
        assert native.used_bytes == taken_bytes
        snapshot.close()
