"""Events of saves and loads: one stream, for callbacks of the program and for a log in each root.

Where to look:

    what is told                             event
    to whom, and on which thread             delivery
    the file in the root, and its reader     log

`saving`, `checkpointer` and `api` emit events. This package knows nothing about how a save works.
"""

from fastpersist.events.delivery import subscribe
from fastpersist.events.event import KINDS, Event
from fastpersist.events.log import read_events

__all__ = ["KINDS", "Event", "read_events", "subscribe"]
