"""The desk's kernel: a host's kernel for which ``import rdmalab`` is the controller's package.

When a notebook is graded, its own kernel runs in the guest too, in a container named *desk*. There
``rdmalab`` has to be what it is beside a notebook, and this package has the same name. So the
desk's first process imports the controller's package once, sets it aside, and each kernel that it
forks takes that one's modules instead of ours when it is otherwise ready. Ours go on living: a
function needs no entry in ``sys.modules``, and imports nothing of this package later.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from types import ModuleType
from typing import Any

__all__ = ["COVERED", "FOLDER", "environment", "preload", "sit_down", "take_lab"]

FOLDER = "/opt/desk"
HOME = "/home/learner"
# What is no business of the desk: the hosts' side of the package, and what only hosts have.
COVERED = ("/opt/rdmalab", "/usr/lib/python3/dist-packages/pyverbs")
PACKAGES = ("rdmalab", "pyverbs")
PRELOADED = (
    "matplotlib.pyplot",
    "matplotlib.backends.backend_svg",
    "matplotlib_inline.backend_inline",
    "jupyter_client.blocking.client",
    *(f"rdmalab.{name}" for name in ("desk", "magics", "view", "decoder", "anatomy")),
)
_modules: dict[str, ModuleType] = {}  # the controller's package, imported


def environment() -> dict[str, str]:
    """The environment of what runs at the desk, where it differs from a host's."""
    return {
        "PYTHONPATH": FOLDER,
        "RDMALAB_DESK": "1",
        "RDMALAB_RUNTIME_DIR": f"{HOME}/.rdmalab",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # as a notebook's kernel sets it
    }


def preload() -> None:
    """Import what a notebook's first cells need, as the user that will run them."""
    before = dict(os.environ)
    os.environ.update(environment(), HOME=HOME)
    os.seteuid(1000)
    ours = take_out("rdmalab")
    sys.path.insert(0, FOLDER)
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        importlib.import_module("rdmalab.view").bars({"once": 1}, unit="s").svg()  # finds the fonts
        _modules.update(take_out("rdmalab"))
    finally:
        sys.path.remove(FOLDER)
        sys.modules.update(ours)
        os.seteuid(0)
        os.environ.clear()
        os.environ.update(before)
    gc.collect()
    gc.freeze()


def take_out(*packages: str) -> dict[str, ModuleType]:
    """Remove packages from ``sys.modules``, with all that is in them; what was removed."""
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


def sit_down() -> None:
    """From here on this process is a notebook's kernel: the controller's package and no verbs."""
    take_out(*PACKAGES)
    sys.modules.update(_modules)
    sys.path[:] = [FOLDER if place == "/opt/rdmalab" else place for place in sys.path]


def take_lab(facts: dict[str, Any]) -> None:
    """Note which lab this desk belongs to, where ``rdmalab.up()`` looks for it."""
    _modules["rdmalab.desk"].__dict__["take"](facts)
