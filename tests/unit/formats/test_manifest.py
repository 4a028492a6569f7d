"""Manifests: what is written is read back, in the format's bytes; hostile input is refused, soon and by name."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpersist.errors import ConfigError, FormatError
from fastpersist.formats.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    check_file_name,
    encode_manifest,
    parse_manifest,
    step_name,
    step_of,
)

SMALL = CheckpointManifest((FileEntry("state.pt", 5, 7),), 100, 1.5, {"loss": 2.0}, {"torch": "2.13"}, {}, {})

GOLDEN = """{
  "format": 1,
  "step": 100,
  "time_s": 1760000000.25,
  "files": [
    {"name": "rank-00001.pt", "size_bytes": 0},
    {"name": "state.pt", "size_bytes": 9223372036854775807, "crc32": "0000000a"},
    {"name": "名前/a.b", "size_bytes": 1, "crc32": "ffffffff"}
  ],
  "metrics": {
    "loss": 2.5,
    "worst": "nan",
    "up": "inf",
    "down": "-inf"
  },
  "versions": {
    "fastpersist": "0.1.0"
  },
  "host": {
    "name": "a",
    "cpu_count": 2
  },
  "stats": {}
}
"""


def content_of(manifest: CheckpointManifest = SMALL) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(encode_manifest(manifest))
    return content


def parse(content: object) -> CheckpointManifest:
    return parse_manifest(json.dumps(content).encode(), "root/step-00000100/MANIFEST.json")


# --------------------------------------------------------------------------------------------- round trips


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PARTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\:"), min_size=1, max_size=4)
NAMES = (
    st.lists(PARTS.filter(lambda part: part not in (".", "..")), min_size=1, max_size=3)
    .filter(lambda parts: parts[0] != MANIFEST_NAME)
    .map("/".join)
)
SIZES = st.sampled_from([0, (1 << 63) - 1]) | st.integers(0, (1 << 63) - 1)
CRCS = st.none() | st.integers(0, (1 << 32) - 1)
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NUMBERS = st.floats(allow_nan=False)  # NaN is not equal to itself, and has a test of its own


def without_clashes(names: list[str]) -> list[str]:
    directories = {name[:at] for name in names for at, character in enumerate(name) if character == "/"}
    return [name for name in names if name not in directories]


MANIFESTS = st.builds(
    CheckpointManifest,
    files=st.lists(NAMES, unique=True, max_size=6)
    .map(without_clashes)
    .flatmap(lambda names: st.tuples(*(st.builds(FileEntry, st.just(name), SIZES, CRCS) for name in names))),
    step=st.none() | SIZES,
    time_s=st.floats(0, 2**35),
    metrics=st.dictionaries(TEXTS, NUMBERS, max_size=3),
    versions=st.dictionaries(TEXTS, TEXTS, max_size=3),
    host=st.dictionaries(TEXTS, TEXTS | INTEGERS, max_size=3),
    stats=st.dictionaries(TEXTS, TEXTS | INTEGERS | FINITE, max_size=3),
    commit_number=st.none() | SIZES,
)


@given(MANIFESTS)
def test_what_is_encoded_is_parsed_back(manifest: CheckpointManifest) -> None:
    data = encode_manifest(manifest)
    found = parse_manifest(data, "x")
    assert found == replace(manifest, files=tuple(sorted(manifest.files, key=lambda entry: entry.name)))
    assert encode_manifest(found) == data
    assert {name: type(value) for name, value in found.stats.items()} == {
        name: type(value) for name, value in manifest.stats.items()
    }


@given(MANIFESTS, st.randoms())
def test_order_of_the_files_does_not_matter(manifest: CheckpointManifest, random: Any) -> None:
    files = list(manifest.files)
    random.shuffle(files)
    assert encode_manifest(replace(manifest, files=tuple(files))) == encode_manifest(manifest)


def test_format_1_in_bytes() -> None:
    manifest = CheckpointManifest(
        (FileEntry("state.pt", (1 << 63) - 1, 10), FileEntry("rank-00001.pt", 0), FileEntry("名前/a.b", 1, 0xFFFFFFFF)),
        100,
        1760000000.25,
        {"loss": 2.5, "worst": math.nan, "up": math.inf, "down": -math.inf},
        {"fastpersist": "0.1.0"},
        {"name": "a", "cpu_count": 2},
        {},
    )
    assert encode_manifest(manifest).decode() == GOLDEN
    numbered = GOLDEN.replace(".25,\n", '.25,\n  "commit_number": 3,\n')
    assert encode_manifest(replace(manifest, commit_number=3)).decode() == numbered
    assert parse_manifest(numbered.encode(), "x").commit_number == 3
    found = parse_manifest(GOLDEN.encode(), "x")
    assert found.commit_number is None
    assert math.isnan(found.metrics.pop("worst"))
    assert found.metrics == {"loss": 2.5, "up": math.inf, "down": -math.inf}
    assert [entry.name for entry in found.files] == ["rank-00001.pt", "state.pt", "名前/a.b"]


def test_whole_metrics_become_floats() -> None:
    found = parse_manifest(encode_manifest(replace(SMALL, metrics={"tokens": 3})), "x")
    assert type(found.metrics["tokens"]) is float


def test_statistic_that_is_no_finite_number_does_not_fail_a_save() -> None:
    found = parse_manifest(encode_manifest(replace(SMALL, stats={"rate": math.inf, "share": math.nan})), "x")
    assert found.stats == {"rate": "inf", "share": "nan"}


def test_keys_of_a_later_minor_version_are_ignored() -> None:
    content = content_of()
    content["later"] = {"a": [{"b": [1, 2.5, None, True]}]}
    content["files"][0]["later"] = "x"
    assert parse(content) == SMALL


def test_whitespace_and_order_of_keys_are_free() -> None:
    content = content_of()
    assert parse_manifest(json.dumps(dict(reversed(content.items())), indent=7).encode(), "x") == SMALL


def test_missing_crc_may_be_null() -> None:
    content = content_of()
    content["files"][0]["crc32"] = None
    assert parse(content).files == (FileEntry("state.pt", 5),)


@pytest.mark.slow  # parses manifests of 100,000 files
def test_one_hundred_thousand_files_are_read_and_one_more_is_not() -> None:
    files = tuple(FileEntry(f"layer-{i % 100:03d}/[shard {i:06d}].pt", i, i) for i in range(100_000))
    data = encode_manifest(replace(SMALL, files=files))
    assert len(parse_manifest(data, "x").files) == 100_000
    with pytest.raises(ConfigError, match="more than 100000"):
        encode_manifest(replace(SMALL, files=(*files, FileEntry("one.more", 0))))


# --------------------------------------------------------------------------------------------- refusals on writing


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (FileEntry("../state.pt", 1),)},
        {"files": (FileEntry("a", 1), FileEntry("a", 1))},
        {"files": (FileEntry("a", 1), FileEntry("a.b", 1), FileEntry("a/b", 1))},
        {"files": (FileEntry(3, 1),)},  # type: ignore[arg-type]
        {"files": (FileEntry("a", -1),)},
        {"files": (FileEntry("a", 1 << 63),)},
        {"files": (FileEntry("a", True),)},
        {"files": (FileEntry("a", 1.0),)},  # type: ignore[arg-type]
        {"files": (FileEntry("a", 1, -1),)},
        {"files": (FileEntry("a", 1, 1 << 32),)},
        {"files": (FileEntry("a", 1, 1.5),)},  # type: ignore[arg-type]
        {"files": ("a",)},
        {"files": None},
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"time_s": math.nan},
        {"time_s": math.inf},
        {"time_s": -1.0},
        {"commit_number": -1},
        {"commit_number": 1 << 63},
        {"commit_number": 1.0},
        {"time_s": None},
        {"metrics": {"loss": None}},
        {"metrics": {"loss": True}},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": 10**400}},
        {"metrics": {1: 2.0}},
        {"metrics": None},
        {"metrics": {"\ud800": 1.0}},
        {"versions": {"torch": 2}},
        {"versions": {"torch": "\udc80"}},
        {"versions": {"torch": "x" * (17 << 20)}},
        {"host": {"cpu_count": 1 << 63}},
        {"host": {"load": 1.5}},
        {"host": {"name": None}},
        {"stats": {"a": [1]}},
        {"stats": {"a": False}},
        {"stats": {"a": object()}},
    ],
    ids=lambda changes: f"{changes}"[:60].partition(" at 0x")[0],
)
def test_what_could_not_be_read_is_not_written(changes: dict[str, Any]) -> None:
    encode_manifest(SMALL)  # without the change it is writable
    with pytest.raises(ConfigError):
        encode_manifest(replace(SMALL, **changes))


# --------------------------------------------------------------------------------------------- refusals on reading


VALID = encode_manifest(SMALL)


def with_(key: str, value: object) -> bytes:
    return json.dumps({**content_of(), key: value}).encode()


def with_raw(key: str, value: str) -> bytes:
    """Spell a value as Python's encoder would not."""
    content = {name: json.dumps(known) for name, known in content_of().items()}
    content[key] = value
    return ("{" + ",".join(f'"{name}":{spelled}' for name, spelled in content.items()) + "}").encode()


