"""The ladder as rows and as a picture: order, folding, calls, and what may stand in it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmalab.errors import UsageError
from rdmalab.ladder import Ladder
from rdmalab.packets import Packet
from rdmalab.sequence import rows

settings.register_profile("patient", deadline=None)  # a loaded machine may take its time
settings.load_profile("patient")


def packet(ms: float, opcode: str, psn: int, **more: Any) -> Packet:
    src = more.pop("src", "alice")
    dst = "bob" if src == "alice" else "alice"
    return Packet(0, 1e9 + ms / 1e3, src, dst, opcode, "RC", psn=psn, qp=17, **more)


def write(middles: int) -> list[Packet]:
    """A WRITE of so many middle packets, and its ACK."""
    sent = [packet(0, "RDMA_WRITE_FIRST", 1000, payload=1024)]
    sent += [
        packet(n / 10, "RDMA_WRITE_MIDDLE", 1000 + n, payload=1024) for n in range(1, middles + 1)
    ]
    last = middles + 1
    sent.append(packet(last / 10, "RDMA_WRITE_LAST", 1000 + last, payload=5, ack_request=True))
    ack = packet(last / 10 + 1, "ACKNOWLEDGE", 1000 + last, src="bob", syndrome="ACK", msn=1)
    return [*sent, ack]


def labels(packets: list[Packet], calls: Any = ()) -> list[str]:
    return [row.call.text if row.call else row.label for row in rows(packets, calls)]


def test_long_runs_are_folded_and_short_ones_are_not() -> None:
    assert labels(write(62)) == [
        "RDMA WRITE FIRST",
        "62 x RDMA WRITE MIDDLE",
        "RDMA WRITE LAST",
        "ACK",
    ]
    assert rows(write(62))[1].figures == "PSN 1001..1062, 62 x 1024 B"
    assert labels(write(3)).count("RDMA WRITE MIDDLE") == 3


def test_a_run_ends_at_a_hole_and_at_a_repetition() -> None:
    sent = write(20)
    del sent[10]
    assert [label for label in labels(sent) if "MIDDLE" in label] == [
        "9 x RDMA WRITE MIDDLE",
        "10 x RDMA WRITE MIDDLE",
    ]
    again = [packet(9, "RDMA_WRITE_MIDDLE", p, payload=1024, again=True) for p in range(1021, 1027)]
    run = [packet(8, "RDMA_WRITE_MIDDLE", p, payload=1024) for p in range(1015, 1021)]
    assert labels(run + again) == ["6 x RDMA WRITE MIDDLE", "again: 6 x RDMA WRITE MIDDLE"]


def test_packet_numbers_wrap_around() -> None:
    top = (1 << 24) - 3
    run = [packet(n, "SEND_MIDDLE", (top + n) % (1 << 24), payload=1024) for n in range(6)]
    (row,) = rows(run)
    assert row.figures == "PSN 16777213..2, 6 x 1024 B"


def test_equal_answers_are_folded() -> None:
    acks = [
        packet(n, "ACKNOWLEDGE", 1005, src="bob", syndrome="ACK", msn=2, again=True)
        for n in range(9)
    ]
    (row,) = rows(acks)
    assert (row.label, row.figures) == ("again: 9 x ACK", "PSN 1005, MSN 2")


def test_a_silence_gets_a_row() -> None:
    late = [packet(0, "SEND_ONLY", 1), packet(67, "SEND_ONLY", 1, again=True)]
    assert labels(late) == ["SEND ONLY", "67.0 ms later", "again: SEND ONLY"]


def test_calls_stand_where_they_were_made() -> None:
    """By time; or before the first packet that carries their PSN, from their own host."""
    sent = write(10)
    by_time = ("alice", "post_send", sent[0].time_s - 0.001)
    assert labels(sent, [by_time])[0] == "post_send"
    polled = ("alice", "poll", sent[-1].time_s + 0.001)
    assert labels(sent, [polled])[-1] == "poll"
    assert labels(sent, [("alice", "write", 1000)])[0] == "write"
    assert labels(sent, [["bob", "answer", 1011]])[-3:] == ["answer", "RDMA WRITE LAST", "ACK"]
    middle = labels(sent, [("bob", "look", sent[5].time_s + 1e-6)])
    assert middle[1:4] == ["5 x RDMA WRITE MIDDLE", "look", "5 x RDMA WRITE MIDDLE"]


@pytest.mark.parametrize(
    "call",
    [("alice", "x"), ("alice", 5, 1.0), ("alice", "x", "1000"), ("alice", "x", None), ("alice",)],
)
def test_what_is_no_call_is_refused_with_a_right_one(call: Any) -> None:
    with pytest.raises(UsageError, match=r'\("alice", "post_send", 1000\)'):
        Ladder(write(1), [call])


def test_a_call_for_a_packet_that_was_not_seen() -> None:
    with pytest.raises(UsageError, match="No packet with PSN 7"):
        Ladder(write(1), [("alice", "x", 7)])


# ---------------------------------------------------------------- the picture


def svg(ladder: Ladder) -> ET.Element:
    return ET.fromstring(ladder._repr_svg_())


def words(root: ET.Element) -> str:
    return " ".join(root.itertext())


def test_the_picture_names_and_describes_itself() -> None:
    ladder = Ladder(write(62), [("alice", "qp.post_send(WRITE)", 1000)], title="One <WRITE>")
    root = svg(ladder)
    assert root.attrib["role"] == "img"
    ids = {element.attrib["id"]: element.text for element in root if "id" in element.attrib}
    assert ids[root.attrib["aria-labelledby"]] == "One <WRITE>"
    described = ids[root.attrib["aria-describedby"]]
    assert described and "alice -> bob: 62 x RDMA WRITE MIDDLE" in described
    assert "qp.post_send(WRITE)" in words(root)
    assert str(ladder) == described


def test_two_pictures_in_a_page_do_not_share_an_id() -> None:
    page = Ladder(write(1))._repr_html_() + Ladder(write(1))._repr_html_()
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)) == 4


def test_kinds_differ_in_lines_and_words_not_in_colour() -> None:
    sent = [
        packet(0, "SEND_ONLY", 1),
        packet(1, "ACKNOWLEDGE", 1, src="bob", syndrome="RNR NAK", rnr_timer_ms=0.64, msn=0),
        packet(2, "SEND_ONLY", 1, again=True),
        packet(3, "ACKNOWLEDGE", 1, src="bob", syndrome="ACK", msn=1),
    ]
    picture = Ladder(sent)._repr_svg_()
    kinds = re.findall(r'<path class="(rl-line[^"]*)"', picture)
    assert len(set(kinds)) == 4
    for word in ("RNR NAK", "wait 0.64 ms", "again: SEND ONLY", "dashed:", "dotted", "open head"):
        assert word in picture
    colours = set(re.findall(r"(?:fill|stroke):([^;}]+)", picture))
    assert len(colours) == 4, "text, background, boxes, and none"


def test_it_stands_alone_and_in_a_theme() -> None:
    """Every colour is JupyterLab's with a fallback, so it also reads as a file."""
    picture = Ladder(write(1))._repr_svg_()
    assert all("," in use for use in re.findall(r"var\([^)]*\)", picture))
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_hosts_stand_in_the_labs_order() -> None:
    sent = [packet(0, "SEND_ONLY", 1, src="bob")]
    assert Ladder(sent, hosts=["alice", "bob", "carol"]).hosts == ["alice", "bob"]
    assert Ladder(sent).hosts == ["bob", "alice"]


