"""A lab, solved, runs at the desk inside the guest as it runs beside JupyterLab.

The others' cells are watched where they are graded (tests/grading/test_labs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rdmalab
from rdmalab import lab as labs

from .learner import CELL_TIMEOUT_S, LABS, solved

pytestmark = [pytest.mark.labs, pytest.mark.long, pytest.mark.timeout(900)]

NAMES = ["00_meet_your_hosts"]


@pytest.fixture(scope="module")
def room() -> Iterator[rdmalab.Lab]:
    """alice, bob and a desk, with the files that lie beside the notebooks."""
    room = rdmalab.up(("alice", "bob"), lab="on-desk", desk=True)
    for file in (LABS / "data").iterdir():
        room.desk.lay(f"data/{file.name}", file.read_bytes())
    yield room
    labs.down("on-desk")


@pytest.mark.parametrize("name", NAMES)
def test_a_solved_lab_runs_at_the_desk(name: str, room: rdmalab.Lab) -> None:
    """No cell raises, checks and their hidden tests included; no word on stderr, pictures shown."""
    for container in (room.desk, *room.hosts):
        container.restart()
    told: list[dict[str, Any]] = []
    for cell in solved(name).cells:
        if cell.cell_type == "code":
            room.desk.kernel.run(cell.source, timeout_s=CELL_TIMEOUT_S, on_output=told.append)
    texts = [message["content"] for message in told if message["msg_type"] == "stream"]
    assert "".join(text["text"] for text in texts if text["name"] == "stderr") == ""
    shown = [message["content"]["data"] for message in told if "data" in message["content"]]
    assert any("text/html" in data for data in shown)
