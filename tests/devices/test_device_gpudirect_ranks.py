"""Several ranks that write one file by the engine "cufile": each its own share, from a ring on its own device.

Over the doubles of the driver and of libcufile. What one process does is test_device_gpudirect.py's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_double import cuda_double
from support.cufile_double import build_cufile_double
from support.gpudirect_ranks import SIZES

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA loads the real libcufile")


def ranks_that(what: str, directory: Path) -> list[dict[str, Any]]:
    """Return what each rank has found."""
    cuda_double()
    build_cufile_double()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, "-m", "support.gpudirect_ranks", str(directory), what]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_each_rank_moves_its_share_between_the_file_and_its_device(tmp_path: Path) -> None:
    found = ranks_that("named", tmp_path)
    for rank in found:
        assert (rank["engine"], rank["is_equal"], rank["violations"]) == ("cufile", True, [])
        assert rank["host_transfer_count"] == 0
    # What is compared and what depends on other blocks is looked at by the CPU, and nothing more.
    assert all(rank["copied_to_host_bytes"] < sum(SIZES) // 4 for rank in found)
    shares = [rank["write_count"] for rank in found]
    assert min(shares) > sum(SIZES) // (1 << 16) // 4  # requests of 64 KiB
    assert (tmp_path / "auto" / "x.pt").read_bytes() == (tmp_path / "x.pt").read_bytes()


def test_with_checksums_shares_go_through_host_memory(tmp_path: Path) -> None:
    for rank in ranks_that("checksums", tmp_path):
        assert (rank["engine"], rank["is_equal"], rank["violations"]) == ("cufile", True, [])
        assert rank["host_transfer_count"] >= rank["write_count"] > 0


def test_auto_leaves_gpudirect_to_those_who_name_it(tmp_path: Path) -> None:
    for rank in ranks_that("auto", tmp_path):
        assert rank["engine"] not in ("", "cufile")
        assert rank["write_count"] == 0
        assert rank["is_equal"]


def test_shares_are_written_in_the_background_too(tmp_path: Path) -> None:
    for rank in ranks_that("async", tmp_path):
        assert rank["is_equal"]
        assert rank["violations"] == []
        assert rank["host_transfer_count"] == 0
        assert rank["write_count"] > 0


def test_checkpointer_of_ranks_takes_the_engine_that_is_named(tmp_path: Path) -> None:
    for rank in ranks_that("checkpointer", tmp_path):
        assert (rank["engine"], rank["is_equal"], rank["violations"]) == ("cufile", True, [])
        assert rank["write_count"] > 0


def test_rank_whose_device_fails_tells_the_others_and_nothing_is_published(tmp_path: Path) -> None:
    first, second = ranks_that("failure", tmp_path)
    assert "CU_FILE_IO_DISABLED (5034)" in second["error"]
    assert "rank 1" in first["error"]
    assert "x.pt" not in first["left"] + second["left"]
    assert [name for name in os.listdir(tmp_path) if name.startswith("x")] == []
