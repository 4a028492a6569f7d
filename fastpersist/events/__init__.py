"""What saves and loads tell of themselves: one stream of events, for programs that watch and for a log in each root.

Where to look:

    what is told                             event
    to whom, and on which thread             delivery
    the file in the root, and its reader     log

`saving`, `checkpointer` and `api` emit. Here nothing is known of how a save works.
"""

from fastpersist.events.delivery import subscribe
from fastpersist.events.event import KINDS, Event
from fastpersist.events.log import read_events

__all__ = ["KINDS", "Event", "read_events", "subscribe"]
