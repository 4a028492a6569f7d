"""The order in which the steps of a root were committed: what "newest" means when loading, in LATEST and in retention.

It is not the order of their numbers. A run that goes back from step 30 to step 10 saves step 11, and that is the newest
then. It is not the order of time either: clocks differ from host to host, and are set back. So each manifest has a
number, one more than the greatest that its root held. docs/reference/file-format.md, section 4, is the format. Pure but
for `read_commits`.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fastpersist.commit.directory_commit import committed_path
from fastpersist.commit.step_listing import candidate_steps, read_manifest
from fastpersist.errors import CheckpointNotFoundError, CorruptionError, StorageError
from fastpersist.formats.manifest import COMMIT_NUMBER_MAX, CheckpointManifest, step_name

__all__ = ["Commit", "commit_of", "in_commit_order", "next_commit_number", "read_commits"]

_log = logging.getLogger("fastpersist")


class Commit(NamedTuple):
    """What a manifest says of when its step was committed, and of how good it is.

    Attributes:
        number: Its place in the order; None in manifests that are older than the field.
        time_s: When it was written, Unix time.
        metrics: Of the training.
    """

    number: int | None
    time_s: float
    metrics: Mapping[str, float]


def commit_of(manifest: CheckpointManifest) -> Commit:
    """Return what a manifest says."""
    return Commit(manifest.commit_number, manifest.time_s, manifest.metrics)


def read_commits(root: str) -> dict[int, Commit | None]:
    """Read the manifests of all steps that have a directory; None for one that cannot be read. Looks at nothing else.

    Raises:
        StorageError: The root is no directory, or may not be listed.
    """
    found: dict[int, Commit | None] = {}
    for step in candidate_steps(root):
        path = committed_path(root, step_name(step))
        if path is None:  # removed meanwhile
            continue
        try:
            found[step] = commit_of(read_manifest(path))
        except (CorruptionError, StorageError, CheckpointNotFoundError) as error:
            _log.info("when %s was committed is not known: %s", path, error)
            found[step] = None
    return found


def in_commit_order(commits: Mapping[int, Commit | None]) -> list[int]:
    """Return the steps, the one that was committed last at the end.

    One without a number has its place by its time among those with one. One whose manifest cannot be read (None) counts
    right behind the step below it: of a run that never went back, that is where it was.

    Thread safety: safe, as long as nobody changes `commits` meanwhile.
    """
    numbered = sorted((found.time_s, found.number) for found in commits.values() if found and found.number is not None)
    times_s = [time_s for time_s, _ in numbered]
    greatest = [0]  # of the first so many by time
    for _, number in numbered:
        greatest.append(max(greatest[-1], number))
    places: dict[int, tuple[int, float, int]] = {}
    below = (0, -1.0)
    for step in sorted(commits):
        found = commits[step]
        if found is not None:
            number = greatest[bisect_right(times_s, found.time_s)] if found.number is None else found.number
            below = (number, found.time_s)
        places[step] = (*below, step)
    return sorted(places, key=places.__getitem__)


def next_commit_number(commits: Iterable[Commit | None]) -> int:
    """Return the number of the step that is committed next."""
    numbers = [found.number for found in commits if found is not None and found.number is not None]
    return min(1 + max(numbers, default=0), COMMIT_NUMBER_MAX)  # there, the time decides
