"""The ranks agree on the moment at which all of them stop, after a signal told at least one of them to stop.

Every rank counts the same *occasions*, for example the ends of the optimizer's steps. A signal reaches the ranks at
different moments, or only one of them. The messages, all sent and read at occasions, on the training thread:

    followers → coordinator   asked    this rank was told to stop
    coordinator → followers   at       the number of an occasion that is to come
    followers → coordinator   yes, no  this rank will stop there; or it is beyond it already
    coordinator → followers   go, not  all stop there; or none does, and another occasion follows

While no rank is told to stop, no message is sent, and an occasion costs one look at the connections. Ranks wait only at
the occasion that was named: followers for the decision, the coordinator for the answers, for `_ANSWER_S` at most. A
deadlock is impossible: a rank that waits there has taken part in every collective before it. A rank that has already
passed the occasion, because the message was slow, may wait in a collective for the others; then the coordinator sends
"not" after `_ANSWER_S`, and all go on to an occasion that is further away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastpersist.distributed.messages import decoded, encoded
from fastpersist.distributed.sessions import Session
from fastpersist.errors import AgreementTimeoutError, CoordinationError

__all__ = ["StopAgreement"]

_ANSWER_S = 2.0
_DISTANCE_FACTOR = 4


class StopAgreement:
    """One rank's part in agreeing when to stop. The ranks may stop more than once.

    Args:
        session: A session of all ranks that is used for nothing else.

    Thread safety: one thread uses it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0  # of occasions
        self._round = 0  # how often the ranks have stopped; earlier messages are void
        self._told: list[int] = []  # the signals of this rank that the coordinator knows of
        self._signals: list[int] = []  # of all ranks; on the coordinator
        self._at: int | None = None
        self._distance = 1  # of the occasion that is named next
        self._answers: dict[int, bool] = {}
        self._verdict: dict[str, Any] | None = None

    def occasion(self, signals: Sequence[int], left_s: Callable[[], float | None]) -> list[int]:
        """Take part; called by all ranks equally often.

        Args:
            signals: The signals that have come to this rank since the ranks stopped last.
            left_s: Returns the seconds that this rank may still wait for others; None: as long as ranks usually wait.

        Returns:
            If all ranks stop here, the signals that have come to any of them; otherwise nothing.

        Raises:
            PeerError: A rank has failed, or is gone; there is no agreement from now on.
            AgreementTimeoutError: The other ranks did not answer in this time.
            CoordinationError: The ranks were closed, or speak of something else.
        """
        self._count += 1
        self._session.check()
        return self._lead(signals, left_s) if self._session.rank == 0 else self._follow(signals, left_s)

    def end(self) -> None:
        """Take part no more."""
        self._session.finish()

    def _lead(self, signals: Sequence[int], left_s: Callable[[], float | None]) -> list[int]:
        session = self._session
        self._add(signals)
        self._take_all()
        if self._at is None and self._signals:
            self._name_next()
        if self._at != self._count:
            return []
        limit_s = _ANSWER_S if (left := left_s()) is None else min(_ANSWER_S, left)
        session.listen(self._are_answered, limit_s)
        if len(self._answers) == session.count - 1 and all(self._answers.values()):
            session.answer(encoded({"go": self._count, "signals": self._signals}))
            found, self._signals = self._signals, []
            self._next_round()
            return found
        session.answer(encoded({"not": self._count}))
        self._distance *= _DISTANCE_FACTOR
        self._name_next()
        return []

    def _are_answered(self) -> bool:
        self._take_all()
        return len(self._answers) == self._session.count - 1 or not all(self._answers.values())

    def _name_next(self) -> None:
        self._at, self._answers = self._count + self._distance, {}
        self._session.answer(encoded({"at": self._at, "round": self._round}))

    def _follow(self, signals: Sequence[int], left_s: Callable[[], float | None]) -> list[int]:
        session = self._session
        new = [number for number in signals if number not in self._told]
        if new:
            session.tell(encoded({"asked": new, "round": self._round}))
            self._told += new
        self._take_all()
        if self._at is None or self._at > self._count:
            return []
        if not session.listen(self._is_decided, left_s()) or self._verdict is None:
            raise AgreementTimeoutError(
                "rank 0 did not say in time whether all ranks stop", rank=0, subject=session.subject
            )
        verdict, self._verdict, self._at = self._verdict, None, None
        if "go" not in verdict:
            self._take_all()  # the next one was named at once
            return []
        self._next_round()
        return [int(number) for number in verdict["signals"]]

    def _is_decided(self) -> bool:
        self._take_all()
        return self._verdict is not None

    def _next_round(self) -> None:
        self._round += 1
        self._told, self._at, self._distance = [], None, 1

    def _take_all(self) -> None:
        """Take what has arrived."""
        while self._verdict is None and (arrived := self._session.next_arrived()) is not None:
            rank, message = arrived
            said = decoded(message, rank)
            try:
                self._take(rank, said)
            except (KeyError, TypeError, ValueError) as error:
                raise CoordinationError(f"rank {rank} says what makes no sense when to stop: {said}") from error

    def _take(self, rank: int, said: dict[str, Any]) -> None:
        if "at" in said:
            at = int(said["at"])
            is_beyond = at < self._count
            self._session.tell(encoded({"no" if is_beyond else "yes": at}))
            self._at = None if is_beyond else at
        elif "go" in said or "not" in said:
            if self._at is not None:  # else this rank had passed it
                self._verdict = said
        elif "asked" in said:
            if said["round"] == self._round:
                self._add(said["asked"])
        else:
            is_yes = "yes" in said
            if int(said["yes" if is_yes else "no"]) == self._at:
                self._answers[rank] = is_yes

    def _add(self, signals: Sequence[int]) -> None:
        self._signals += [int(number) for number in signals if number not in self._signals]
