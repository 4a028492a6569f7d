"""What a Checkpointer is asked for, checked before anything is done: its options, the ranks it meets, a save's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fastpersist.arguments import require_bools
from fastpersist.distributed.common_steps import refuse_together
from fastpersist.distributed.coordination import Ranks
from fastpersist.distributed.group_save import Writers, tuned_writer_count
from fastpersist.errors import ConfigError
from fastpersist.formats.manifest import CheckpointManifest, checked_step, encode_manifest
from fastpersist.transfer.engine_selection import require_engine

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["check_options", "checked_metrics", "meet_ranks", "step_of"]


def check_options(
    *,
    busy: str,
    on_error: str,
    engine: str,
    paranoid: bool,
    sharded: bool,
    writers: Writers,
    check_replicas: bool,
    lock_timeout_s: float,
) -> None:
    """Check the options of a Checkpointer that nobody else checks; see there.

    Raises:
        ConfigError: One makes no sense.
    """
    if busy not in ("wait", "latest", "skip"):
        raise ConfigError(f"busy is 'wait', 'latest' or 'skip', not {busy!r}")
    if on_error not in ("raise", "warn"):
        raise ConfigError(f"on_error is 'raise' or 'warn', not {on_error!r}")
    require_engine(engine)
    require_bools(paranoid=paranoid, sharded=sharded, check_replicas=check_replicas)
    if not (isinstance(lock_timeout_s, int | float) and lock_timeout_s >= 0):
        raise ConfigError(f"lock_timeout_s is a number of seconds, 0 or more, not {lock_timeout_s!r}")
    if sharded and (check_replicas or writers not in ("auto", "all")):
        raise ConfigError("with sharded=True each rank writes what it holds: there is no writers or check_replicas")


def meet_ranks(
    process_group: ProcessGroup, root: str, why_not: str, busy: str, timeout_s: float
) -> tuple[Ranks, int | None] | None:
    """Meet the ranks of a process group; all of them call this.

    Args:
        process_group: The group.
        root: Of this rank's Checkpointer.
        why_not: Why no checkpoints can be there, as `why_no_root` says.
        busy: As in `Checkpointer`.
        timeout_s: A rank that was not heard of for so long has failed.

    Returns:
        The ranks, and how many of them write by rank 0's tuning file; None if this one is alone.

    Raises:
        ConfigError: No checkpoints can be below the root of some rank, or `busy` makes no sense for several.
        PeerError: A rank is gone.
    """
    ranks = Ranks.meet(process_group, timeout_s=timeout_s)
    try:
        refuse_together(process_group, root, why_not)
        if ranks.count == 1:
            return None
        tuned_count = tuned_writer_count(process_group, root)
        if busy != "wait":
            raise ConfigError(
                f"with several ranks, busy is 'wait': ranks would not leave out the same saves, as {busy!r} does"
            )
    except BaseException:
        ranks.close()
        raise
    return ranks, tuned_count


def step_of(step: object, state: object) -> int:
    """Return the step that save() was given, as an int."""
    if not hasattr(step, "__index__") and isinstance(state, int):
        raise ConfigError(f"the step comes first, then the state: save({state!r}, state)")
    return checked_step(step)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics as numbers that a manifest can hold.

    Raises:
        ConfigError: They are not.
    """
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(f'metrics is a dict from names to numbers, such as {{"loss": 0.5}}; not {metrics!r}')
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"metrics are numbers; {name!r} is {type(value).__name__}: {error}") from None
    encode_manifest(CheckpointManifest((), None, 0.0, checked, {}, {}, {}))
    return checked
