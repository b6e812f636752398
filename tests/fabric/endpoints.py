"""Endpoints of rdmalab.verbs on hosts, for the tests: opened, connected, broken, and read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import rdmalab
from rdmalab.errors import RemoteError

CLOSE = "if 'ep' in globals(): ep.close()"


def value(host: rdmalab.Host, expression: str) -> Any:
    """What an expression is on a host."""
    host.run(f"_answer = {expression}")
    return host.get("_answer")


def connect(lab: rdmalab.Lab, alice: str = "", bob: str = "", prepare: str = "") -> None:
    """A fresh endpoint ``ep`` on both hosts, which meet by name.

    ``alice`` and ``bob`` are parameters of their Endpoint; ``prepare`` runs on both in INIT.
    """
    settings = {"alice": alice, "bob": bob}
    for host in lab.hosts:
        host.run(CLOSE)
        host.run(f"from rdmalab.verbs import Endpoint\nep = Endpoint({settings[host.name]})")
        if prepare:
            host.run(f"ep.to_init()\n{prepare}")
    job = lab.bob.start("ep.connect('alice')", timeout_s=60)
    lab.alice.run("ep.connect('bob')")
    job.result()


@contextlib.contextmanager
def refused(kind: str) -> Iterator[list[str]]:
    """Code on a host raises ``kind``; its text is in the list afterwards."""
    said: list[str] = []
    with pytest.raises(RemoteError) as caught:
        yield said
    assert caught.value.ename == kind, caught.value
    said.append(caught.value.evalue)


def text_of(host: rdmalab.Host, code: str, kind: str) -> str:
    """The text of the error that ``code`` raises on a host."""
    with refused(kind) as said:
        host.run(code)
    return said[0]


def counters(lab: rdmalab.Lab, host: str) -> dict[str, int]:
    """The counters of a host's device (``rdma statistic``), a witness that we did not write."""
    code = (
        "import json, subprocess\n"
        "from rdmalab import here\n"
        "shown = subprocess.check_output(['rdma', '-j', 'statistic', 'show', 'link',"
        " f'{here.device}/{here.port}'])\n"
        "_counters = {k: v for k, v in json.loads(shown)[0].items() if isinstance(v, int)}"
    )
    lab[host].run(code)
    found: dict[str, int] = lab[host].get("_counters")
    return found
