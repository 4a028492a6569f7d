"""MANIFEST.json ⇄ dataclasses, and the names in a checkpoint directory. Pure: no I/O, no torch, hostile input expected.

The manifest says which files make up a checkpoint. It is written last, so a directory that has one is complete.
docs/reference/file-format.md, section 4, is the format. A manifest may come from anywhere: one that passes the checks
here names only files below its own directory, each once. The checks take time and memory linear in its length. Callers
check whether the files exist and match the manifest.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from fastpersist.errors import ConfigError, FormatError

__all__ = [
    "COMMIT_NUMBER_MAX",
    "DCP_METADATA_NAME",
    "MANIFEST_LIMIT_BYTES",
    "MANIFEST_NAME",
    "NO_FILES",
    "STATE_NAME",
    "CheckpointManifest",
    "FileEntry",
    "check_file_name",
    "checked_step",
    "encode_manifest",
    "file_entry_of",
    "natural_number",
    "parse_manifest",
    "rank_file_name",
    "step_name",
    "step_of",
    "writer_of",
]

MANIFEST_NAME = "MANIFEST.json"
"""The name of the manifest in its checkpoint directory."""

STATE_NAME = "state.pt"
"""The name of the file with the state of a step."""

DCP_METADATA_NAME = ".metadata"
"""The name of the file that says what is where in the parts of sharded state, given by torch.distributed.checkpoint."""

MANIFEST_LIMIT_BYTES = 16 << 20
"""A manifest is not longer; read at most one byte more of a file that claims to be one."""

COMMIT_NUMBER_MAX = (1 << 63) - 1
"""The greatest number of a commit."""

_FORMAT = 1
_FILE_COUNT_MAX = 100_000
_NAME_BYTES_MAX = 4096  # Linux' limits: of a path, and of one part of it
_PART_BYTES_MAX = 255
_PART_COUNT_MAX = 64  # so that code that goes down the directories one call each is safe
_DEPTH_MAX = 32
_STRUCTURE_COUNT_MAX = 2_000_000  # brackets and commas: 100,000 files have five each
_QUOTE_COUNT_MAX = 4_000_000  # and ten
_NUMBER_CHARACTERS_MAX = 40
_INTEGER_LIMIT = 1 << 63
# The kernel sets no clock before 1970 or after 2232. Calendar functions do not overflow for any time below.
_TIME_LIMIT_S = float(1 << 36)

_STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})")
_OF_RANK = re.compile(r"(?:.*/)?(?:__([0-9]{1,9})_[0-9]+\.distcp|rank-([0-9]{5,9})\.pt)", re.DOTALL)
_CRC = re.compile(r"[0-9a-f]{8}")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_DRIVE = re.compile(r"[A-Za-z]:")
_NO_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b"[]{},")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        name: The path below the checkpoint directory; its parts are separated by "/".
        size_bytes: The length of the file.
        crc32: CRC-32 of the whole file; None where none was computed.
    """

    name: str
    size_bytes: int
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What a manifest says.

    Attributes:
        files: All files but the manifest; sorted by name when they come from `parse_manifest`.
        step: Step of the training; None if the checkpoint belongs to none.
        time_s: When the manifest was written, Unix time.
        metrics: Values of the training at that step. NaN and the infinities are values too.
        versions: Name and version of the software that wrote it.
        host: Facts of the machine that wrote it.
        stats: What the save cost; for people, so a float that is no finite number comes back as text.
        commit_number: The step's place in the order of the commits of a root; a greater number is newer. None if it
            is no step of a root, or was written before there was this field.
    """

    files: tuple[FileEntry, ...]
    step: int | None
    time_s: float
    metrics: dict[str, float]
    versions: dict[str, str]
    host: dict[str, str | int]
    stats: dict[str, float | int | str]
    commit_number: int | None = None


NO_FILES = CheckpointManifest((), None, 0.0, {}, {}, {}, {})
"""Stands for a manifest if there is none."""


# ------------------------------------------------------------------------------------------------------- names


def step_name(step: int) -> str:
    """Return the directory name of a step: eight digits, more for a larger step.

    Args:
        step: 0 … 2**63 - 1.

    Raises:
        ConfigError: The step is not a whole number in that range.

    Thread safety: pure.
    """
    return f"step-{checked_step(step):08d}"


def checked_step(step: object) -> int:
    """Return a step as an int: any whole number that Python takes as an index, such as numpy's integers, but no bool.

    Raises:
        ConfigError: The value is no whole number, or not from 0 to 2**63 - 1.

    Thread safety: pure.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]  # told below
    except (TypeError, ValueError, RuntimeError):  # the last: torch's, of a tensor that is no single integer
        number = -1
    if not 0 <= number < _INTEGER_LIMIT:
        raise ConfigError(f"a step is an int from 0 to 2**63 - 1, not {_shown(step)}")
    return number


