"""What the live state diagram shows at one moment: the present state, the chosen move, the answer.

No host and no widget in here: :class:`Scene` takes what a host told and gives plain data to draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..hostside.qpcall import INPUTS, call, explain, inputs_of
from ..hostside.qpstate import ATTRIBUTES, AUTOMATIC, MEANING, MOVES, POSTING, REQUIRED, STATES
from .qpdrawing import draw
from .theme import adaptive

__all__ = ["Scene"]

USUAL = {"RESET": "INIT", "INIT": "RTR", "RTR": "RTS", "RTS": "SQD", "SQD": "RTS", "ERR": "RESET"}
LOG_LINES = 40
FATE = {
    "refused": "are refused",
    "kept": "wait",
    "done": "are carried out",
    "flushed": "come back flushed",
}
CARD = {
    # an input, and the names under which cards give it
    "dgid": ("gid",),
    "dest_qp_num": ("qp_num", "qpn", "number"),
    "rq_psn": ("psn",),
}


@dataclass
class Scene:
    """``found``: what ``rdmalab.qpmove.look`` told last; ``kind``: how the answer is drawn."""

    host: str
    name: str
    found: dict[str, Any] = field(default_factory=dict)
    chosen: str = ""
    answer: str = ""
    kind: str = "news"  # done, refused, trouble, news
    busy: bool = False
    log: list[str] = field(default_factory=list)
    values: dict[str, str] = field(
        default_factory=lambda: {k: v.default for k, v in INPUTS.items()}
    )
    typed: set[str] = field(default_factory=set)  # inputs that the reader has set
    choice: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    # --- what was learned -------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The present state, or nothing when there is no queue pair to be seen."""
        return str(self.found["state"]) if self.found.get("found") else ""

    def say(self, text: str, kind: str) -> None:
        """A new answer; it also goes to the log."""
        self.answer, self.kind = text, kind
        self.log = [*self.log, text][-LOG_LINES:]

    def seen(self, found: dict[str, Any], *, news: bool = True) -> None:
        """The host was looked at. ``news``: say what has changed since the last time."""
        before, busy = self.found, self.busy
        self.found, self.busy = found, False
        if not found["found"]:
            if before.get("found") or before.get("why") != found["why"]:
                self.say(f"{self.host} has no such queue pair: {found['why']}.", "trouble")
            self.chosen = ""
            return
        if found["gid_index"] is not None and "sgid_index" not in self.typed:
            self.values["sgid_index"] = str(found["gid_index"])
        other = before.get("number") != found["number"]
        if news and before.get("found") and other:
            self.say(f"{self.name} is another queue pair now, in {self.state}.", "news")
        elif news and before.get("found") and before["state"] != self.state:
            move = before["state"], self.state
            who = "code, or the device itself" if move in AUTOMATIC else "code"
            self.say(f"{' to '.join(move)}: done by {who}, not from here.", "news")
        elif before and not before.get("found"):
            self.say(f"{self.name} is there, in {self.state}.", "news")
        elif news and busy:
            self.say(f"{self.host} has time again: {self.name} is in {self.state}.", "news")
        if not before.get("found") or other or before["state"] != self.state:
            self.chosen = USUAL.get(self.state, "")

    def learn(self, card: Mapping[str, Any]) -> None:
        """Fill in what a peer's card tells and the reader has not set."""
        for key, names in CARD.items():
            given = [card[name] for name in names if name in card]
            if given and key not in self.typed:
                self.values[key] = str(given[0])
        if "path_mtu" not in self.typed and self.found.get("found"):
            theirs = card.get("path_mtu") or card.get("mtu") or 1024
            theirs = theirs if theirs >= 256 else 128 << theirs  # some cards give the code
            self.values["path_mtu"] = str(min(theirs, self.found["mtu"]))

    # --- what was chosen --------------------------------------------------------------------

    def required(self) -> tuple[str, ...]:
        """The attributes of the chosen move; of one that is not in the table, its usual ones."""
        usual = REQUIRED.get(self.found.get("type", ""), REQUIRED["RC"])
        if usual is not REQUIRED["RC"] or (self.state, self.chosen) not in MOVES:
            return usual.get(self.chosen, ())
        return MOVES[self.state, self.chosen].required

    def given(self) -> tuple[str, ...]:
        """The attributes that the call will give."""
        return self.choice.get((self.state, self.chosen), self.required())

    def give(self, attribute: str, given: bool) -> None:
        """Put an attribute into the chosen call, or leave it out."""
        now = [name for name in self.given() if name != attribute]
        self.choice[self.state, self.chosen] = (*now, attribute) if given else tuple(now)

    def set(self, key: str, value: str) -> None:
        """What the reader has typed into an input."""
        self.values[key] = value.strip()
        self.typed.add(key)

    def call(self) -> str:
        """The text of the chosen call. ``ValueError`` says which input cannot be read."""
        return call(self.name, self.chosen, self.given(), self.values)

    def answered(self, result: dict[str, Any]) -> None:
        """The host has made the call."""
        if not result["found"]:
            return self.seen(result)
        old, new, errno = result["old"], self.chosen, result["errno"]
        given, values = self.given(), dict(self.values)
        self.seen(result, news=False)
        move = f"{old} to {new}"
        if result["error"]:
            self.say(f"{move}: the call did not reach the kernel. {result['error']}", "trouble")
        elif errno:
            why = explain(old, new, given, values, errno)
            self.say(f"{move}: refused with {errno}. {why} It is still in {self.state}.", "refused")
        else:
            self.say(f"{move}: done, in {result['took_ms']:.0f} ms. Now: {self.state}.", "done")
        return None

    # --- what is drawn ----------------------------------------------------------------------

    def title(self) -> str:
        """Whose queue pair this is."""
        if not self.found.get("found"):
            return f"{self.host}: {self.name}"
        number, kind = self.found["number"], self.found["type"]
        return f"{self.host}: {self.name}, queue pair number {number} ({kind})"

    def status(self) -> str:
        """The present state in words."""
        if not self.state:
            why = self.found.get("why", "it was not looked at yet")
            return f"No queue pair to be seen: {why}."
        posting = POSTING[self.state]
        words = f"{self.state}: {MEANING[self.state]}."
        words += f" Receives posted now {FATE[posting.receive]}; sends {FATE[posting.send]}."
        if self.found["type"] != "RC":
            words += " (Drawn are the moves of RC.)"
        return words

    def moves(self) -> list[dict[str, Any]]:
        """All moves from here: those of the table, and the others, which can be tried, too."""
        if not self.state:
            return []
        known = {new: MOVES.get((self.state, new)) for new in STATES}
        return [
            {
                "to": new,
                "label": f"{self.state} → {new}",
                "legal": move is not None,
                "note": move.note if move else "the kernel's table does not have this move",
            }
            for new, move in known.items()
        ]

    def fields(self) -> list[dict[str, Any]]:
        """The attributes of the chosen move with their inputs, required ones first."""
        move = MOVES.get((self.state, self.chosen))
        required, given = self.required(), self.given()
        optional = [name for name in (move.optional if move else ()) if name not in required]
        return [
            {
                "attribute": name,
                "words": ATTRIBUTES[name].words,
                "required": name in required,
                "given": name in given,
                "inputs": [
                    {"key": key, "words": INPUTS[key].words, "value": self.values[key]}
                    for key in inputs_of(name)
                ],
            }
            for name in (*required, *optional)
            if inputs_of(name)
        ]

    def drawing(self) -> str:
        """The diagram, in the colours of the page."""
        return adaptive(draw(self.state, self.chosen))

    def as_dict(self) -> dict[str, Any]:
        """All that the page draws."""
        try:
            text = self.call() if self.chosen else ""
        except ValueError as error:
            text = f"# {error}"
        return {
            "host": self.host,
            "title": self.title(),
            "state": self.state,
            "status": self.status(),
            "svg": self.drawing(),
            "moves": self.moves(),
            "chosen": self.chosen,
            "fields": self.fields() if self.chosen else [],
            "call": text,
            "answer": self.answer,
            "kind": self.kind,
            "busy": self.busy,
            "log": self.log,
        }
