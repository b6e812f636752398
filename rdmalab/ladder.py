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
BOLD, CHAR, SMALL_CHAR = 10.0, 8.0, 7.3  # at least a character's mean width, 15 and 13 pixels high
TIME_WIDTH, SPAN_MIN, EDGE = 74, 430, 20
HEAD, CALL_LINE, CALL_CHARS = 58, 18, 26
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
.rl-nak{stroke-dasharray:1 6;stroke-width:3;stroke-linecap:round}
.rl-on{fill:var(--jp-layout-color0,#fff)}
.rl-head{stroke:var(--jp-content-font-color1,#111);stroke-width:1.5}
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
        texts = [len(row.label) * BOLD for row in ladder.rows]
        texts += [len(line) * SMALL_CHAR for row in ladder.rows for line in below(row)]
        span = max([SPAN_MIN, *(width + 50 for width in texts)])
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
        foot = self.y + 12
        for text in filter(None, (self.ladder.ending, legend(self.ladder.rows))):
            self.y += 30
            self.write(EDGE, self.y, text, "rl-s")
        height = self.y + 26
        ids = f"rl-title-{self.number}", f"rl-desc-{self.number}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {height:.0f}"'
            f' width="{self.width:.0f}" height="{height:.0f}" style="max-width:100%;height:auto"'
            f' role="img" aria-labelledby="{ids[0]}" aria-describedby="{ids[1]}">'
            f'<title id="{ids[0]}">{escape(self.ladder.title)}</title>'
            f'<desc id="{ids[1]}">{escape(str(self.ladder))}</desc><style>{STYLE}</style>'
            f'<rect class="rl-bg" width="100%" height="100%"/>'
            f"{self.lives(foot)}{''.join(self.parts)}</svg>"
        )

    def lives(self, foot: float) -> str:
        """The title, and a line for each host under its name."""
        parts = [text_at(EDGE, 24, self.ladder.title, "rl-t rl-b")]
        parts.append(text_at(EDGE + TIME_WIDTH - 18, HEAD - 10, "ms", "rl-s", "end"))
        for name, x in self.xs.items():
            parts.append(text_at(x, HEAD - 10, name, "rl-t rl-b", "middle"))
            parts.append(f'<path class="rl-life" d="M {x:.0f} {HEAD - 2} V {foot:.0f}"/>')
        return "".join(parts)

    def write(self, x: float, y: float, text: str, kind: str, anchor: str = "start") -> None:
        """A text on the picture."""
        self.parts.append(text_at(x, y, text, kind, anchor))

    def time(self, row: Row) -> None:
        """When, in the column at the left."""
        ms = f"{(row.time_s - self.ladder.start_s) * 1e3:.2f}"
        self.write(EDGE + TIME_WIDTH - 18, self.y, ms, "rl-s", "end")

    def packet(self, row: Row) -> None:
        """An arrow with its label above, and below it what further headers say."""
        self.y += 32
        start, end = self.xs[row.packets[0].src], self.xs[row.packets[0].dst]
        middle = (start + end) / 2
        self.time(row)
        nak = "rl-on" if row.packets[0].is_nak else ""
        if nak:  # the colours swapped, so that a refusal stands out
            width = len(row.label) * BOLD + len(behind(row)) * CHAR + 44
            self.parts.append(
                f'<rect class="rl-fill" x="{middle - width / 2:.0f}" y="{self.y - 16:.0f}"'
                f' width="{width:.0f}" height="21" rx="4"/>'
            )
        self.parts.append(
            f'<text class="rl-t {nak}" x="{middle:.0f}" y="{self.y:.0f}" text-anchor="middle">'
            f'<tspan class="rl-b">{escape(row.label)}</tspan>'
            f'<tspan dx="10">{escape(behind(row))}</tspan></text>'
        )
        self.parts.append(arrow(row, start, end, self.y + 7))
        self.y += 7 + SLANT
        for line in below(row):
            self.y += 15
            self.write(middle, self.y, line, "rl-s", "middle")

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


def behind(row: Row) -> str:
    """The figures that stand behind a label, if there is room for them."""
    width = len(row.label) * BOLD + len(row.figures) * CHAR
    return row.figures if width <= SPAN_MIN - 20 else ""


def below(row: Row) -> list[str]:
    """What stands below an arrow: figures that have no room above, what further headers say."""
    return [text for text in ("" if behind(row) else row.figures, row.details) if text]


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
    tip, low = end - 2 * way, y + SLANT
    back = tip - 13 * way
    head = "rl-on rl-head" if packet.is_response and not packet.is_nak else "rl-fill"
    return (
        f'<path class="{" ".join(kinds)}" d="M {start:.0f} {y:.0f} L {back:.0f} {low:.0f}"/>'
        f'<polygon class="{head}" points="{tip:.0f},{low:.0f} {back:.0f},{low - 6:.0f}'
        f' {back:.0f},{low + 6:.0f}"/>'
    )


def legend(shown: Sequence[Row]) -> str:
    """What the kinds of arrows mean that occur here."""
    firsts = [row.packets[0] for row in shown if row.packets]
    known = {
        "open head: an answer": any(packet.is_response for packet in firsts),
        "thick: several packets": any(len(row.packets) > 1 for row in shown),
        "ack?: asks for an acknowledgement": any(packet.ack_request for packet in firsts),
        "dashed: seen before, so sent again": any(packet.again for packet in firsts),
        "dotted, label in a box: a refusal": any(packet.is_nak for packet in firsts),
    }
    return "; ".join(text for text, occurs in known.items() if occurs)


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
