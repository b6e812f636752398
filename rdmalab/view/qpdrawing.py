"""The state diagram of a queue pair as SVG: where it is, and where it may go from there.

Drawn as the specification draws it (IBTA vol. 1, chapter 10.3): the way from RESET to RTS, the two
states of a stopped send queue beside it, and ERR below, which every state but RESET leads to. The
moves are those of :data:`rdmalab.hostside.qpstate.MOVES`.
"""

from __future__ import annotations

import html
import math

from ..hostside.qpstate import MOVES, STATES
from .theme import MUTED, PAPER, SERIES, TEXT

__all__ = ["SIZE", "describe", "draw"]

SIZE = (600, 376)
BOX = (88, 46)
CENTRES = {
    "RESET": (50, 100),
    "INIT": (174, 100),
    "RTR": (298, 100),
    "RTS": (422, 100),
    "SQD": (546, 100),
    "SQE": (484, 210),
    "ERR": (360, 322),
}
WIDE = {"ERR": (460, 46)}  # the box that most states lead down to
RAIL = 32  # height of the way from any state back to RESET
NOW, CHOSEN = SERIES[0].light, SERIES[1].light
Points = list[tuple[float, float]]


def box_of(state: str) -> tuple[float, float, float, float]:
    """Left, top, right, bottom."""
    (x, y), (width, height) = CENTRES[state], WIDE.get(state, BOX)
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def path_of(old: str, new: str) -> Points:
    """The corners of the arrow for a move; the last two give its head's direction."""
    (x, y), (left, top, right, bottom) = CENTRES[old], box_of(old)
    target = box_of(new)
    if old == new:
        at = {"ERR": x + 190}.get(old, x - 26)
        return [
            (at - 10, bottom),
            (at - 10, bottom + 17),
            (at + 10, bottom + 17),
            (at + 10, bottom),
        ]
    if new == "RESET" and old == "ERR":
        return [(left, y), (CENTRES[new][0], y), (CENTRES[new][0], target[3])]
    if new == "RESET":
        start = [(x, top)] if old != "SQE" else [(right, y), (596, y), (596, RAIL)]
        return [
            *start,
            *([(x, RAIL)] if old != "SQE" else []),
            (CENTRES[new][0], RAIL),
            (CENTRES[new][0], target[1]),
        ]
    if new == "ERR":
        return [(x, bottom), (x, target[1])]
    if {old, new} == {"RTS", "SQD"}:
        height = y - 9 if new == "SQD" else y + 9
        return [
            (right if new == "SQD" else left, height),
            (target[0 if new == "SQD" else 2], height),
        ]
    if (old, new) == ("SQE", "RTS"):
        return [(x - 20, top), (CENTRES[new][0] + 32, target[3])]
    if (old, new) == ("RTS", "SQE"):
        return [(x + 14, bottom), (CENTRES[new][0] - 36, target[1])]
    return [(right, y), (target[0], y)]


def arrow(points: Points, colour: str, width: float, *, dashed: bool = False) -> str:
    """A line with a head at its end."""
    (x0, y0), (x, y) = points[-2:]
    angle, size = math.atan2(y - y0, x - x0), 7 + width
    back = (x - size * 0.8 * math.cos(angle), y - size * 0.8 * math.sin(angle))
    wings = [
        (x - size * math.cos(angle + turn), y - size * math.sin(angle + turn))
        for turn in (0.45, -0.45)
    ]
    line = " ".join(f"{px:g},{py:g}" for px, py in [*points[:-1], back])
    head = " ".join(f"{px:.1f},{py:.1f}" for px, py in [(x, y), *wings])
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'
        f'<polygon points="{head}" fill="{colour}"/>'
    )


def move(old: str, new: str, now: str, chosen: str) -> str:
    """One move: pale if it is not possible now, bold if it was chosen; its wide line is clicked."""
    points = path_of(old, new)
    possible, picked = old == now, old == now and new == chosen
    colour, width = (CHOSEN, 4) if picked else (TEXT, 2) if possible else (MUTED, 1)
    drawn = arrow(points, colour, width)
    if not possible:
        return f'<g opacity="0.55">{drawn}</g>'
    line = " ".join(f"{x:g},{y:g}" for x, y in points)
    hit = f'<polyline points="{line}" fill="none" stroke="{TEXT}" stroke-opacity="0"'
    hit += ' stroke-width="18" pointer-events="stroke"/>'
    return f'<g data-to="{new}"><title>{old} to {new}</title>{drawn}{hit}</g>'


def state_box(state: str, now: str, chosen: str) -> str:
    """One state: filled if it is the present one, dashed if no move leads to it now."""
    left, top, right, bottom = box_of(state)
    here, reachable = state == now, (now, state) in MOVES
    fill, ink = (NOW, PAPER) if here else (PAPER, TEXT if reachable or not now else MUTED)
    stroke, width = (CHOSEN, 4) if state == chosen else (NOW if here else ink, 2)
    dash = "" if here or reachable or not now else ' stroke-dasharray="5 4"'
    weight = "bold" if here or reachable else "normal"
    x, y = CENTRES[state]
    now_line = f'<tspan x="{x}" dy="15" font-size="12" font-weight="normal">now</tspan>'
    base, below = (y, now_line) if here else (y + 6, "")
    return (
        f'<g data-to="{state}"><rect x="{left:g}" y="{top:g}" width="{right - left:g}"'
        f' height="{bottom - top:g}" rx="8" fill="{fill}" stroke="{stroke}" stroke-width="{width}"'
        f'{dash}/><text x="{x}" y="{base}" text-anchor="middle" font-size="18" fill="{ink}"'
        f' font-weight="{weight}">{state}{below}</text></g>'
    )


def describe(now: str) -> str:
    """The diagram in a sentence, for those who do not see it."""
    if not now:
        return "State diagram of a queue pair; in which state it is, is not known."
    ways = [state for state in STATES if (now, state) in MOVES]
    return (
        f"State diagram: the queue pair is in {now}; from there it may move to {', '.join(ways)}."
    )


def draw(now: str = "", chosen: str = "") -> str:
    """The diagram as an SVG element. ``now``: the present state, ``chosen``: where to go next."""
    text = html.escape(describe(now))
    later = sorted(MOVES, key=lambda pair: (pair[0] == now, pair == (now, chosen)))
    moves = "".join(move(old, new, now, chosen) for old, new in later)
    automatic = arrow(path_of("RTS", "SQE"), MUTED, 1, dashed=True)
    small = f'font-size="13" fill="{MUTED}"'
    words = (
        f'<text x="62" y="{RAIL - 9}" {small}>from any state to RESET</text>'
        f'<text x="132" y="364" {small}>from any state but RESET to ERR</text>'
    )
    boxes = "".join(state_box(state, now, chosen) for state in STATES)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE[0]} {SIZE[1]}" role="img"'
        f' aria-label="{text}" font-family="Helvetica, Arial, sans-serif"><desc>{text}</desc>'
        f'<g opacity="0.55">{automatic}</g>{moves}{words}{boxes}</svg>'
    )
