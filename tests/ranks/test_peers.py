"""Ranks of a real process group meet, and become peers of our own connections."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

GLOO = """
import sys
import torch.distributed as dist
from fastpersist.distributed.coordination import Ranks
from fastpersist.transfer import arena

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
backwards = dist.new_group([1, 0])
for group in (None, dist.group.WORLD, backwards):
    ranks = Ranks.meet(group)
    assert (ranks.rank, ranks.count, ranks.nodes) == (dist.get_rank(group), 2, (0, 0)), (ranks, ranks.nodes)
    session = ranks.begin("step 1")
    if ranks.rank == 0:
        assert session.gather(b"a") == [b"a", b"b"]
        session.answer(b"c")
    else:
        session.tell(b"b")
        assert session.hear() == b"c"
    session.finish()
    ranks.close()
arena.available_host_bytes = lambda: 100
assert arena.available_bytes_per_rank() == 50
alone = [dist.new_group([one]) for one in range(2)]
assert Ranks.meet(alone[rank]).count == 1
assert arena.available_bytes_per_rank() == 50  # the group of one is not all of this machine
try:
    Ranks.meet(alone[1 - rank])
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


def test_ranks_of_a_process_group_meet(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(GLOO))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("LOCAL_WORLD_SIZE", None)
    children = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for child in children:
        said, wrong = child.communicate(timeout=60)
        assert child.returncode == 0, wrong
        assert "is not a rank of the process group" in said
