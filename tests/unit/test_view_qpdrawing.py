"""The state diagram: every state, every move of the table, and what stands out."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from rdmalab.hostside.qpstate import MOVES, STATES
from rdmalab.view.qpdrawing import CENTRES, SIZE, box_of, describe, draw, path_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("now", ["", *STATES])
def test_it_is_well_formed_and_described(now: str) -> None:
    root = ElementTree.fromstring(draw(now))
    assert root.get("role") == "img"
    assert root.get("aria-label") == describe(now)
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    for state in STATES:
        assert state + ("now" if state == now else "") in texts


@pytest.mark.parametrize("pair", MOVES, ids="-".join)
def test_an_arrow_begins_at_its_state_and_ends_at_the_next(pair: tuple[str, str]) -> None:
    """Each end touches the box, and no arrow leaves the picture."""
    points = path_of(*pair)
    for (x, y), state in ((points[0], pair[0]), (points[-1], pair[1])):
        left, top, right, bottom = box_of(state)
        assert left <= x <= right
        assert top <= y <= bottom
        assert x in (left, right) or y in (top, bottom)
    assert all(0 <= x <= SIZE[0] and 0 <= y <= SIZE[1] for x, y in points)


def test_no_two_states_overlap() -> None:
    boxes = [box_of(state) for state in STATES]
    for number, (left, top, right, bottom) in enumerate(boxes):
        assert left >= 0
        assert right <= SIZE[0]
        for other in boxes[number + 1 :]:
            assert other[0] > right or other[2] < left or other[1] > bottom or other[3] < top
    assert set(CENTRES) == set(STATES)


@pytest.mark.parametrize("now", STATES)
def test_exactly_the_moves_of_the_table_can_be_clicked(now: str) -> None:
    titles = re.findall(r"<title>(\w+) to (\w+)</title>", draw(now))
    assert sorted(titles) == sorted(pair for pair in MOVES if pair[0] == now)
    assert set(re.findall(r'<g data-to="(\w+)"><rect', draw(now))) == set(STATES)


def test_what_is_chosen_is_told_by_more_than_its_colour() -> None:
    plain, chosen = draw("INIT"), draw("INIT", "RTR")
    assert 'stroke-width="4"' not in plain
    assert chosen.count('stroke-width="4"') == 2  # the arrow and its state
