"""The base of public classes that own a lock, a descriptor or a thread: they are neither copied nor pickled.

When a copy is freed, it would release resources that the original still uses. `copy.deepcopy` of an object that holds
one, such as a trainer, is refused, too.
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
