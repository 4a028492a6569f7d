"""What followers tell of their own files at the end of a save: it arrives, and what makes no sense is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.sessions import ThreadSession, run_threads

import fastpersist as fp
from fastpersist.distributed.commit_agreement import gather_own_files, tell_own_files
from fastpersist.formats.manifest import FileEntry


def test_own_files_arrive_with_their_rank() -> None:
    files = {1: [FileEntry("rank-00001.pt", 10, 7)], 2: [], 3: [FileEntry("a/b", 0, None), FileEntry("c", 1 << 40, 0)]}

    def work(session: ThreadSession) -> Any:
        own: Any = session
        return tell_own_files(own, files[session.rank]) if session.rank else list(gather_own_files(own))

    assert run_threads(4, work)[0] == [(rank, file) for rank in files for file in files[rank]]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"[]",
        b"{}",
        b'{"own": 7}',
        b'{"own": [["a", 1]]}',
        b'{"own": [["../a", 1, null]]}',
        b'{"own": [["a", "x", null]]}',
        b'{"own": [["a", 1, [2]]]}',
    ],
)
def test_what_makes_no_sense_is_refused_and_its_rank_is_named(message: bytes) -> None:
    def work(session: ThreadSession) -> Any:
        own: Any = session
        return session.tell(message) if session.rank else list(gather_own_files(own))

    with pytest.raises(fp.CoordinationError, match="rank 1"):
        raise run_threads(2, work)[0]