def with_file(**fields: object) -> bytes:
    return with_("files", [{"name": "a", "size_bytes": 1, **fields}])


def with_files(*names: str) -> bytes:
    return with_("files", [{"name": name, "size_bytes": 1} for name in names])


# The words are part of the message: each is refused for its own reason, not for another one further on.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "never finished"),
    "white space": (b" \n" * 4096, "never finished"),
    "zeros": (bytes(4096), "never finished"),
    "no JSON": (b"state.pt 5", "Expecting value"),
    "cut off": (VALID[: len(VALID) // 2], "line"),
    "bytes behind it": (VALID + b"{}", "Extra data"),
    "byte order mark": (b"\xef\xbb\xbf" + VALID, "BOM"),
    "UTF-16": (VALID.decode().encode("utf-16"), "utf-8"),
    "UTF-16 without a mark": (VALID.decode().encode("utf-16-le"), "line"),
    "no UTF-8": (VALID.replace(b"torch", b"t\xffrch"), "utf-8"),
    "overlong UTF-8": (VALID.replace(b"torch", b"t\xc0\xafrch"), "utf-8"),
    "surrogate in UTF-8": (VALID.replace(b"torch", b"t\xed\xa0\x80rch"), "utf-8"),
    "a list": (b"[]", "no object"),
    "a number": (b"1", "no object"),
    "null": (b"null", "no object"),
    "a string": (b'"format"', "no object"),
    "an empty object": (b"{}", "format"),
    "too long": (b" " * (MANIFEST_LIMIT_BYTES + 1), "longer than"),
    "deep lists": (b"[" * 1_000_000, "nested"),
    "deep objects": (b'{"a":' * 1_000_000, "nested"),
    "deep and closed": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    "deep behind an escaped quote": (rb'["\\\"",' + b"[" * 100_000, "nested"),
    "deep behind escaped backslashes": (rb'["\\\\",' + b"[" * 100_000, "nested"),
    "33 deep": (with_("later", json.loads("[" * 32 + "]" * 32)), "nested"),
    "millions of lists": (with_raw("later", "[" + "[]," * 5_000_000 + "0]"), "too many values"),
    "millions of numbers": (with_raw("later", "[" + "0," * 8_000_000 + "0]"), "too many values"),
    "millions of keys": (with_raw("later", "{" + '"":0,' * 3_000_000 + '"":0}'), "too many values"),
    "millions of quotes": (b'"' * (16 << 20), "too many values"),
    "millions of escaped quotes": (b'"' + b'\\"' * (8 << 20), "longer than"),
    "a string without an end": (b'"' + b'\\"' * ((8 << 20) - 1), "Unterminated"),
    "millions of backslashes": (b'"' + b"\\" * ((16 << 20) - 1), "line"),
    "no format": (json.dumps({k: v for k, v in content_of().items() if k != "format"}).encode(), "format"),
    "format 0": (with_("format", 0), "format 0"),
    "format 2": (with_("format", 2), "upgrade"),
    "format 2 and nothing that format 1 knows": (b'{"format": 2}', "upgrade"),
    "format true": (with_("format", True), "format"),
    "format 1.0": (with_("format", 1.0), "format"),
    "format as text": (with_("format", "1"), "format"),
    "a huge format": (with_raw("format", "1" * 10_000_000), "digits"),
    "key twice": (VALID.replace(b'"step": 100', b'"step": 100, "step": 200'), "twice"),
    "key twice in a file": (VALID.replace(b'"size_bytes": 5', b'"size_bytes": 5, "size_bytes": 6'), "twice"),
    "key twice by an escape": (VALID.replace(b'"step": 100', rb'"step": 100, "\u0073tep": 200'), "twice"),
    "key twice where nobody looks": (with_raw("later", '[{"a": 1, "a": 2}]'), "twice"),
    "no step": (json.dumps({k: v for k, v in content_of().items() if k != "step"}).encode(), "step"),
    "negative step": (with_("step", -1), "step"),
    "step of 2**63": (with_("step", 1 << 63), "step"),
    "step true": (with_("step", True), "step"),
    "step 1.0": (with_("step", 1.0), "step"),
    "step 1e2": (with_raw("step", "1e2"), "step"),
    "step as text": (with_("step", "1"), "step"),
    "step of 10 million digits": (with_raw("step", "9" * 10_000_000), "digits"),
    "step of 5000 digits": (with_raw("step", "9" * 5000), "digits"),
    "number of 41 digits where nobody looks": (with_raw("later", "1" * 41), "41 digits"),
    "no time": (with_("time_s", None), "time_s"),
    "negative number of a commit": (with_("commit_number", -1), "commit_number"),
    "number of a commit true": (with_("commit_number", True), "commit_number"),
    "number of a commit as text": (with_("commit_number", "1"), "commit_number"),
    "negative time": (with_("time_s", -1), "time_s"),
    "time of no calendar": (with_("time_s", 1e300), "time_s"),
    "time true": (with_("time_s", True), "time_s"),
    "time NaN": (with_("time_s", math.nan), "NaN"),
    "time Infinity": (with_("time_s", math.inf), "Infinity"),
    "time beyond floats": (with_raw("time_s", "1e999"), "too large"),
    "time of 10 million digits": (with_raw("time_s", "1." + "0" * 10_000_000), "characters"),
    "time of an exponent of 10 million digits": (with_raw("time_s", "1e" + "9" * 10_000_000), "characters"),
    "NaN where nobody looks": (with_("later", math.nan), "NaN"),
    "no files": (json.dumps({k: v for k, v in content_of().items() if k != "files"}).encode(), "files"),
    "files are an object": (with_("files", {"a": 1}), "files"),
    "files are text": (with_("files", "state.pt"), "files"),
    "a file is text": (with_("files", ["state.pt"]), "state.pt"),
    "a file is null": (with_("files", [None]), "None"),
    "a file is a list": (with_("files", [["a", 1]]), "list"),
    "100,001 files": (with_("files", [0] * 100_001), "100001 files"),
    "no name": (with_("files", [{"size_bytes": 1}]), "name"),
    "name is a number": (with_file(name=1), "name"),
    "name is a list": (with_file(name=["a"]), "name"),
    "no size": (with_("files", [{"name": "a"}]), "size"),
    "negative size": (with_file(size_bytes=-1), "size"),
    "size of 2**63": (with_file(size_bytes=1 << 63), "size"),
    "size true": (with_file(size_bytes=True), "size"),
    "size 1.0": (with_file(size_bytes=1.0), "size"),
    "size as text": (with_file(size_bytes="1"), "size"),
    "CRC is a number": (with_file(crc32=7), "CRC"),
    "CRC is false": (with_file(crc32=False), "CRC"),
    "CRC in capitals": (with_file(crc32="0000000A"), "CRC"),
    "CRC of nine digits": (with_file(crc32="000000000"), "CRC"),
    "CRC with a sign": (with_file(crc32="-0000001"), "CRC"),
    "CRC in other digits": (with_file(crc32="０000000a"), "CRC"),
    "CRC and a newline": (with_file(crc32="0000000a\n"), "CRC"),
    "CRC of 10 MB": (with_file(crc32="0" * 10_000_000), "CRC"),
    "absolute name": (with_files("/etc/passwd"), "absolute"),
    "dots": (with_files("a/../../b"), "'..'"),
    "dots by escapes": (with_raw("files", r'[{"name": "\u002e\u002e\u002fb", "size_bytes": 1}]'), "'..'"),
    "NUL in a name": (with_files("a\0b"), "control"),
    "surrogate in a name": (with_raw("files", r'[{"name": "\ud800", "size_bytes": 1}]'), "UTF-8"),
    "name of 10 MB": (with_files("x" * 10_000_000), "longer"),
    "name of control characters": (with_files("\x01" * 5000), "longer"),
    "name of 10 MB of slashes": (with_files("/" * 10_000_000), "longer"),
    "the manifest itself": (with_files(MANIFEST_NAME), "is the manifest"),
    "name twice": (with_files("a", "b", "a"), "'a' occurs twice"),
    "a file in a file": (with_files("a", "a.b", "a-b", "a!", "a/b"), "'a' is a file and a directory"),
    "a file in a file, deeper": (with_files("a/b/c/d", "a/b", "c"), "'a/b' is a file and a directory"),
    "no metrics": (with_("metrics", None), "metrics"),
    "metrics are a list": (with_("metrics", []), "metrics"),
    "metric is null": (with_("metrics", {"loss": None}), "loss"),
    "metric is true": (with_("metrics", {"loss": True}), "loss"),
    "metric is text": (with_("metrics", {"loss": "NaN"}), "loss"),
    "metric is NaN": (with_("metrics", {"loss": math.nan}), "NaN"),
    "metric is beyond floats": (with_raw("metrics", '{"loss": -1e400}'), "too large"),
    "metric with a surrogate": (with_raw("metrics", r'{"\udfff": 1}'), "surrogates"),
    "version is a number": (with_("versions", {"torch": 2}), "2"),
    "version with a surrogate": (with_raw("versions", r'{"torch": "\ud83d"}'), "surrogates"),
    "versions are text": (with_("versions", "2"), "versions"),
    "host is null": (with_("host", None), "host"),
    "fact is a float": (with_("host", {"load": 1.5}), "1.5"),
    "fact is true": (with_("host", {"root": True}), "True"),
    "fact is a list": (with_("host", {"cpus": [1]}), "list"),
    "fact beyond 64 bits": (with_("host", {"memory": 1 << 63}), "64 bits"),
    "no statistics": (with_("stats", 1), "stats"),
    "statistic is null": (with_("stats", {"a": None}), "None"),
    "statistic with a surrogate": (with_raw("stats", r'{"a": "\udc00"}'), "surrogates"),
    "statistic beyond 64 bits": (with_("stats", {"a": -(1 << 63) - 1}), "64 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest_is_refused_for_its_reason(name: str) -> None:
    data, reason = HOSTILE[name]
    start_s = time.process_time()
    with pytest.raises(FormatError) as raised:
        parse_manifest(data, "root/step-00000100/MANIFEST.json")
    spent_s = time.process_time() - start_s
    message = str(raised.value)
    assert reason in message
    assert message.startswith("root/step-00000100/MANIFEST.json: ")
    assert raised.value.path == "root/step-00000100/MANIFEST.json"
    assert len(message) < 400
    message.encode()  # can be printed
    assert "\n" not in message
    assert spent_s < 60  # the worst takes a fraction of a second; quadratic time on 16 MiB takes hours


@pytest.mark.parametrize("depth", [1, 30])
def test_nesting_that_the_limit_allows_is_read(depth: int) -> None:
    # The object that holds the key is one level.
    assert parse_manifest(with_("later", json.loads("[" * depth + "]" * depth)), "x") == SMALL


def test_brackets_and_quotes_in_strings_do_not_count() -> None:
    names = ["[" * 200, "{" * 200, '"[[' * 80, "a" + ",[]" * 80]
    versions = {"\\" * 7: '\\"[' * 100, '"': "\\"}
    manifest = replace(SMALL, files=tuple(FileEntry(name, 1) for name in sorted(names)), versions=versions)
    assert parse_manifest(encode_manifest(manifest), "x") == manifest


@given(st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_manifest(data, "x")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(content_of())), JSON_VALUES)
def test_value_of_any_type_is_refused_or_survives(key: str, value: object) -> None:
    try:
        found = parse(content_of() | {key: value})
    except FormatError:
        return
    again = parse_manifest(encode_manifest(found), "x")
    assert repr(again) == repr(found)  # NaN is not equal to itself


@given(st.integers(0, len(VALID) - 1), st.integers(0, 7))
def test_flipped_bit_is_refused_or_survives(at: int, bit: int) -> None:
    data = bytearray(VALID)
    data[at] ^= 1 << bit
    try:
        found = parse_manifest(bytes(data), "x")
    except FormatError:
        return
    assert parse_manifest(encode_manifest(found), "x") == found


@pytest.mark.parametrize("end", range(0, len(VALID) - 1, 3))
def test_every_prefix_is_refused(end: int) -> None:
    with pytest.raises(FormatError):
        parse_manifest(VALID[:end], "x")


# --------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        "state.pt", "a/b/c.pt", ".hidden", "...", "..a", "a..", "a b", "-", "~", "名前.pt", "ab:c", "é" * 127,
        "/".join(["x" * 63] * 64), f"a/{MANIFEST_NAME}", "manifest.json", f"{MANIFEST_NAME}.old", "x" * 255,
    ],
    ids=lambda name: name[:20],
)  # fmt: skip
def test_usable_names(name: str) -> None:
    check_file_name(name)
    assert parse_manifest(with_files(name), "x").files[0].name == name


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "/", "/a", "//a", "a/", "a//b", "./a", "a/.", "a/./b", "../a", "a/..", "a/../b",
        "a/b/../../../c", "a\0", "\0", "a\nb", "a\x1b[2J", "a\x7f", "a\x9b",
        "a\\b", "..\\a", "C:\\a", "C:a", "c:/a", "\\\\server\\a",
        MANIFEST_NAME, f"{MANIFEST_NAME}/a", "x" * 256, "a/" + "é" * 128, "/".join(["x" * 255] * 17), "x/" * 64 + "x",
        "\ud800", "a/\udcff", 3, None, b"a", ["a"],
    ],
    ids=lambda name: repr(name)[:20],
)  # fmt: skip
def test_names_that_could_mean_another_place_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a file"):
        check_file_name(name)
    if isinstance(name, str):
        with pytest.raises(FormatError):
            parse_manifest(with_files(name), "x")


