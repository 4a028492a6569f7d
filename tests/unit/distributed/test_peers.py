"""What ranks tell each other when they meet: which process and machine each is, and whether they fit together."""

from __future__ import annotations

import ipaddress
import logging
import signal
from typing import Any

import pytest
from support.forking import Child, Report

from fastpersist.distributed import peers
from fastpersist.errors import ConfigError


def test_processes_that_have_ended_are_known() -> None:
    assert not peers.is_dead(peers.own_process())

    def stay(report: Report) -> None:
        report(0)
        signal.pause()

    with Child(stay) as child:
        pid, namespace, begin = peers.own_process()
        theirs = (child.pid, namespace, peers._begin_of(child.pid))
        assert not peers.is_dead(theirs)
        child.kill()
        assert peers.is_dead(theirs)
    assert peers.is_dead((pid, namespace, "another"))
    assert not peers.is_dead((pid, "elsewhere", begin))


def test_nobody_is_taken_for_dead_who_was_not_seen() -> None:
    assert not peers.is_dead(None)
    assert not peers.is_dead((1, "", ""))


def test_addresses_for_other_machines_are_no_loopback_and_each_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    hosts = [ipaddress.ip_address(host) for host in peers.own_hosts()]
    assert len(set(hosts)) == len(hosts)
    assert not any(host.is_loopback or host.is_link_local or host.is_unspecified for host in hosts)


def test_an_address_that_leads_to_the_master_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peers.own_hosts()
    if not found:
        pytest.skip("this machine has no address but its own loopback")
    monkeypatch.setenv("MASTER_ADDR", found[-1])  # a machine reaches its own address from that address
    assert peers.own_hosts()[0] == found[-1]
    assert sorted(peers.own_hosts()) == sorted(found)


def told(protocol: int, **versions: str) -> dict[str, Any]:
    return {"protocol": protocol, "versions": versions}


def test_the_rank_of_another_protocol_is_named_with_its_version() -> None:
    same, other = told(5, fastpersist="0.5"), told(4, fastpersist="0.4")
    for rank in range(3):
        with pytest.raises(ConfigError, match=r"ranks 0 and 2 .*: 0\.5 and 0\.4 \(protocols 5 and 4\)"):
            peers.refuse_other_versions(rank, [same, same, other])


def test_only_rank_0_warns_of_other_versions_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [told(5, torch="2.13"), told(5, torch="2.7")]
    with caplog.at_level(logging.WARNING, "fastpersist"):
        peers.refuse_other_versions(1, ranks)
        assert not caplog.records
        peers.refuse_other_versions(0, [ranks[0], ranks[0]])
        assert not caplog.records
        peers.refuse_other_versions(0, ranks)
    (record,) = caplog.records
    assert "2.13, 2.7" in record.getMessage()


# --- the interface that FASTPERSIST_INTERFACE names


def test_interface_is_found_by_its_name_or_an_address() -> None:
    assert peers.hosts_of("lo")[0] == "127.0.0.1"
    assert peers.hosts_of("10.1.2.3") == ["10.1.2.3"]
    assert peers.hosts_of("2001:db8::7") == ["2001:db8::7"]
    with pytest.raises(ConfigError, match=r"FASTPERSIST_INTERFACE.*\blo\b.*'lo7'"):
        peers.hosts_of("lo7")
