"""The packet ladder: packets between hosts as a sequence diagram, beside the calls that made them.

Time runs downward, each host is a vertical line, each packet an arrow. In a notebook the picture
takes the colours of JupyterLab's theme, and it needs none to be read: a NAK, a packet sent again
and a folded run differ in their lines and words.
"""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from .packets import Packet
from .sequence import Row, rows

__all__ = ["Ladder"]

ROWS_MAX = 80

# Sizes in pixels: legible from the back of a room.
CHAR, SMALL_CHAR = 8.0, 7.3  # upper bounds for a character's width at 15 and at 13 pixels
TIME_WIDTH, SPAN_MIN, EDGE = 78, 430, 24
HEAD, CALL_LINE, CALL_CHARS = 58, 18, 40
SLANT = 8  # an arrow falls a little: a packet takes time
STYLE = """
.rl-bg{fill:var(--jp-layout-color0,#fff)}
.rl-t{fill:var(--jp-content-font-color1,#111);font:15px Helvetica,Arial,sans-serif}
.rl-s{fill:var(--jp-content-font-color1,#111);font:13px Helvetica,Arial,sans-serif}
.rl-c{fill:var(--jp-content-font-color1,#111);font:13px Menlo,Consolas,'DejaVu Sans Mono',monospace}
.rl-b{font-weight:bold}
.rl-line{stroke:var(--jp-content-font-color1,#111);stroke-width:2;fill:none}
.rl-life{stroke:var(--jp-content-font-color1,#111);stroke-width:1.5;opacity:.55}
.rl-resp{stroke-width:1.5}
.rl-run{stroke-width:6}
.rl-again{stroke-dasharray:10 6}
.rl-nak{stroke-dasharray:2 5;stroke-width:3;stroke-linecap:round}
.rl-fill{fill:var(--jp-content-font-color1,#111)}
.rl-open{fill:var(--jp-layout-color0,#fff)}
.rl-box{fill:var(--jp-layout-color2,#e8e8e8);stroke:var(--jp-content-font-color1,#111)}
"""
_numbers = itertools.count(1)  # makes ids that are unique in a page


class Ladder:
    """The picture. Shows itself in a notebook; ``str()`` gives the same in words.

    ``hosts``: names in the order of their lines (further ones are added as they occur).
    ``calls``: see :class:`Call`.
    """

    def __init__(
        self,
        packets: Sequence[Packet],
        calls: Iterable[Sequence[Any]] = (),
        *,
        title: str = "",
        hosts: Sequence[str] = (),
    ) -> None:
        self.title = title or "Packets in the order in which they passed"
        every = rows(packets, calls)
        self.rows, self.left = every[:ROWS_MAX], every[ROWS_MAX:]
        named = [row.call.host for row in every if row.call]
        named += [end for packet in packets for end in (packet.src, packet.dst)]
        self.hosts = [name for name in hosts if name in named]
        self.hosts += [name for name in dict.fromkeys(named) if name not in hosts]
        self.start_s = every[0].time_s if every else 0.0

    @property
    def ending(self) -> str:
        """What is said below the last row."""
        if not self.rows:
            return "No packet was seen."
        missing = sum(len(row.packets) for row in self.left)
        return f"{missing} more packets: ladder(packets=wire.packets[a:b])" if self.left else ""

    def __str__(self) -> str:
        lines = [self.title, *(row.text(self.start_s) for row in self.rows), self.ending]
        return "\n".join(line for line in lines if line)

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return Drawing(self).svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self._repr_svg_()}</div>'


