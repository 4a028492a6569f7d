"""Arguments that make no sense are refused before anything is done, with what was meant; paths of users are paths."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp
from fastpersist.errors import ConfigError

STATE = {"weight": torch.arange(5.0)}

TAKING_PATHS: dict[str, Callable[[Any], object]] = {
    "Checkpointer": fp.Checkpointer,
    "save": lambda path: fp.save(STATE, path),
    "save_async": lambda path: fp.save_async(STATE, path),
    "DirectorySave": fp.DirectorySave,
    "load": fp.load,
    "load_into": lambda path: fp.load_into(path, STATE),
    "verify": fp.verify,
    "inspect": fp.inspect,
}


@pytest.fixture(params=TAKING_PATHS)
def take(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], object]:
    """Return a function that is given a path, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return TAKING_PATHS[request.param]


# --- paths


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "gs://bucket/run.pt", "file:///run.pt", Path("s3://bucket/run"), "hdfs://host:9000/x"]
)
def test_url_is_refused_and_makes_no_directory(take: Callable[[Any], object], url: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="URL"):
        take(url)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (b"run.pt", r"os\.fsdecode\(b'run\.pt'\)"),
        (5, "not a value of type int"),
        (None, "not a value of type NoneType"),
        ("", "names no file"),
        ("a\0b", "names no file"),
        (STATE, "not a value of type dict"),
    ],
    ids=["bytes", "int", "none", "empty", "nul", "dict"],
)
def test_what_is_no_path_is_refused(take: Callable[[Any], object], path: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        take(path)
    assert os.listdir(tmp_path) == []


def test_home_is_expanded_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    fp.save(STATE, "~/a.pt")
    fp.save_async(STATE, Path("~/b.pt")).result()
    with fp.DirectorySave("~/c") as files:
        files.save(STATE, "state.pt")
        files.publish().result()
    with fp.Checkpointer("~/run") as checkpoints:
        checkpoints.save(1, STATE)
    assert sorted(os.listdir(home)) == ["a.pt", "b.pt", "c", "run"]
    assert os.listdir(elsewhere) == []
    assert torch.equal(fp.load("~/a.pt")["weight"], STATE["weight"])
    target = {"weight": torch.zeros(5)}
    fp.load_into("~/b.pt", target)
    assert torch.equal(target["weight"], STATE["weight"])
    assert fp.verify("~/c").ok
    assert fp.inspect("~/run").path == str(home / "run")


def test_directory_with_the_name_of_a_scheme_can_be_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    fp.save(STATE, "./s3:/a.pt")
    assert torch.equal(fp.load("./s3:/a.pt")["weight"], STATE["weight"])
    fp.save(STATE, "epoch:1.pt")  # no scheme: no slash behind the colon
    assert (tmp_path / "epoch:1.pt").is_file()


@pytest.mark.parametrize("below", ["", "run", "run/a"])
def test_file_as_root_is_refused_at_once(tmp_path: Path, below: str) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="file"):
        fp.Checkpointer(tmp_path / "model.pt" / below)


def test_root_that_is_a_link_to_a_directory_is_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with fp.Checkpointer(tmp_path / "link") as checkpoints:
        checkpoints.save(1, STATE)
    assert (tmp_path / "real" / "step-00000001").is_dir()
