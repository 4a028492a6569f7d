"""A host of a group loses its power or its network: nobody closes a connection, packets are just not answered."""

from __future__ import annotations

import pytest
from support.forking import Report
from support.ranks_in_threads import SUBJECT, assert_failed, ranks_in_processes, wait_for
from support.sandbox import needs_root
from support.two_hosts import ADDRESSES, cut_cable, enter, inside, two_hosts

from fastpersist.distributed import coordination
from fastpersist.distributed.connections import connection, io_thread
from fastpersist.distributed.coordination import Ranks
from fastpersist.errors import PeerError

PATIENCE_S = 60.0


@needs_root
def test_a_host_without_power_is_noticed_long_before_the_deadline_while_pulses_are_sent_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", ADDRESSES[0])  # as torchrun sets it
    for module in (connection, io_thread):
        monkeypatch.setattr(module, "SILENT_MACHINE_S", 5)
    monkeypatch.setattr(coordination, "_PULSE_S", 0.2)

    def wait_for_rank_0(ranks: Ranks, report: Report) -> None:
        session = ranks.begin(SUBJECT)
        report(0)
        with pytest.raises(PeerError) as caught:
            session.hear()  # it sends nothing meanwhile: keepalive notices
        assert_failed(caught.value, 0, "is gone")

    with (
        two_hosts() as names,
        inside(names[0]),
        ranks_in_processes(2, {1: wait_for_rank_0}, timeout_s=PATIENCE_S, before=lambda rank: enter(names[rank])) as (
            own,
            children,
        ),
    ):
        session = own.begin(SUBJECT)
        wait_for(children[1], 0)
        cut_cable(names[1])
        with pytest.raises(PeerError) as caught:
            session.gather(b"")
        assert_failed(caught.value, 1, "nothing was acknowledged for 5 s")
        assert children[1].wait().verdict == "passed"


@needs_root
@pytest.mark.parametrize("interface", ["eth0", ADDRESSES[0]])
def test_ranks_of_two_hosts_meet_over_the_interface_and_the_ports_that_are_allowed(
    monkeypatch: pytest.MonkeyPatch, interface: str
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)  # else rank 0 finds the same address by itself
    monkeypatch.setenv("FASTPERSIST_INTERFACE", interface)
    monkeypatch.setenv("FASTPERSIST_PORTS", "29400-29410")

    def answer(ranks: Ranks, report: Report) -> None:
        assert ranks.connections.addresses == [(ADDRESSES[0], 29400)]
        ranks.begin(SUBJECT).tell(b"here")

    with (
        two_hosts() as names,
        inside(names[0]),
        ranks_in_processes(2, {1: answer}, timeout_s=PATIENCE_S, before=lambda rank: enter(names[rank])) as (
            own,
            children,
        ),
    ):
        assert own.begin(SUBJECT).gather(b"") == [b"", b"here"]
        listener = own.connections._listener
        assert listener is not None
        assert listener.getsockname() == (ADDRESSES[0], 29400)  # and nowhere else
        assert children[1].wait().verdict == "passed"