def test_three_hosts_and_calls_on_each() -> None:
    """The calls of a host in the middle stand to the right of its line, inside the picture."""
    sent = [
        Packet(1, 1e9, "alice", "bob", "SEND_ONLY", "RC", psn=1),
        Packet(2, 1e9 + 1e-3, "bob", "carol", "SEND_ONLY", "RC", psn=2),
    ]
    calls = [(name, f"a call of {name}", 1e9 - 1) for name in ("alice", "bob", "carol")]
    root = svg(Ladder(sent, calls))
    assert all(f"a call of {name}" in words(root) for name in ("alice", "bob", "carol"))
    xs = {float(life.attrib["d"].split()[1]) for life in root if life.get("class") == "rl-life"}
    assert len(xs) == 3 and max(xs) < float(root.attrib["viewBox"].split()[2])


def test_no_packets_and_too_many() -> None:
    assert "No packet was seen." in words(svg(Ladder([])))
    many = [packet(n, "SEND_ONLY", 2 * n) for n in range(200)]
    ladder = Ladder(many)
    assert len(ladder.rows) == 80
    assert "120 more packets" in words(svg(ladder)) and "120 more packets" in str(ladder)


def test_texts_stay_between_the_lines() -> None:
    """The widest label fits between two hosts, and calls fit at the sides."""
    long = packet(0, "RDMA_WRITE_LAST_WITH_IMMEDIATE", 16_000_000, payload=4096, ack_request=True)
    calls = [("alice", "a call with a great many words in it " * 3, 16_000_000)]
    root = svg(Ladder([long], calls))
    width = float(root.attrib["viewBox"].split()[2])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        if "x" in box.attrib:
            assert 0 <= float(box.attrib["x"]) <= width - float(box.attrib["width"])


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_text_makes_a_picture(text: str, host: str) -> None:
    ladder = Ladder(write(1), [(host, text, 1e9)], title=text)
    svg(ladder)
