"""What a learner may be told of a check: only what its public form can say.

A check with hidden tests prints and asserts more than learners have seen, and a submission that is
run by it may print what it has found in memory. So nothing that came out of a check is passed on
as it is. From the *public* source the strings of its prints, messages and f-strings are taken as
templates; a line that fits none is left out, and what fills a template's gaps is short and quotes
no hidden test.

>>> said = Sentences("print(f'Your function said {answer}.')", hidden="assert f(37481) == 1")
>>> said.lines("Your function said 3.\\nf(37481) is wrong\\n")
['Your function said 3.']
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Sequence

from ..hostside import checkcode

__all__ = ["Sentences", "templates"]

FILL_CHARACTERS = 160  # of what a submission may put into one gap
LINES = 40
LINE_CHARACTERS = 2000
LETTERS = 6  # that a template must have of its own; one with fewer would let anything through
QUOTE = 7  # so many characters in a row out of a hidden test are a quotation
VARIANTS = 16  # of one sentence
CUT = "[...]"

Parts = tuple[str | None, ...]  # None: a gap


def variants(node: ast.expr) -> list[Parts]:
    """The texts that an expression can be; what only a run can tell is a gap."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [(node.value,)]
    if isinstance(node, ast.JoinedStr):
        return joined([variants(piece) for piece in node.values])
    if isinstance(node, ast.IfExp):
        return [*variants(node.body), *variants(node.orelse)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return joined([variants(node.left), variants(node.right)])
    return [(None,)]


def joined(pieces: Sequence[list[Parts]], between: str = "") -> list[Parts]:
    """All ways to put pieces one behind the other."""
    found = []
    for choice in itertools.islice(itertools.product(*pieces), VARIANTS):
        parts: list[str | None] = []
        for number, piece in enumerate(choice):
            parts += [between] if number and between else []
            parts += piece
        found.append(tuple(parts))
    return found


def printed(call: ast.Call) -> list[Parts]:
    """The texts that a call of ``print`` can write."""
    words = {word.arg: word.value for word in call.keywords}
    texts = {"sep": " ", "end": "\n"}
    for name in texts:
        value = words.get(name)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            texts[name] = value.value
    found = joined([variants(argument) for argument in call.args], texts["sep"])
    # A line that is not ended goes on with whatever is printed next.
    end = (texts["end"],) if "\n" in texts["end"] else (texts["end"], None)
    return [(*parts, *end) for parts in found]


def merged(parts: Iterable[str | None]) -> Parts:
    """Neighbouring texts as one, neighbouring gaps as one."""
    found: list[str | None] = []
    for part in parts:
        if found and part is not None and found[-1] is not None:
            found[-1] += part
        elif part is None and found and found[-1] is None:
            continue
        else:
            found.append(part)
    return tuple(part for part in found if part != "")


def by_line(parts: Parts) -> list[Parts]:
    """A text's lines."""
    lines: list[list[str | None]] = [[]]
    for part in parts:
        if part is None:
            lines[-1].append(None)
            continue
        first, *rest = part.split("\n")
        lines[-1].append(first)
        lines += [[piece] for piece in rest]
    return [without_end(merged(line)) for line in lines]


def without_end(parts: Parts) -> Parts:
    """A line's template without the blanks at its end."""
    last = parts[-1] if parts else None
    return parts if last is None else (*parts[:-1], last.rstrip())


def letters(parts: Parts) -> int:
    """How many letters and digits a template has of its own."""
    return sum(character.isalnum() for part in parts if part for character in part)


def templates(source: str) -> list[Parts]:
    """The lines that a source can print or say, those with the most text of their own first."""
    found: set[Parts] = set()
    try:
        tree = checkcode.parse(source)
    except checkcode.CheckError:
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            texts = printed(node)
        elif isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp):
            texts = variants(node)
        else:
            continue
        found.update(line for text in texts for line in by_line(text))
    return sorted((parts for parts in found if letters(parts) >= LETTERS), key=letters)[::-1]


def fit(parts: Parts, line: str) -> list[str] | None:
    """What fills a template's gaps if the line is of its form, else None. Takes linear time."""
    fills: list[str] = []
    at = 0
    for number, part in enumerate(parts):
        if part is None:
            if number + 1 == len(parts):
                fills.append(line[at:])
                return fills
            continue
        last = number + 1 == len(parts)
        here = len(line) - len(part) if last else line.find(part, at)
        gap = number > 0 and parts[number - 1] is None
        if here < at or not line.startswith(part, here) or (here > at and not gap):
            return None
        if gap:
            fills.append(line[at:here])
        at = here + len(part)
    return fills if at == len(line) else None


class Sentences:
    """What one check may tell. ``public``: its source as handed out; ``hidden``: its hidden tests.

    Of text that is in both, nothing is held back.
    """

    def __init__(self, public: str, hidden: str = "") -> None:
        self.templates = templates(public)
        self.public, self.hidden = squeezed(public), squeezed(hidden)

    def lines(self, text: str) -> list[str]:
        """The lines of a check's output that may be told."""
        told = []
        for line in text.splitlines():
            said = self.line(line.rstrip()[:LINE_CHARACTERS])
            if said:
                told.append(said)
            if len(told) == LINES:
                break
        return told

    def line(self, line: str) -> str:
        """A line as it may be told, or the empty string."""
        for parts in self.templates:
            fills = fit(parts, line)
            if fills is not None:
                return self.filled(parts, fills)
        return ""

    def filled(self, parts: Parts, fills: Sequence[str]) -> str:
        """A template with what may stand in its gaps."""
        rest = iter(fills)
        return "".join(self.fill(next(rest)) if p is None else p for p in parts).rstrip()

    def fill(self, text: str) -> str:
        """What fills a gap: printable, short, and no quotation of a hidden test."""
        text = "".join(c if c.isprintable() else " " for c in text)
        if self.quotes(text):
            return CUT
        return text if len(text) <= FILL_CHARACTERS else f"{text[:FILL_CHARACTERS]}{CUT}"

    def quotes(self, text: str) -> bool:
        """Whether a text has a piece of a hidden test that is not in the public source as well."""
        text = squeezed(text)
        pieces = (text[at : at + QUOTE] for at in range(max(0, len(text) - QUOTE) + 1))
        return any(
            len(piece) == QUOTE and piece in self.hidden and piece not in self.public
            for piece in pieces
        )


def squeezed(text: str) -> str:
    """A text without blanks, so that another layout is no disguise."""
    return "".join(text.split())