class Drawing:
    """One ladder as SVG: lays the rows out from top to bottom, one small picture for each."""

    def __init__(self, ladder: Ladder) -> None:
        self.ladder = ladder
        self.number = next(_numbers)
        self.parts: list[str] = []
        hosts = ladder.hosts or [""]
        texts = [len(f"{row.label}  {row.figures}") * CHAR for row in ladder.rows if not row.call]
        texts += [len(row.details) * SMALL_CHAR for row in ladder.rows]
        span = max([SPAN_MIN, *(width + 60 for width in texts)])
        first_x = EDGE + TIME_WIDTH + self.room_for_calls(hosts[0])
        self.xs = {name: first_x + at * span for at, name in enumerate(hosts)}
        self.last_x = first_x + (len(hosts) - 1) * span
        self.width = self.last_x + self.room_for_calls(hosts[-1] if hosts[1:] else "") + EDGE
        self.y = float(HEAD)

    def room_for_calls(self, host: str) -> float:
        """Room for the calls of a host beside its line."""
        calls = [row.call.text for row in self.ladder.rows if row.call and row.call.host == host]
        longest = max((len(line) for text in calls for line in wrapped(text)), default=0)
        return max(40.0, longest * CHAR + 40)

    def svg(self) -> str:
        """The whole picture."""
        for row in self.ladder.rows:
            draw = self.call if row.call else self.packet if row.packets else self.gap
            draw(row)
        if self.ladder.ending:
            self.y += 30
            self.write(EDGE, self.y, self.ladder.ending, "rl-s")
        height = self.y + 26
        ids = f"rl-title-{self.number}", f"rl-desc-{self.number}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {height:.0f}"'
            f' width="{self.width:.0f}" height="{height:.0f}" style="max-width:100%;height:auto"'
            f' role="img" aria-labelledby="{ids[0]}" aria-describedby="{ids[1]}">'
            f'<title id="{ids[0]}">{escape(self.ladder.title)}</title>'
            f'<desc id="{ids[1]}">{escape(str(self.ladder))}</desc><style>{STYLE}</style>'
            f'<rect class="rl-bg" width="100%" height="100%"/>'
            f"{self.lives(height)}{''.join(self.parts)}</svg>"
        )

    def lives(self, height: float) -> str:
        """The title, and a line for each host under its name."""
        parts = [text_at(EDGE, 24, self.ladder.title, "rl-t rl-b")]
        parts.append(text_at(EDGE, HEAD - 10, "ms", "rl-s"))
        for name, x in self.xs.items():
            parts.append(text_at(x, HEAD - 10, name, "rl-t rl-b", "middle"))
            parts.append(f'<path class="rl-life" d="M {x:.0f} {HEAD - 2} V {height - 12:.0f}"/>')
        return "".join(parts)

    def write(self, x: float, y: float, text: str, kind: str, anchor: str = "start") -> None:
        """A text on the picture."""
        self.parts.append(text_at(x, y, text, kind, anchor))

    def time(self, row: Row) -> None:
        """When, in the column at the left."""
        self.write(EDGE, self.y, f"{(row.time_s - self.ladder.start_s) * 1e3:.2f}", "rl-s")

    def packet(self, row: Row) -> None:
        """An arrow with its label above, and below it what further headers say."""
        self.y += 32
        start, end = self.xs[row.packets[0].src], self.xs[row.packets[0].dst]
        middle = (start + end) / 2
        self.time(row)
        self.parts.append(
            f'<text class="rl-t" x="{middle:.0f}" y="{self.y:.0f}" text-anchor="middle">'
            f'<tspan class="rl-b">{escape(row.label)}</tspan>'
            f'<tspan dx="10">{escape(row.figures)}</tspan></text>'
        )
        self.parts.append(arrow(row, start, end, self.y + 7))
        self.y += 7 + SLANT
        if row.details:
            self.y += 14
            self.write(middle, self.y, row.details, "rl-s", "middle")

    def call(self, row: Row) -> None:
        """A box beside the host's line with the call's text, joined to the line by a dot."""
        if row.call is None:
            return
        lines, x = wrapped(row.call.text), self.xs[row.call.host]
        width, height = max(map(len, lines)) * CHAR + 14, len(lines) * CALL_LINE + 8
        outside = x == self.last_x and len(self.xs) > 1
        side = x + 14 if outside or x != min(self.xs.values()) else x - 14 - width
        self.y += 14 + height / 2
        self.time(row)
        top, joint = self.y - 4 - height / 2, min(side + width, x + 14)
        self.parts.append(
            f'<circle class="rl-fill" cx="{x:.0f}" cy="{self.y - 4:.0f}" r="4"/>'
            f'<path class="rl-line" d="M {x:.0f} {self.y - 4:.0f} H {joint:.0f}"/>'
            f'<rect class="rl-box" x="{side:.0f}" y="{top:.0f}" width="{width:.0f}"'
            f' height="{height}" rx="4"/>'
        )
        for number, line in enumerate(lines):
            self.write(side + 7, top + 17 + number * CALL_LINE, line, "rl-c")
        self.y += height / 2 - 4

    def gap(self, row: Row) -> None:
        """A silence, said in the middle between the hosts."""
        self.y += 30
        middle = (min(self.xs.values()) + self.last_x) / 2
        self.write(middle, self.y, f"\u22ee  {row.label}  \u22ee", "rl-s", "middle")


def arrow(row: Row, start: float, end: float, y: float) -> str:
    """The arrow of a packet or a run; its kind is in its line and its head, not in a colour."""
    packet = row.packets[0]
    way = 1 if end > start else -1
    kinds = [
        "rl-line",
        *(["rl-resp"] if packet.is_response else []),
        *(["rl-run"] if len(row.packets) > 1 else []),
        *(["rl-again"] if packet.again else []),
        *(["rl-nak"] if packet.is_nak else []),
    ]
    tip, to = end - 3 * way, y + SLANT
    way_there = f"M {start:.0f} {y:.0f} L {tip - 8 * way:.0f} {to:.0f}"
    line = f'<path class="{" ".join(kinds)}" d="{way_there}"/>'
    if packet.is_nak:
        x = tip - 12 * way
        cross = f"M {x - 7:.0f} {to - 7:.0f} l 14 14 m 0 -14 l -14 14"
        return f'{line}<path class="rl-line" style="stroke-width:3" d="{cross}"/>'
    points = (
        f"{tip:.0f},{to:.0f} {tip - 13 * way:.0f},{to - 6:.0f} {tip - 13 * way:.0f},{to + 6:.0f}"
    )
    head = "rl-open rl-line" if packet.is_response else "rl-fill"
    style = (
        ' style="stroke-width:1.5;fill:var(--jp-layout-color0,#fff)"' if packet.is_response else ""
    )
    return f'{line}<polygon class="{head}"{style} points="{points}"/>'


def text_at(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    """An SVG text."""
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def escape(text: str) -> str:
    """Text for SVG; what XML cannot hold becomes a question mark."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "?" for c in text))


def wrapped(text: str) -> list[str]:
    """A call's text in lines that fit beside the ladder."""
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, CALL_CHARS)]
    return lines or [" "]