def step_of(name: str) -> int | None:
    """Return the step whose directory has this name, None for a name that `step_name` does not give.

    Thread safety: pure.
    """
    match = _STEP_NAME.fullmatch(name)
    step = int(match[1]) if match else _INTEGER_LIMIT
    return step if step < _INTEGER_LIMIT else None


def rank_file_name(rank: int) -> str:
    """Return the name of the file with a rank's own state.

    Thread safety: pure.
    """
    return f"rank-{rank:05d}.pt"


def writer_of(name: str) -> int | None:
    """Return the rank whose state, or part of sharded state, a file of this name is; None if none is named.

    Thread safety: pure.
    """
    match = _OF_RANK.fullmatch(name)
    return None if match is None else int(match[1] or match[2])


def check_file_name(name: str) -> None:
    """Check that a name means one file below the checkpoint directory, on every system, and not the manifest.

    Args:
        name: Parts separated by "/": at most 64 parts, 255 bytes a part and 4096 bytes in all, as UTF-8. No part is
            empty, "." or "..". It has no backslash, drive letter or control character, so it leaves neither the
            directory on other systems nor its line in a message. The first part is not MANIFEST.json.

    Raises:
        ConfigError: The text is no such name; the message shows it and says why.

    Thread safety: pure.
    """
    if reason := _why_no_file_name(name):
        raise ConfigError(f"{_shown(name)} cannot be the name of a file in a checkpoint: {reason}")


def _why_no_file_name(name: object) -> str | None:
    if not isinstance(name, str):
        return "it is not a str"
    if len(name) > _NAME_BYTES_MAX:  # checked first: the other checks take time in proportion to the length
        return f"it is longer than {_NAME_BYTES_MAX} bytes"
    try:
        name_bytes = len(name.encode())
    except UnicodeEncodeError:
        return "UTF-8 cannot encode it"
    if name_bytes > _NAME_BYTES_MAX:
        return f"it is longer than {_NAME_BYTES_MAX} bytes"
    if _CONTROL.search(name):
        return "it holds a control character"
    if "\\" in name or _DRIVE.match(name):
        return "a backslash or a drive letter means another place on other systems"
    if name.startswith("/"):
        return "it is absolute; names count from the checkpoint directory"
    parts = name.split("/")
    if len(parts) > _PART_COUNT_MAX:
        return f"it has more than {_PART_COUNT_MAX} parts"
    for part in parts:
        if part in ("", ".", ".."):
            return f"one of its parts is {part!r}"
        if len(part.encode()) > _PART_BYTES_MAX:
            return f"one of its parts is longer than {_PART_BYTES_MAX} bytes"
    if parts[0] == MANIFEST_NAME:
        return f"{MANIFEST_NAME} is the manifest"
    return None


def _check_that_names_fit_together(names: list[str]) -> None:
    """Refuse a name that occurs twice, or that is a file and the directory of another."""
    # No name holds a NUL, and a NUL sorts before everything else. So "a" comes directly before all of "a/…", even if
    # there is "a.b" too, and comparing neighbours is enough.
    ordered = sorted(name.replace("/", "\0") for name in names)
    for one, next_one in pairwise(ordered):
        if one == next_one:
            raise ValueError(f"the file {_shown(one.replace(chr(0), '/'))} occurs twice")
        if next_one.startswith(one + "\0"):
            raise ValueError(f"{_shown(one.replace(chr(0), '/'))} is a file and a directory")


