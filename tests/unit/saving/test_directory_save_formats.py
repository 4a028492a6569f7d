"""DirectorySave: the format of each file, metadata of safetensors, and directories of other programs in its place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from support.filesystems import FullFor, KillingFilesystem
from support.forking import Child, Report
from support.runs import Run, copied, held_writers, hidden_names
from support.sameness import assert_same
from support.training import PATIENCE_S

import fastpersist as fp
from fastpersist.commit.filesystem import Filesystem, using

DISK = settings(max_examples=25)

STATE = {"weight": torch.arange(3000.0), "bias": torch.arange(7)}


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """One directory for all examples: tmp_path would be one per test and function-scoped."""
    with tempfile.TemporaryDirectory(prefix="fastpersist-formats-") as name:
        yield Path(name)


def tree(path: Path) -> dict[str, bytes | None]:
    """Return all that is below a path: the bytes of files, None for directories."""
    return {str(found.relative_to(path)): None if found.is_dir() else found.read_bytes() for found in path.rglob("*")}


# --- format ---


@pytest.mark.parametrize("name", ["model.pt", "model", "model.safetensors", "deep/er/model.bin"])
@pytest.mark.parametrize("file_format", ["auto", "torch", "safetensors"])
def test_format_is_what_was_asked_for_and_the_name_decides_only_in_auto(
    tmp_path: Path, name: str, file_format: str, leak_check: None
) -> None:
    with fp.DirectorySave(tmp_path / "a") as files:
        files.save(STATE, name, format=file_format)
        files.publish().result(PATIENCE_S)
    path = tmp_path / "a" / name
    if file_format == "torch" or (file_format == "auto" and not name.endswith(".safetensors")):
        with open(path, "rb") as file:  # by the name torch.load would take it for safetensors
            assert_same(torch.load(file), STATE)
    else:
        assert_same(dict(sorted(load_file(path).items())), dict(sorted(STATE.items())))
    assert fp.verify(tmp_path / "a").ok
    fp.save(STATE, tmp_path / Path(name).name, format=file_format)
    assert path.read_bytes() == (tmp_path / Path(name).name).read_bytes(), "the file that save would have written"


choices = st.lists(
    st.tuples(st.sampled_from([".pt", ".safetensors", ""]), st.sampled_from(["auto", "torch", "safetensors"])),
    min_size=1,
    max_size=6,
)


@DISK
@given(choices, st.booleans())
def test_files_of_all_formats_lie_side_by_side(directory: Path, files: list[tuple[str, str]], owned: bool) -> None:
    run = Run((5000, 7)).advance()
    expected = copied(dict(run.model.state_dict()))
    with fp.DirectorySave(directory / "mixed", overwrite=True) as save:
        for number, (suffix, file_format) in enumerate(files):
            optimizer = run.optimizer if owned else None
            save.save(dict(run.model.state_dict()), f"{number}{suffix}", optimizer, format=file_format)
        pending = save.publish(durable=False)
    run.advance()
    pending.result(PATIENCE_S)
    assert fp.verify(directory / "mixed").ok
    for number, (suffix, _) in enumerate(files):
        loaded = fp.load(directory / "mixed" / f"{number}{suffix}", verify=True)
        assert_same({name: loaded[name] for name in expected}, expected)
    assert sorted(os.listdir(directory)) == ["mixed"]


# --- metadata ---


texts = st.text(max_size=12)


@DISK
@given(st.dictionaries(texts, texts, max_size=4))
def test_any_metadata_comes_back(directory: Path, metadata: dict[str, str]) -> None:
    given_metadata = dict(metadata)
    with fp.DirectorySave(directory / "metadata", overwrite=True) as files:
        files.save(STATE, "model.safetensors", metadata=given_metadata)
        files.save(STATE, "model.bin", format="safetensors", metadata=given_metadata)
        given_metadata["later"] = "too late"  # it is taken when save is called
        files.publish(durable=False).result(PATIENCE_S)
    for name in ("model.safetensors", "model.bin"):
        assert fp.inspect(directory / "metadata" / name).metadata == metadata
        with safe_open(directory / "metadata" / name, "pt") as file:
            assert metadata.items() <= (file.metadata() or {}).items()


REFUSED: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "unknown format": (STATE, "a.pt", {"format": "zip"}, "not 'zip'"),
    "metadata of a torch file": (STATE, "a.pt", {"metadata": {"a": "b"}}, "metadata="),
    "empty metadata of a torch file": (STATE, "a.pt", {"metadata": {}}, "metadata="),
    "metadata of format torch": (STATE, "a.safetensors", {"format": "torch", "metadata": {"a": "b"}}, "metadata="),
    "a list": ([torch.ones(1)], "a.pt", {"format": "safetensors"}, "not list"),
    "shared memory": (dict.fromkeys("ab", STATE["weight"]), "a.pt", {"format": "safetensors"}, "share memory"),
    "a stride": ({"t": torch.ones(2, 3).T}, "a.pt", {"format": "safetensors"}, "not contiguous"),
    "a number": ({"t": 1.5}, "a.safetensors", {}, "it is float"),
}


@pytest.mark.parametrize(("obj", "name", "options", "match"), REFUSED.values(), ids=REFUSED)
def test_refused_file_takes_nothing_with_it_and_its_name_stays_free(
    tmp_path: Path, obj: Any, name: str, options: dict[str, Any], match: str, leak_check: None
) -> None:
    with fp.DirectorySave(tmp_path / "a") as files:
        files.save(STATE, "before.pt")
        with pytest.raises(fp.ConfigError, match=match):
            files.save(obj, name, **options)
        files.save(STATE, name)
        files.publish().result(PATIENCE_S)
    assert sorted(tree(tmp_path / "a")) == sorted(["MANIFEST.json", "before.pt", name])
    assert fp.verify(tmp_path / "a").ok


# --- what is in the place ---


def make_nothing(path: Path) -> None:
    pass


def make_foreign(path: Path) -> None:
    (path / "global_step7").mkdir(parents=True)
    (path / "global_step7" / "model.bin").write_bytes(b"of another program")
    (path / "latest").write_text("global_step7")


def make_hidden_only(path: Path) -> None:
    path.mkdir()
    (path / ".keep").write_text("")


def make_ours(path: Path) -> None:
    with fp.DirectorySave(path) as files:
        files.add_bytes("old", b"old")
        files.publish().result(PATIENCE_S)


def make_damaged_ours(path: Path) -> None:
    make_ours(path)
    (path / "MANIFEST.json").write_bytes(b"{")


def make_file(path: Path) -> None:
    path.write_text("a file")


def make_link(path: Path) -> None:
    make_foreign(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


ALWAYS: tuple[Any, ...] = (False, True, "foreign")
PLACES: dict[str, tuple[Callable[[Path], None], tuple[Any, ...]]] = {
    "nothing": (make_nothing, ALWAYS),
    "empty": (Path.mkdir, (True, "foreign")),
    "ours": (make_ours, (True, "foreign")),
    "damaged": (make_damaged_ours, (True, "foreign")),
    "foreign": (make_foreign, ("foreign",)),
    "hidden": (make_hidden_only, ("foreign",)),
    "file": (make_file, ()),
    "link": (make_link, ()),
}
places = pytest.mark.parametrize(("make", "replaceable"), PLACES.values(), ids=PLACES)
overwrites = pytest.mark.parametrize("overwrite", ALWAYS)


def publish_new(path: Path, overwrite: Any, *, between: Callable[[], None] = lambda: None) -> None:
    with fp.DirectorySave(path, overwrite=overwrite) as files:
        files.save(STATE, "model.pt")
        between()
        files.publish().result(PATIENCE_S)


def is_new(path: Path) -> bool:
    return sorted(os.listdir(path)) == ["MANIFEST.json", "model.pt"] and fp.verify(path).ok


@overwrites
@places
def test_what_may_be_replaced_is_what_was_said(
    tmp_path: Path, make: Callable[[Path], None], replaceable: tuple[Any, ...], overwrite: Any, leak_check: None
) -> None:
    path = tmp_path / "a"
    make(path)
    before = tree(tmp_path)
    if overwrite in replaceable:
        publish_new(path, overwrite)
        assert is_new(path)
        assert os.listdir(tmp_path) == ["a"]
    else:
        with pytest.raises(fp.ConfigError, match=str(path)):
            publish_new(path, overwrite)
        assert tree(tmp_path) == before


@overwrites
@places
def test_what_appears_meanwhile_may_be_replaced_on_the_same_terms(
    tmp_path: Path, make: Callable[[Path], None], replaceable: tuple[Any, ...], overwrite: Any, leak_check: None
) -> None:
    path = tmp_path / "a"
    seen = {}

    def appear() -> None:
        make(path)
        seen.update({name: data for name, data in tree(tmp_path).items() if not name.startswith(".a.pending-")})

    if overwrite in replaceable:
        publish_new(path, overwrite, between=appear)
        assert is_new(path)
        assert os.listdir(tmp_path) == ["a"]
    else:
        with pytest.raises(fp.ConfigError, match=str(path)):
            publish_new(path, overwrite, between=appear)
        assert tree(tmp_path) == seen


def test_foreign_directory_is_there_until_the_new_one_is(tmp_path: Path, leak_check: None) -> None:
    path = tmp_path / "a"
    make_foreign(path)
    path.chmod(0o710)
    before = tree(path)
    with held_writers() as writers:
        files = fp.DirectorySave(path, overwrite="foreign")
        files.save(STATE, "model.pt")
        pending = files.publish()
        assert writers.reached.wait(PATIENCE_S)
        assert tree(path) == before
    pending.result(PATIENCE_S)
    assert is_new(path)
    assert path.stat().st_mode & 0o777 == 0o710
    assert os.listdir(tmp_path) == ["a"]


def test_foreign_directory_that_was_given_up_is_as_it_was(tmp_path: Path, leak_check: None) -> None:
    make_foreign(tmp_path / "a")
    before = tree(tmp_path)
    with fp.DirectorySave(tmp_path / "a", overwrite="foreign") as files:
        files.save(STATE, "model.pt")
    assert tree(tmp_path) == before


class WithoutExchange(Filesystem):
    """A file system that cannot let two names change places."""

    def exchange(self, first: str, second: str) -> None:
        raise fp.UnsupportedError(f"exchanging {first} with {second}: Invalid argument")


@pytest.mark.parametrize(
    ("disk", "kind"), [(FullFor, fp.NoSpaceError), (WithoutExchange, fp.FastPersistError)], ids=["full", "no exchange"]
)
def test_foreign_directory_survives_a_save_that_fails(
    tmp_path: Path, disk: type[Filesystem], kind: type[Exception], leak_check: None
) -> None:
    make_foreign(tmp_path / "a")
    before = tree(tmp_path)
    with using(disk()), pytest.raises(kind):
        publish_new(tmp_path / "a", "foreign")
    assert tree(tmp_path) == before


KILLS = [
    ("make_directory", "after"),
    ("allocate", "before"),
    ("sync", "after"),
    ("exchange", "before"),
    ("exchange", "after"),
    ("unlink", "before"),
    ("unlink", "after"),
    ("remove_directory", "after"),
]


@pytest.mark.parametrize(("operation", "when"), KILLS, ids=[" ".join(kill) for kill in KILLS])
def test_killed_replacement_leaves_the_foreign_directory_or_the_new_one(
    tmp_path: Path, operation: str, when: Any
) -> None:
    path = tmp_path / "a"
    make_foreign(path)
    before = tree(path)

    def work(report: Report) -> None:
        with using(KillingFilesystem(operation, when)):
            publish_new(path, "foreign")

    with Child(work) as child:
        ending = child.wait()
    assert ending.signal == 9, ending.message
    exchanged = KILLS.index((operation, when)) >= KILLS.index(("exchange", "after"))
    assert is_new(path) if exchanged else tree(path) == before
    publish_new(path, "foreign")
    assert is_new(path)
    assert hidden_names(tmp_path) == []


def test_an_unknown_overwrite_is_refused_and_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(fp.ConfigError, match="'forein'"):
        fp.DirectorySave(tmp_path / "one", overwrite="forein")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["one"]
