"""The labs that can be checked and graded: built from ``labs/source`` by ``labs/build.py``.

::

    book = Book(labs_folder())
    name = book.find("03")            # 03_one_sided_two_sided
    book.solved(name)                 # with solutions and hidden tests
    book.released(name)               # as it is handed out
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cached_property
from pathlib import Path
from types import ModuleType

from nbformat import NotebookNode

from ..errors import UsageError

__all__ = ["Book"]


class Book:
    """The labs of one folder. Raises :class:`UsageError` if it holds no sources of labs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "build.py").is_file():
            raise UsageError(
                f"{folder} holds no sources of labs (no build.py).",
                next_step="RDMALAB_LABS names the labs/ folder of a checkout.",
            )
        self._solved: dict[str, NotebookNode] = {}
        self._released: dict[str, NotebookNode] = {}

    @cached_property
    def build(self) -> ModuleType:
        """``labs/build.py``, which is a script and in no package."""
        path = self.folder / "build.py"
        spec = importlib.util.spec_from_file_location(f"rdmalab_labs_build_{id(self)}", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    @cached_property
    def sources(self) -> dict[str, Path]:
        """The source of each lab, by the lab's name, in teaching order."""
        return {path.stem: path for path in self.build.sources(self.folder)}

    def find(self, words: str) -> str:
        """The lab that is meant by its number (``3``, ``03``) or name."""
        number = words.zfill(2) if words.isdigit() else words
        for name in self.sources:
            if number in (name, name.partition("_")[0]):
                return name
        raise UsageError(f"There is no lab {words!r}; there are: {', '.join(self.sources)}.")

    def solved(self, name: str) -> NotebookNode:
        """The lab with its solutions and hidden tests, also the private ones."""
        if name not in self._solved:
            try:
                self._solved[name] = self.build.solved(self.sources[name])
            except self.build.LabError as error:
                raise UsageError(f"The lab's source is faulty. {error}") from None
        return self._solved[name]

    def released(self, name: str) -> NotebookNode:
        """The lab as learners get it."""
        if name not in self._released:
            self._released[name] = self.build.release(self.solved(name))
        return self._released[name]

    def all_released(self) -> dict[str, NotebookNode]:
        """Each lab as learners get it, by name."""
        return {name: self.released(name) for name in self.sources}
