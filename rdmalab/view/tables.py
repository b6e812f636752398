"""Tables in plain words: each host's RDMA device and its GIDs, as the host itself sees them now."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import RdmalabError
from .asking import ask
from .theme import STYLE, TEXT, adaptive

if TYPE_CHECKING:
    from ..lab import Host, Lab

__all__ = ["Table", "devices", "gids"]

COLUMN = 44  # characters of a column in text

DEVICE_WORDS = (
    # what a host tells of its device, the row's name, what it means
    ("device", "device", "the RDMA device that this host may open"),
    ("port", "port", "ports are counted from 1"),
    ("state", "link", "data moves only while it is active"),
    ("link_layer", "link layer", "Ethernet means RoCE; a native InfiniBand port says InfiniBand"),
    ("mtu", "path MTU", "the most data bytes in one packet"),
    ("netdev", "interface", "the Ethernet interface that carries the packets"),
    ("ip", "address", "from which the RoCE v2 GID is made"),
    ("gid", "GID to use", "the IPv4-mapped form of the address; choose it by value"),
    ("max_qp", "queue pairs", "at most, all programs together"),
    ("max_mr", "memory regions", "at most, all programs together"),
    ("max_rd_atomic", "reads in flight", "that one queue pair may serve at once"),
)
GID_HEAD = ("host", "index", "GID", "type", "made from", "use it for")


class Table:
    """Rows with a head and a title, for a page, a screen reader and a terminal."""

    def __init__(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.title, self.head = title, tuple(head)
        self.rows = [tuple(row) for row in rows]

    def __repr__(self) -> str:
        table = [self.head, *self.rows]
        widths = [min(COLUMN, max(len(row[at]) for row in table)) for at in range(len(self.head))]
        lines = [self.title]
        for row in table:
            cells = [textwrap.wrap(text, COLUMN) or [""] for text in row]
            for at in range(max(map(len, cells))):
                parts = [cell[at] if at < len(cell) else "" for cell in cells]
                pairs = zip(parts, widths, strict=True)
                lines.append("  ".join(part.ljust(width) for part, width in pairs).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        head = "".join(f'<th scope="col" {left}>{html.escape(name)}</th>' for name in self.head)
        body = ""
        for first, *others in self.rows:
            cells = "".join(f"<td {left}>{html.escape(text)}</td>" for text in others)
            body += f'<tr><th scope="row" {left}>{html.escape(first)}</th>{cells}</tr>'
        title = (
            f'<caption style="text-align:left;font-weight:bold">{html.escape(self.title)}</caption>'
        )
        return (
            f'<div class="rdmalab-view" style="overflow-x:auto;color:{adaptive(TEXT)}">'
            f"<style>{STYLE}</style><table>{title}<thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )


def answer_of(host: Host, question: str) -> Any:
    """The answer of ``rdmalab.inventory`` on a host, or the reason why there is none, as text."""
    try:
        return ask(host, "inventory", question)
    except RdmalabError as error:
        return str(error)


def devices(lab: Lab) -> Table:
    """What each host's RDMA device is, as the host sees it now, with the meaning of each row."""
    answers = {host.name: answer_of(host, "device") for host in lab.hosts}
    rows = []
    for key, name, meaning in DEVICE_WORDS:
        values = [
            str(answer[key]) if isinstance(answer, dict) else "no answer"
            for answer in answers.values()
        ]
        rows.append([name, *values, meaning])
    silent = [text for text in answers.values() if isinstance(text, str)]
    title = " ".join(["RDMA devices, as the hosts see them now", *silent])
    return Table(title, ["", *answers, "meaning"], rows)


def gids(lab: Lab) -> Table:
    """The GID table of each host: index, value, type, which address it is made from, its use."""
    rows: list[list[str]] = []
    for host in lab.hosts:
        answer = answer_of(host, "gids")
        if isinstance(answer, str):
            rows.append([host.name, "", "no answer", "", "", answer])
            continue
        for entry in answer:
            words = entry["gid"], entry["type"], entry["origin"], entry["use"]
            rows.append([host.name, str(entry["index"]), *words])
    return Table("GID tables, as the hosts see them now", GID_HEAD, rows)