# ------------------------------------------------------------------------------------------------------- writing


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Encode a manifest as JSON that people can read and compare: one file a line, sorted by name.

    Args:
        manifest: Metrics may be any numbers that fit a float.

    Returns:
        UTF-8 that `parse_manifest` takes, with a newline at its end.

    Raises:
        ConfigError: Anything that `parse_manifest` would refuse: an illegal name, two equal ones, a value of another
            type, more files than the format allows, …

    Thread safety: safe, as long as no thread changes the manifest's dicts meanwhile.
    """
    try:
        files = [_file_json(entry) for entry in sorted(manifest.files, key=_by_name)]
        metrics = {name: float(_number(name, value)) for name, value in manifest.metrics.items()}
        members = [
            f'"format": {_FORMAT}',
            f'"step": {_json(manifest.step)}',
            f'"time_s": {_json(float(manifest.time_s))}',
            *([] if manifest.commit_number is None else [f'"commit_number": {_json(manifest.commit_number)}']),
            f'"files": {_block("[", files, "]")}',
            *(
                f'"{name}": {_block("{", _members(table), "}")}'
                for name, table in (
                    ("metrics", metrics),
                    ("versions", manifest.versions),
                    ("host", manifest.host),
                    ("stats", manifest.stats),
                )
            ),
        ]
        data = ("{\n  " + ",\n  ".join(members) + "\n}\n").encode()
        # A checkpoint that could not be loaded must not be published: parse the manifest first.
        _manifest_of(_json_object(data))
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"a manifest cannot hold this: {error}") from None
    return data


def _by_name(entry: FileEntry) -> str:
    return entry.name


def _file_json(entry: FileEntry) -> str:
    crc = {} if entry.crc32 is None else {"crc32": f"{entry.crc32:08x}"}
    return _json({"name": entry.name, "size_bytes": entry.size_bytes, **crc})


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"the metric {_shown(name)} is of type {type(value).__name__}; pass a number")
    return value


def _members(table: Mapping[str, object]) -> list[str]:
    lines = []
    for name, value in table.items():
        if not isinstance(name, str):  # the json module would make text of it
            raise TypeError(f"the key {_shown(name)} is not a str")
        if isinstance(value, float) and not math.isfinite(value):
            value = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
        lines.append(f"{_json(name)}: {_json(value)}")
    return lines


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _block(opening: str, lines: list[str], closing: str) -> str:
    return f"{opening}\n    " + ",\n    ".join(lines) + f"\n  {closing}" if lines else opening + closing


# ------------------------------------------------------------------------------------------------------- reading


def parse_manifest(data: bytes, path: str) -> CheckpointManifest:
    """Parse and prove a manifest.

    Args:
        data: The whole file.
        path: The manifest's path, for messages.

    Returns:
        The manifest, without keys that format 1 does not know.

    Raises:
        FormatError: It is not a manifest of format 1, or breaks one of its rules or limits.

    Thread safety: pure.
    """
    try:
        return _manifest_of(_json_object(data))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"this is no valid manifest: {error}", path=path) from None


def _json_object(data: bytes) -> dict[str, object]:
    """Parse a JSON object; raise ValueError for anything else, and for values that parsers read differently."""
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise ValueError(f"it is longer than {MANIFEST_LIMIT_BYTES} bytes")
    if not data.strip(b" \t\r\n\0"):  # some file systems leave zeros of a file that was never synced
        raise ValueError("it is empty; its checkpoint was never finished")
    _check_structure(data)
    # Decode first: json.loads would also take UTF-16.
    content = json.loads(
        data.decode(),
        object_pairs_hook=_unique_keys,
        parse_int=_integer,
        parse_float=_finite,
        parse_constant=_refuse_constant,
    )
    if not isinstance(content, dict):
        raise ValueError("it is JSON, but no object")
    return content


def _check_structure(data: bytes) -> None:
    """Bound the depth and the number of values before the parser, which recurses and allocates."""
    # Once escaped backslashes and then escaped quotes are removed, every quote begins or ends a string, and the even
    # pieces between quotes are outside of strings. A regular expression for strings would take quadratic time on
    # strings that do not end.
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if data.count(b'"') > _QUOTE_COUNT_MAX:
        raise ValueError("it holds too many values")
    structure = b"".join(data.split(b'"')[::2]).translate(None, _NOT_STRUCTURE)
    if len(structure) > _STRUCTURE_COUNT_MAX:
        raise ValueError("it holds too many values")
    depth = 0
    for byte in structure.replace(b",", b""):
        depth += 1 if byte in b"[{" else -1
        if depth > _DEPTH_MAX:
            raise ValueError(f"it is nested more than {_DEPTH_MAX} deep")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return content


def _integer(digits: str) -> int:
    if len(digits) > _NUMBER_CHARACTERS_MAX:  # int() would take quadratic time, or raise an error of its own
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    if len(digits) > _NUMBER_CHARACTERS_MAX:
        raise ValueError(f"a number has {len(digits)} characters")
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large for a float")
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _manifest_of(content: dict[str, object]) -> CheckpointManifest:
    version = content.get("format")
    if type(version) is not int:
        raise ValueError('"format" is missing or no integer; FastPersist did not write it')
    if version != _FORMAT:
        raise ValueError(f"it has format {version}, and this FastPersist reads format {_FORMAT} only; upgrade it")
    if "step" not in content:
        raise ValueError('"step" is missing')
    step = content["step"]
    number = content.get("commit_number")
    return CheckpointManifest(
        files=_files_of(content.get("files")),
        step=None if step is None else natural_number(step, '"step"'),
        time_s=_time_of(content.get("time_s")),
        metrics={name: _metric_of(name, value) for name, value in _table(content, "metrics").items()},
        versions={name: _text(value) for name, value in _table(content, "versions").items()},
        host={name: _text_or_integer(value) for name, value in _table(content, "host").items()},
        stats={
            name: value if isinstance(value, float) else _text_or_integer(value)
            for name, value in _table(content, "stats").items()
        },
        commit_number=None if number is None else natural_number(number, '"commit_number"'),
    )


def natural_number(value: object, what: str) -> int:
    """Return a number that a record holds; raise ValueError if it is no integer, or not in the range."""
    if type(value) is not int or not 0 <= value < _INTEGER_LIMIT:  # bool is a subclass of int
        raise ValueError(f"{what} is {_shown(value)}, not an integer from 0 to 2**63 - 1")
    return value


def _time_of(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _TIME_LIMIT_S:
        raise ValueError(f'"time_s" is {_shown(value)}, not a Unix time')
    return float(value)


def _files_of(listed: object) -> tuple[FileEntry, ...]:
    if not isinstance(listed, list):
        raise ValueError('"files" is missing or no list')
    if len(listed) > _FILE_COUNT_MAX:
        raise ValueError(f"it lists {len(listed)} files, more than {_FILE_COUNT_MAX}")
    entries = [file_entry_of(item) for item in listed]
    _check_that_names_fit_together([entry.name for entry in entries])
    return tuple(sorted(entries, key=_by_name))


def file_entry_of(item: object) -> FileEntry:
    """Return what a record says of a file; raise ValueError if that is no object, or breaks one of the rules."""
    if not isinstance(item, dict):
        raise ValueError(f"a file is described by {_shown(item)}, not by an object")
    name = item.get("name")
    if not isinstance(name, str):
        raise ValueError(f"a file has the name {_shown(name)}")
    check_file_name(name)
    size_bytes = natural_number(item.get("size_bytes"), f"the size of the file {_shown(name)}")
    crc = item.get("crc32")
    if crc is not None and not (isinstance(crc, str) and _CRC.fullmatch(crc)):
        raise ValueError(f"the file {_shown(name)} has the CRC {_shown(crc)}, not eight hexadecimal digits")
    return FileEntry(name, size_bytes, None if crc is None else int(crc, 16))


def _table(content: dict[str, object], key: str) -> dict[str, object]:
    table = content.get(key)
    if not isinstance(table, dict):
        raise ValueError(f'"{key}" is missing or no object')
    for name in table:
        _text(name)
    return table


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not text")
    value.encode()  # escapes can spell half a surrogate pair, which is no text
    return value


def _metric_of(name: str, value: object) -> float:
    if isinstance(value, str) and value in _NO_NUMBERS:
        return _NO_NUMBERS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"the metric {_shown(name)} is {_shown(value)}, not a number")
    return float(value)


def _text_or_integer(value: object) -> str | int:
    if isinstance(value, str):
        return _text(value)
    if type(value) is not int:
        raise ValueError(f"{_shown(value)} is neither text nor a number")
    if not -_INTEGER_LIMIT <= value < _INTEGER_LIMIT:
        raise ValueError(f"{value} does not fit 64 bits")
    return value


def _shown(value: object) -> str:
    """Show a value of any size on one line of a message."""
    if isinstance(value, str):
        shown = repr(value[:80])
        return shown if len(value) <= 80 and len(shown) <= 120 else shown[:80] + "…"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int) and value.bit_length() <= 256:  # repr() of one with thousands of digits raises
        return repr(value)
    return f"a value of type {type(value).__name__}"
