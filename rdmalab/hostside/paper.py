"""What a check prints: kept up to a bound, however much it is."""

from __future__ import annotations

__all__ = ["Paper"]

PRINTED_MOST = 1 << 16  # characters that are kept


class Paper:
    """What a check prints, up to a bound; stands for stdout and stderr."""

    encoding, errors = "utf-8", "replace"

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.left = PRINTED_MOST

    def write(self, text: str) -> int:
        """Keep a text, as far as there is room."""
        kept = text[: self.left]
        self.left -= len(kept)
        if kept:
            self.parts.append(kept)
        return len(text)

    def flush(self) -> None:
        """Nothing waits here."""

    def isatty(self) -> bool:
        """No."""
        return False

    def text(self) -> str:
        """All that was kept."""
        return "".join(part for part in self.parts if type(part) is str)
