"""The doctor's look at RDMA devices, where there are real ones: on a host.

It needs the standard library only, so it is copied there as it is and run as the learner.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import rdmalab

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

PACKAGE = Path(rdmalab.__file__).parent
SOURCES = [PACKAGE / "__init__.py", PACKAGE / "errors.py", PACKAGE / "paths.py"]
SOURCES += sorted((PACKAGE / "doctor").glob("*.py"))

UNPACK = """
import pathlib
for name, text in doctor_sources.items():
    path = pathlib.Path("/tmp/doctor/rdmalab", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
"""
ASK = """
import subprocess, sys
doctor_said = subprocess.run(
    ["python3", "-m", "rdmalab.doctor", "--system", "--json", "--backend", "local"],
    cwd="/tmp/doctor", capture_output=True, text=True, timeout=60)
doctor_said = [doctor_said.stdout, doctor_said.stderr]
"""


def ask(host: rdmalab.Host) -> dict[str, str]:
    """What the doctor on this host says of the RDMA devices."""
    host.run(ASK)
    out, err = host.get("doctor_said")
    assert err == ""
    (check,) = [c for c in json.loads(out) if c["check"] == "rdma devices"]
    assert isinstance(check, dict)
    return check


@pytest.mark.long
def test_b03_each_layer_is_named_when_it_is_the_one_that_disagrees(
    new_lab: Callable[..., rdmalab.Lab],
) -> None:
    """B03: all well; then no provider; then the provider is back and the node is closed."""
    lab = new_lab("alice", "bob")

    def as_root(*words: str) -> None:
        lab.remote.run("exec", list(words), host="alice", root=True)

    lab.alice.put(doctor_sources={str(p.relative_to(PACKAGE)): p.read_text() for p in SOURCES})
    lab.alice.run(UNPACK)
    healthy = ask(lab.alice)
    assert healthy["code"] == "rdma_ok" and "rxe_alice" in healthy["detail"]

    lab.alice.run("import glob; plugins = glob.glob('/usr/lib/*/libibverbs/librxe-*.so')")
    for lost in ("/etc/libibverbs.d/rxe.driver", *lab.alice.get("plugins")):
        as_root("mv", lost, "/var/hidden")
        missing = ask(lab.alice)
        assert missing["code"] == "provider_missing"
        assert "rxe_alice" in missing["detail"] and "rxe" in missing["detail"].split("list it:")[1]
        as_root("mv", "/var/hidden", lost)
        assert ask(lab.alice)["code"] == "rdma_ok"

    as_root("chmod", "600", "/dev/infiniband/uverbs0")
    closed = ask(lab.alice)
    assert closed["code"] == "uverbs_permission"
    assert "/dev/infiniband/uverbs0" in closed["detail"]
    assert missing["fix"] != closed["fix"]


def test_libibverbs_itself_lists_what_its_program_lists(lab: rdmalab.Lab) -> None:
    """The ctypes twin of ibv_devices, for machines without that program, against the program."""
    from rdmalab.doctor import devices

    lab.alice.put(twin=devices._LIST_DEVICES)
    lab.alice.run(
        "import re, subprocess\n"
        "names = [re.findall(r'^\\s+(\\S+)\\s+[0-9a-f]{16}\\s*$', text, re.M) for text in (\n"
        "    subprocess.run(words, capture_output=True, text=True, timeout=30).stdout\n"
        "    for words in (['ibv_devices'], ['python3', '-c', twin]))]"
    )
    program, twin = lab.alice.get("names")
    assert program == twin and "rxe_alice" in twin
