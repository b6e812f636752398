"""A picture in a notebook: it follows the page's theme, has a description, and can be saved.

::

    Picture ──┬── in a page: inline SVG whose colours are CSS variables (JupyterLab, HTML export)
              ├── elsewhere: a PNG on white (PDF export), or its description as text
              └── save("x.svg"), save("x.png"), save("x.pdf")
"""

from __future__ import annotations

import html
import io
import itertools
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..errors import UsageError
from .theme import PAPER, STYLE, TEXT, adaptive, dark

__all__ = ["Picture"]

FORMATS = ("svg", "png", "pdf")
SVG_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "rdmalab"}  # text stays text; same ids
WIDTH_REM = 56  # a picture is never shown larger than this
PNG_DPI = 110
_count = itertools.count(1)


class Picture:
    """A drawn figure with its description (``alt``) and what stands below it (``caption``).

    ``figure`` is matplotlib's, for those who want to change something before they show it.
    """

    def __init__(self, figure: Figure, *, alt: str, caption: str = "") -> None:
        self.figure, self.alt, self.caption = figure, alt, caption

    def svg(self) -> str:
        """The picture as an SVG element in the light colours, with its description inside."""
        file = io.StringIO()
        with matplotlib.rc_context(SVG_SETTINGS):
            self.figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        return described(file.getvalue(), self.alt)

    def save(self, path: str | Path, *, theme: str = "light") -> Path:
        """Write a file that stands alone: ``.svg``, ``.png`` or ``.pdf``; returns its path.

        ``theme="dark"`` (SVG only) draws light on dark.
        """
        path = Path(path)
        kind = path.suffix.lower().lstrip(".")
        if kind not in FORMATS:
            raise UsageError(
                f"A picture is not saved as {path.suffix or 'a file without an ending'}.",
                next_step="Name a file that ends in .svg, .png or .pdf.",
            )
        if kind == "svg":
            drawing = on_paper(self.svg())
            path.write_text(dark(drawing) if theme == "dark" else drawing, encoding="utf-8")
        else:
            self.figure.savefig(path, format=kind, dpi=2 * PNG_DPI, facecolor=PAPER)
        return path

    def _repr_html_(self) -> str:
        """A figure for a page, in the page's colours."""
        caption = f"<figcaption>{html.escape(self.caption)}</figcaption>" if self.caption else ""
        return (
            f'<figure class="rdmalab-view" style="margin:0.5em 0;max-width:{WIDTH_REM}rem;'
            f'background:none;color:{adaptive(TEXT)}"><style>{STYLE}</style>'
            f"{adaptive(embedded(self.svg()))}{caption}</figure>"
        )

    def _repr_png_(self) -> bytes:
        """For readers that show no HTML."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=PNG_DPI, facecolor=PAPER)
        return file.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {
            "text/html": self._repr_html_(),
            "image/png": self._repr_png_(),
            "text/plain": repr(self),
        }

    def __repr__(self) -> str:
        return f"[picture] {self.alt}" + (f" ({self.caption})" if self.caption else "")


def described(document: str, alt: str) -> str:
    """The SVG element of matplotlib's document, with a description for screen readers."""
    element = document[document.index("<svg") :]
    element = re.sub(r"<(metadata|style).*?</\1>", "", element, flags=re.DOTALL)  # styles the page
    text = html.escape(alt)
    head = f'<svg role="img" aria-label="{text}" stroke-linejoin="round" stroke-linecap="butt"'
    element = element.replace("<svg", head, 1)
    end = element.index(">") + 1
    return f"{element[:end]}<desc>{text}</desc>{element[end:]}"


def embedded(element: str) -> str:
    """An SVG element as a part of a page: as wide as there is room, ids of its own, page's font."""
    number = next(_count)
    element = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>rv{number}-", element)
    element = re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2)
    element = re.sub(
        r"'DejaVu Sans'(, [^;\"]*?)?sans-serif", "var(--jp-ui-font-family,sans-serif)", element
    )
    return element.replace("<svg", '<svg style="width:100%;height:auto;display:block"', 1)


def on_paper(element: str) -> str:
    """A document of an SVG element with a background of its own."""
    end = element.index(">", element.index("</desc>")) + 1
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{element[:end]}{paper}{element[end:]}'
