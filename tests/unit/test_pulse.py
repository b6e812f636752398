"""A long silent cell gives signs of life, as they are seen from outside the kernel."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client import KernelClient
from jupyter_client.manager import start_new_kernel

from rdmalab import pulse

CULLERS_LOOK_S = 60.0


@pytest.fixture(scope="module")
def client() -> Iterator[KernelClient]:
    """A notebook's kernel with our extension, loaded twice, whose pulse is quick."""
    manager, client = start_new_kernel(startup_timeout=60)
    client.execute_interactive("%load_ext rdmalab\n%load_ext rdmalab", timeout=60)
    client.execute_interactive("import rdmalab.pulse; rdmalab.pulse.PERIOD_S = 0.2", timeout=60)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def published(client: KernelClient, code: str) -> list[tuple[float, str, dict[str, Any]]]:
    """What the kernel publishes of a cell: seconds after its begin, kind, content."""
    seen: list[tuple[float, str, dict[str, Any]]] = []
    begun = time.monotonic()

    def hear(message: dict[str, Any]) -> None:
        seen.append((time.monotonic() - begun, message["msg_type"], message["content"]))

    client.execute_interactive(code, timeout=60, output_hook=hear)
    return seen


def test_b70_a_silent_cell_publishes_while_it_runs(client: KernelClient) -> None:
    """And what it publishes is nothing that a reader would see, and all of it the cell's own."""
    seen = published(client, "import time; time.sleep(2)")
    beats = [at for at, kind, content in seen if content.get("execution_state") == "busy"]
    assert len([at for at in beats if 0.1 < at < 2]) >= 4, seen
    assert {kind for _, kind, _ in seen} <= {"status", "execute_input"}


def test_the_pulse_ends_with_its_cell(client: KernelClient) -> None:
    """Also where the cell failed; then nothing more is heard."""
    client.execute_interactive("import time; time.sleep(0.5); 1 / 0", timeout=60)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        try:
            message = client.get_iopub_msg(timeout=0.3)
        except queue.Empty:
            continue
        assert message["content"].get("execution_state") != "busy"


def test_it_beats_before_any_culler_looks_twice() -> None:
    assert pulse.PERIOD_S < CULLERS_LOOK_S
