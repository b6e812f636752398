"""The live state diagram: bound to a queue pair on a host, by the name of its variable.

::

    page ── qpdiagram.js ── comm ── QPDiagram ── ask ── rdmalab.qpmove on the host ── kernel
             draws a scene           holds one           looks, or runs the call

In a page without a running widget there is a static picture of the state that was seen last.
"""

from __future__ import annotations

import contextlib
import functools
import html
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from ..errors import BackendError, HostBusy, RdmalabError
from .asking import ask
from .qpdrawing import draw
from .qpscene import Scene
from .theme import MUTED, PAPER, SERIES, STYLE, TEXT, adaptive

if TYPE_CHECKING:
    from ..lab import Host

__all__ = ["QPDiagram", "qp_diagram"]

CODE = Path(__file__).with_name("qpdiagram.js")
INKS = {"TEXT": TEXT, "MUTED": MUTED, "PAPER": PAPER}
INKS |= {"BLUE": SERIES[0].light, "ORANGE": SERIES[1].light, "GREEN": SERIES[2].light}
LOOKS = Template(CODE.with_suffix(".css").read_text(encoding="utf-8"))
CSS = STYLE + adaptive(LOOKS.substitute(INKS))
_open: dict[tuple[str, str, str], QPDiagram] = {}  # by lab, host and name of the variable


@functools.cache
def panel_class() -> Any:
    """The widget's Python end; None where there are no such widgets, as at a desk in the guest."""
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError:
        return None

    class Panel(anywidget.AnyWidget):
        _esm = CODE.read_text(encoding="utf-8")
        _css = CSS
        scene = traitlets.Dict().tag(sync=True)

    return Panel


