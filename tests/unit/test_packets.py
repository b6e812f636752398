"""Decoding without a network: a real capture (made by tests/fabric/test_capture.py) and junk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from rdmalab.anatomy import take_apart
from rdmalab.decoder import (
    DETH,
    HEADERS,
    IETH,
    RETH,
    SIZES,
    Acknowledge,
    Decoder,
    ImmDt,
    dissect,
)
from rdmalab.errors import UsageError
from rdmalab.opcodes import OPERATIONS, RNR_TIMER_MS, opcode_name, syndrome_in_words
from rdmalab.packets import UNDECODED, Packet, PacketTable
from rdmalab.pcap import PcapReader, Record

from .tshark import assert_as_tshark

settings.register_profile("patient", deadline=None)  # a loaded machine may take its time
settings.load_profile("patient")

SAMPLE = Path(__file__).with_name("roce.pcap")
NAMES = {"10.0.0.1": "alice", "10.0.0.2": "bob"}


def decoded(records: list[Record]) -> PacketTable:
    decoder = Decoder(NAMES)
    return PacketTable(decoder.packet(record) for record in records)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return PcapReader().feed(SAMPLE.read_bytes())


@pytest.fixture(scope="module")
def packets(records: list[Record]) -> PacketTable:
    return decoded(records)


def frame(*layers: object, opcode: int, src: str = "10.0.0.1", dst: str = "10.0.0.2") -> bytes:
    """A frame forged with scapy; its checksum is right."""
    packet = Ether() / IP(src=src, dst=dst) / UDP(sport=50000, dport=4791, chksum=0)
    packet /= BTH(opcode=opcode, dqpn=17, psn=1000)
    for layer in layers:
        packet /= layer
    return bytes(packet)


def packet_of(data: bytes) -> Packet:
    return Decoder(NAMES).packet(Record(0.0, data, len(data)))


# ---------------------------------------------------------------- a real capture


def test_tshark_reads_the_same(packets: PacketTable) -> None:
    assert_as_tshark(SAMPLE, packets)


def test_a_message_of_3001_bytes(packets: PacketTable) -> None:
    """MTU 1024: First, Middle, Last; what the pad bytes fill up is no payload."""
    first = next(n for n, packet in enumerate(packets) if packet.opcode == "SEND_FIRST")
    part = packets[first : first + 4]
    assert [p.title for p in part] == ["SEND FIRST", "SEND MIDDLE", "SEND LAST", "ACK"]
    assert [p.payload for p in part] == [1024, 1024, 953, 0]
    psn = part[0].psn or 0
    assert [p.psn for p in part] == [psn, psn + 1, psn + 2, psn + 2]
    assert [(p.src, p.dst) for p in part] == [("alice", "bob")] * 3 + [("bob", "alice")]
    assert part[3].syndrome == "ACK" and part[3].credits is None


def test_every_header_is_read(packets: PacketTable) -> None:
    (add,) = packets.where(opcode="FETCH_ADD")
    (swap,) = packets.where(opcode="COMPARE_SWAP")
    assert add.atomic and add.atomic.swap_or_add == (1 << 63) + 1
    assert swap.atomic and swap.atomic[2:] == (4, 3)
    assert len(packets.where(opcode="ATOMIC_ACKNOWLEDGE")) == 2
    (datagram,) = packets.where(transport="UD")
    assert (datagram.title, datagram.payload) == ("UD SEND ONLY", 77)
    assert datagram.qkey == 0x11111111 and datagram.src_qp is not None
    written = packets.where(opcode="RDMA_WRITE_ONLY_WITH_IMMEDIATE")[0]
    assert written.reth and written.reth.length == 2 and written.payload == 2
    assert written.imm is not None and written.imm.to_bytes(4, "little") == b"\0\0\0\2"
    assert packets.where(syndrome="RNR NAK")[0].rnr_timer_ms == 5.12
    assert packets.where(is_nak=True)[-1].title == "NAK: remote access error"


def test_checksums_are_those_that_scapy_computes(records: list[Record]) -> None:
    """The ICRC covers headers and payload; a wrong byte anywhere is noticed."""
    checked = 0
    for record, packet in zip(records, decoded(records), strict=True):
        if packet.icrc is None or packet.qp == 0:
            continue
        bth = dissect(record.frame)[BTH]
        assert bth.compute_icrc(b"") == packet.icrc.to_bytes(4, "big"), packet.summary
        checked += 1
    assert checked > 50


def test_what_is_junk_is_said_to_be(packets: PacketTable) -> None:
    """0, 1, 11 and 12 bytes to port 4791 are no packet; 16 zeros are one, for queue pair 0."""
    junk = packets[-6:]
    assert [packet.opcode for packet in junk] == [UNDECODED] * 4 + ["SEND_FIRST"] * 2
    assert "too short" in junk[1].note and "too short" in junk[1].details
    assert [packet.length for packet in junk] == [42, 43, 53, 54, 58, 82]


def test_a_packet_seen_before_is_marked(packets: PacketTable) -> None:
    """The SEND that met no receive was sent until one was there; nothing else came twice."""
    again = packets.where(again=True)
    assert {packet.title for packet in again[:-1]} == {"SEND ONLY", "RNR NAK"}
    assert len({packet.psn for packet in again[:-1]}) == 1


def test_a_packet_taken_apart(records: list[Record], packets: PacketTable) -> None:
    """The parts of every frame add up to its length."""
    for record in records:
        assert sum(part.size for part in take_apart(record)) == record.length
    (number,) = (p.number for p in packets.where(opcode="SEND_LAST"))
    last = take_apart(records[number - 1])
    assert [(part.name, part.size) for part in last] == [
        ("Ethernet", 14), ("IPv4", 20), ("UDP", 8), ("BTH", 12),
        ("payload", 953), ("pad", 3), ("ICRC", 4),
    ]  # fmt: skip
    (number,) = (p.number for p in packets.where(opcode="COMPARE_SWAP"))
    assert "compare 3, swap 4" in repr(take_apart(records[number - 1]))
    assert take_apart(records[number])._repr_html_().count("<tr>") == 9
    assert [part.name for part in take_apart(records[-6])] == ["Ethernet", "IPv4", "UDP"]


# ---------------------------------------------------------------- the names


def test_opcodes_are_those_of_scapy() -> None:
    from scapy.contrib import roce

    for code, name in roce._bth_opcodes.items():
        transport, _, operation = name.partition("_")
        assert opcode_name(code) == ((transport, operation) if operation else ("RC", "CNP"))


def test_every_byte_has_a_name() -> None:
    names = [opcode_name(code) for code in range(256)]
    assert len(set(names)) == 256
    assert all(operation for _, operation in names)
    for code in range(256):
        assert syndrome_in_words(code)
    assert len(RNR_TIMER_MS) == 32 and sorted(RNR_TIMER_MS[1:]) == list(RNR_TIMER_MS[1:])
    assert (RNR_TIMER_MS[12], RNR_TIMER_MS[18], RNR_TIMER_MS[0]) == (0.64, 5.12, 655.36)


def test_headers_follow_the_specifications_table() -> None:
    """IBTA Volume 1, table 38, in bytes behind the BTH: a second way to write the same."""
    sizes = {code: sum(SIZES[kind] for kind in chain) for code, chain in HEADERS.items()}
    rc = dict(zip(OPERATIONS, (sizes[code] for code in range(30)), strict=True))
    assert [rc[name] for name in OPERATIONS[:24]] == [
        *(0, 0, 0, 4, 0, 4),
        *(16, 0, 0, 4, 16, 20),
        *(16, 4, 0, 4, 4, 4, 12, 28, 28, 0, 4, 4),
    ]
    assert (sizes[0x64], sizes[0x65]) == (8, 12)


def test_forged_packets_of_what_rxe_does_not_send() -> None:
    gone = packet_of(frame(IETH(rkey=0x77), Raw(b"x" * 8), opcode=0x17))
    assert (gone.opcode, gone.invalidate_rkey) == ("SEND_ONLY_WITH_INVALIDATE", 0x77)
    few = packet_of(frame(Acknowledge(syndrome=0x05, msn=9), opcode=0x11))
    assert (few.syndrome, few.credits, few.msn) == ("ACK", 5, 9)
    told = packet_of(frame(DETH(qkey=1, src_qp=2), ImmDt(data=3), Raw(b"abcd"), opcode=0x65))
    assert (told.qkey, told.src_qp, told.imm, told.payload) == (1, 2, 3, 4)
    cnp = packet_of(frame(Raw(bytes(16)), opcode=0x81))
    assert (cnp.opcode, cnp.payload) == ("CNP", 0)
    six = Ether() / IPv6(src="fe80::1", dst="fe80::2") / UDP(dport=4791)
    six /= BTH(opcode=0x0A, dqpn=1) / RETH(va=1, rkey=2, length=4) / Raw(b"data")
    written = packet_of(bytes(six))
    assert (written.src, written.opcode, written.payload) == ("fe80::1", "RDMA_WRITE_ONLY", 4)


def test_a_host_is_also_known_by_its_hardware_address() -> None:
    data = frame(opcode=4, src="192.168.7.7")
    mac = dissect(data).src
    packet = Decoder({mac: "alice", **NAMES}).packet(Record(0.0, data, len(data)))
    assert (packet.src, packet.dst) == ("alice", "bob")


# ---------------------------------------------------------------- bytes that a peer chooses


@given(st.integers(0, 255), st.binary(max_size=80), st.integers(0, 120))
def test_no_bytes_behind_the_header_raise(opcode: int, tail: bytes, cut: int) -> None:
    whole = frame(Raw(tail), opcode=opcode)
    packet = Decoder(NAMES).packet(Record(0.0, whole[: len(whole) - cut], len(whole)))
    assert packet.summary and repr(PacketTable([packet]))
    assert packet.payload >= 0
    json.dumps(packet.as_dict())


@given(st.binary(max_size=120))
def test_no_frame_raises(data: bytes) -> None:
    assert packet_of(data).summary
    assert repr(take_apart(Record(0.0, data, len(data))))


@given(st.data())
def test_no_damage_to_a_real_packet_raises(data: st.DataObject) -> None:
    records = PcapReader().feed(SAMPLE.read_bytes())
    record = data.draw(st.sampled_from(records))
    harmed = bytearray(record.frame)
    for _ in range(data.draw(st.integers(1, 4))):
        harmed[data.draw(st.integers(0, len(harmed) - 1))] = data.draw(st.integers(0, 255))
    packet = Decoder(NAMES).packet(Record(0.0, bytes(harmed), len(harmed)))
    assert repr(take_apart(Record(0.0, bytes(harmed), len(harmed))))
    assert packet.summary and packet.details is not None


# ---------------------------------------------------------------- the file's format


@given(st.lists(st.integers(1, 3000), max_size=12))
def test_a_file_may_come_in_any_pieces(sizes: list[int]) -> None:
    data = SAMPLE.read_bytes()
    reader, records, at = PcapReader(), [], 0
    for size in [*sizes, len(data)]:
        records += reader.feed(data[at : at + size])
        at += size
    assert records == PcapReader().feed(data)
    assert reader.whole() == data


def test_half_a_record_is_left_out_of_the_file() -> None:
    data = SAMPLE.read_bytes()
    reader = PcapReader()
    count = len(reader.feed(data[:-3]))
    again = PcapReader()
    assert len(again.feed(reader.whole())) == count
    assert again.whole() == reader.whole()


def test_nanoseconds_and_the_other_byte_order() -> None:
    header = bytes.fromhex("a1b23c4d00020004") + bytes(8) + bytes.fromhex("0000ffff00000001")
    record = (7).to_bytes(4, "big") + (500_000_000).to_bytes(4, "big") + b"\0\0\0\2\0\0\0\5hi"
    assert PcapReader().feed(header + record) == [Record(7.5, b"hi", 5)]
    with pytest.raises(ValueError, match="no pcap file"):
        PcapReader().feed(b"GIF89a" * 10)


# ---------------------------------------------------------------- the table


def test_the_table_counts_and_chooses(packets: PacketTable) -> None:
    assert len(packets.where(src="bob", opcode="ACKNOWLEDGE")) > 10
    assert isinstance(packets[:3], PacketTable) and isinstance(packets[0], Packet)
    with pytest.raises(UsageError, match="no 'sender'"):
        packets.where(sender="bob")
    with pytest.raises(UsageError, match="There is no opcode 'SEND'"):
        packets.where(opcode="SEND")


def test_the_table_in_text_and_html(packets: PacketTable) -> None:
    lines = repr(packets[:4]).splitlines()
    assert len(lines) == 5 and lines[0].startswith("no.")
    shown = packets[:4]._repr_html_()
    assert shown.count("<tr>") == 5 and "<th" in shown
    assert repr(PacketTable()) == "No RoCEv2 packet was seen."
    told = PacketTable(packets, ["Something <else>."])
    assert "Something &lt;else&gt;." in told._repr_html_()
    assert "Something <else>." in repr(told)


def test_a_long_table_says_what_it_leaves_out(packets: PacketTable) -> None:
    many = PacketTable(list(packets) * 3)
    assert f"{len(many) - 100} more packets are not shown" in repr(many)


def test_a_packet_as_plain_data(packets: PacketTable) -> None:
    plain = json.loads(json.dumps(packets.where(opcode="RDMA_READ_REQUEST")[-1].as_dict()))
    assert plain["reth"]["rkey"] == 1 and "imm" not in plain
