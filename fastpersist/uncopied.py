"""The base of public classes that own a lock, a descriptor or a thread: they are neither copied nor pickled.

A copy would free at its end what the original still uses. `copy.deepcopy` of anything that holds such an object, such
as a trainer, meets this too.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Uncopied"]


class Uncopied:
    """Refuses copy.copy, copy.deepcopy and pickle with a TypeError, as open files do."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it owns locks, files or threads; make another one "
            "where it is used"
        )