class QPDiagram:
    """The state diagram of one queue pair; made by :func:`qp_diagram`.

    Shown as the last line of a cell it is live. In code, ``state`` is the state that the host tells
    now, and ``move("INIT")`` does what a click does and returns the answer.
    """

    def __init__(self, host: Host, name: str, peer: Any = None, peer_name: str = "") -> None:
        self.host, self.name = host, name
        self.peer, self.peer_name = peer, peer_name or name
        self.scene = Scene(host.name, name)
        self.panel: Any = None
        self._resting = False  # the host did not answer; it is asked again only on request
        self._turn = 0  # messages from the page that were answered
        self._picture: Any = None
        self._shown = ""  # the state in the static picture
        self.refresh()

    # --- what it does -----------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state that the host tells now; empty if there is no such queue pair."""
        self.refresh()
        return self.scene.state

    def move(self, new: str, **values: Any) -> str:
        """Move the queue pair: ``diagram.move("RTR", dest_qp_num=18)``. The answer in words.

        ``values`` are inputs as the picture has them; :data:`rdmalab.hostside.qpcall.INPUTS`.
        """
        for key, value in values.items():
            self.scene.set(key, str(value))
        self.refresh()
        self.choose(new)
        self.run()
        return self.scene.answer

    def choose(self, new: str) -> None:
        """Look at a move, and what it requires, before it is made."""
        self.scene.chosen = new if self.scene.state else ""
        self.meet()
        self.update()

    def run(self) -> None:
        """Make the chosen call on the host."""
        try:
            code = self.scene.call()
        except ValueError as error:
            self.scene.say(f"Not asked: {error}", "trouble")
        else:
            self.attempt("perform", code, self.scene.answered)
        self.update()

    def refresh(self) -> None:
        """Look at the queue pair again; what has changed is said."""
        self.attempt("look", None, self.scene.seen)
        self.update()

    def attempt(self, question: str, code: str | None, then: Any) -> None:
        """Ask the host, and hand the answer on; whatever keeps it from answering is said."""
        scene = self.scene
        try:
            answer = ask(self.host, "qpmove", question, self.name, *([code] if code else []))
        except HostBusy:
            scene.busy = True
            scene.answer, scene.kind = f"{scene.host} is at work; it is asked again soon.", "news"
        except RdmalabError as error:
            self._resting = isinstance(error, BackendError)
            scene.found = {}
            scene.seen({"found": False, "why": str(error).rstrip(".")})
        else:
            self._resting = False
            then(answer)
            self.meet()

    def meet(self) -> None:
        """Fill in what the peer's card tells: a dict, an object with ``as_dict``, or a host."""
        card = self.peer if "AV" in self.scene.given() else None
        if card is not None and hasattr(card, "kernel"):
            try:
                card = ask(card, "qpmove", "look", self.peer_name)
            except RdmalabError:
                return
        if card is not None and hasattr(card, "as_dict"):
            card = card.as_dict()
        if isinstance(card, Mapping):
            self.scene.learn(card)

    # --- how it is shown --------------------------------------------------------------------

    def update(self) -> None:
        """Give the page what there is to draw now."""
        if self.panel is not None:
            self.panel.scene = {**self.scene.as_dict(), "turn": self._turn}
        if self._picture is not None and self._shown != self.scene.state:
            self._shown = self.scene.state
            self._picture.update(self.figure(), raw=True)

    def figure(self) -> dict[str, str]:
        """The static picture: for a page where no widget runs."""
        title, status = html.escape(self.scene.title()), html.escape(self.scene.status())
        drawing = adaptive(draw(self.scene.state))
        page = (
            f'<figure class="rdmalab-view rdmalab-qp rdmalab-static"><style>{CSS}</style>'
            f'<div class="rdmalab-title">{title}</div><div class="rdmalab-drawing">{drawing}</div>'
            f"<figcaption>{status} (As it was seen last. In JupyterLab, run this cell for the live"
            " picture.)</figcaption></figure>"
        )
        return {"text/html": page, "text/plain": repr(self)}

    def _ipython_display_(self) -> None:
        """The static picture, and the live one, whose style hides the static one."""
        from IPython.core.getipython import get_ipython
        from IPython.display import DisplayHandle, display

        shell = get_ipython()
        if shell is None:
            print(repr(self))
            return
        key = (self.host.kernel.remote.state.lab, self.host.name, self.name)
        if _open.get(key) not in (None, self):
            _open[key].close()
        if self._picture is None:
            shell.events.register("post_run_cell", self._after_cell)
        if self.panel is None and (kind := panel_class()) is not None:
            self.panel = kind(scene={**self.scene.as_dict(), "turn": self._turn})
            self.panel.on_msg(self._on_message)
        _open[key] = self
        self._picture, self._shown = DisplayHandle(), self.scene.state
        self._picture.display(self.figure(), raw=True)
        if self.panel is not None:
            display(self.panel)

    def __repr__(self) -> str:
        return f"[picture] {self.scene.title()}. {self.scene.status()}"

    def close(self) -> None:
        """End the live picture: it follows nothing any more. May be called twice."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if self._picture is None or shell is None:
            return
        with contextlib.suppress(ValueError):
            shell.events.unregister("post_run_cell", self._after_cell)
        if self.panel is not None:
            self.panel.close()
        self.panel = self._picture = None

    # --- what comes in ----------------------------------------------------------------------

    def _after_cell(self, result: Any) -> None:
        """A cell was run, perhaps on the host: follow what it changed."""
        if not self._resting:
            self.refresh()

    def _on_message(self, panel: Any, words: dict[str, Any], buffers: Any) -> None:
        """The reader did something in the page; every message gets a scene that is a new one."""
        self._turn += 1
        action, scene = words.get("do"), self.scene
        if action == "choose":
            self.choose(words["to"])
        elif action == "give":
            scene.give(words["attribute"], bool(words["given"]))
        elif action == "set":
            scene.set(words["key"], str(words["value"]))
        elif action in ("look", "run"):
            self.attempt("look", None, scene.seen)
            if action == "run" and scene.state and not scene.busy:
                scene.chosen = words["to"]
                self.meet()
                self.run()
        self.update()


def qp_diagram(host: Host, name: str = "qp", *, peer: Any = None, peer_name: str = "") -> QPDiagram:
    """The live state diagram of the queue pair that the variable ``name`` holds on ``host``.

    ``view.qp_diagram(lab.alice, "qp", peer=lab.bob)``: choose a move, see the call and what it
    requires, run it, read the kernel's answer. ``peer``, from which the attributes of the way to
    the peer are filled in: a host (whose variable ``peer_name``, or ``name``, is looked at), or an
    address card as a dict. What code does to the queue pair shows as well, after each cell.
    """
    return QPDiagram(host, name, peer, peer_name)