@given(st.text(st.sampled_from("ab./\\:\0~ \n") | st.characters(), max_size=12))
def test_name_that_passes_stays_below_its_directory(name: str) -> None:
    try:
        check_file_name(name)
    except ConfigError:
        return
    root = Path("/root/step-00000100")
    joined = os.path.normpath(os.path.join(root, name))
    assert joined == f"{root}/{name}"
    assert Path(joined) != root / MANIFEST_NAME


@given(st.lists(st.lists(st.sampled_from(["a", "b", "a.", "a!", "a b"]), min_size=1, max_size=3), max_size=6))
def test_names_fit_together_exactly_if_a_file_system_can_hold_them(paths: list[list[str]]) -> None:
    names = ["/".join(parts) for parts in paths]
    holdable = len(set(names)) == len(names) and without_clashes(names) == names
    try:
        parse_manifest(with_files(*names), "x")
    except FormatError:
        assert not holdable
    else:
        assert holdable


# --------------------------------------------------------------------------------------------- steps


@given(st.integers(0, (1 << 63) - 1) | st.integers(0, 1 << 30))
def test_step_and_name_are_inverse(step: int) -> None:
    assert step_of(step_name(step)) == step


@given(st.from_regex(r"\Astep-[0-9]{7,20}\Z") | st.text(max_size=12))
def test_name_of_a_step_has_one_spelling(name: str) -> None:
    step = step_of(name)
    assert step is None or step_name(step) == name


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (0, "step-00000000"),
        (100, "step-00000100"),
        (99_999_999, "step-99999999"),
        (100_000_000, "step-100000000"),
        ((1 << 63) - 1, "step-9223372036854775807"),
    ],
)
def test_names_of_steps(step: int, name: str) -> None:
    assert step_name(step) == name
    assert step_of(name) == step


@pytest.mark.parametrize(
    "name",
    [
        "", "step-", "step-100", "step-0000000100", "step-000000001", "step-0000010", "step--0000001", "step-+0000001",
        "step-00000100 ", "step-00000100\n", " step-00000100", "Step-00000100", "step-0000010０", "step-1_000_0000",
        "step-9223372036854775808", "step-99999999999999999999", ".step-00000100.pending-0123456789abcdef",
        "step-00000100/", "step-" + "9" * 10_000, "step-١٢٣٤٥٦٧٨",
    ],
    ids=lambda name: repr(name)[:40],
)  # fmt: skip
def test_names_that_no_step_has(name: str) -> None:
    assert step_of(name) is None


@pytest.mark.parametrize("step", [-1, 1 << 63, 1.0, True, "1", None, 10**5000], ids=lambda step: f"{type(step)}")
def test_step_that_has_no_name_is_refused(step: Any) -> None:
    with pytest.raises(ConfigError, match="a step is an int"):
        step_name(step)
