"""Which hosts a lab can have, and that no two of them are ever alike."""

from __future__ import annotations

import ipaddress
import itertools
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab import topology
from rdmalab.errors import UsageError

settings.register_profile("patient", deadline=None)  # a loaded machine may take its time
settings.load_profile("patient")
INTERFACE_NAME_MAX = 15  # IFNAMSIZ of linux/if.h, without the final NUL
names = st.from_regex(r"[a-z][a-z0-9]{0,11}", fullmatch=True).filter(lambda name: name != "desk")


def test_the_default_pair() -> None:
    alice, bob = topology.plan(topology.DEFAULT_HOSTS)
    assert (alice.name, alice.ip, alice.device) == ("alice", "10.0.0.1", "rxe_alice")
    assert (bob.name, bob.ip, bob.device) == ("bob", "10.0.0.2", "rxe_bob")


def test_the_desk_is_no_host() -> None:
    with pytest.raises(UsageError, match="lab.desk"):
        topology.plan(["alice", "desk"])


@given(st.lists(names, min_size=1, max_size=topology.MAX_HOSTS, unique=True))
def test_hosts_share_nothing(wanted: list[str]) -> None:
    """B05: names, addresses and devices are different on all hosts, in the order that was asked."""
    hosts = topology.plan(wanted)
    assert [host.name for host in hosts] == wanted
    for one, other in itertools.combinations(hosts, 2):
        assert one.ip != other.ip and one.device != other.device
    wire = ipaddress.ip_network("10.0.0.0/24")
    assert all(ipaddress.ip_address(host.ip) in wire for host in hosts)


@given(names)
def test_an_accepted_name_fits_everywhere_it_is_used(name: str) -> None:
    """As a hostname (RFC 1123) and, with its prefix, as an interface's name."""
    topology.plan([name])
    assert len(f"v-{name}") <= INTERFACE_NAME_MAX
    assert set(name) <= set(string.ascii_lowercase + string.digits)


@given(st.text(max_size=20))
def test_any_text_is_a_name_or_a_usage_error(text: str) -> None:
    try:
        topology.plan([text])
    except UsageError as error:
        assert error.exit_code == 2 and "small letters" in str(error)
    else:
        assert text.isascii() and text.isalnum() and text == text.lower()


@pytest.mark.parametrize(
    "wanted",
    ["", "Alice", "alice-1", "1st", "a" * 13, "al ice", "alice\n", "älice", "../etc", "-alice"],
)
def test_names_that_cannot_be(wanted: str) -> None:
    with pytest.raises(UsageError, match="begin with a letter"):
        topology.plan([wanted])


@pytest.mark.parametrize("count", [0, 9, 100])
def test_one_to_eight_hosts(count: int) -> None:
    with pytest.raises(UsageError, match=f"1 to 8 hosts, not {count}"):
        topology.plan([f"h{number}" for number in range(count)])


def test_a_name_given_twice() -> None:
    with pytest.raises(UsageError, match="'bob' is given twice"):
        topology.plan(["bob", "alice", "bob"])


@pytest.mark.parametrize("lab", ["default", "a", "7", "grading-17_b", "x" * 31])
def test_lab_ids_that_can_be(lab: str) -> None:
    assert topology.check_lab_id(lab) == lab


@pytest.mark.parametrize("lab", ["", ".", "..", "a/b", "A", "-a", "_a", "x" * 32, "a\n", "a b"])
def test_lab_ids_that_cannot_be(lab: str) -> None:
    with pytest.raises(UsageError, match="cannot be a lab's id"):
        topology.check_lab_id(lab)


@given(st.text(max_size=8), st.text(max_size=8), st.lists(names, max_size=8, unique=True))
def test_mac_addresses_are_local_single_and_different(
    owner: str, lab: str, hosts: list[str]
) -> None:
    """B05: of the two low bits of the first byte, *local* is set and *group* is not (IEEE 802)."""
    macs = topology.mac_addresses(owner, lab, hosts)
    assert list(macs) == hosts and len(set(macs.values())) == len(hosts)
    for mac in macs.values():
        octets = bytes.fromhex(mac.replace(":", ""))
        assert len(octets) == 6 and octets[0] & 0b11 == 0b10


def test_mac_addresses_tell_owners_and_labs_apart() -> None:
    """B05: so a capture of two labs shows whose packet is whose."""
    seen = {
        topology.mac_addresses(owner, lab, ["alice"])["alice"]
        for owner in ("0", "1000")
        for lab in ("default", "other")
    }
    assert len(seen) == 4
    assert topology.mac_addresses("0", "x", ["a"]) == topology.mac_addresses("0", "x", ["a"])
