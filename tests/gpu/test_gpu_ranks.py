"""Ranks that train on GPUs: what they save together holds the bytes of each, and is loaded onto each one's device."""

from __future__ import annotations

from pathlib import Path

from support import gpu_rank_runs
from support.gpu_device import GPU
from support.spawned_ranks import run_spawned

pytestmark = GPU


def test_replicas_in_one_file(tmp_path: Path) -> None:
    run_spawned(2, gpu_rank_runs.replicas_in_one_file, tmp_path)


def test_every_step_is_saved_and_resumed_on_the_same_devices_and_on_others(tmp_path: Path) -> None:
    run_spawned(2, gpu_rank_runs.every_step, tmp_path)


def test_shards_on_devices(tmp_path: Path) -> None:
    run_spawned(2, gpu_rank_runs.sharded_states, tmp_path)
    run_spawned(1, gpu_rank_runs.one_rank_reads_what_two_have_saved, tmp_path)
