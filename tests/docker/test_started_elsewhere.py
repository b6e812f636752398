"""The image where others start it: BinderHub, Codespaces and editors; `docker build .` itself."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from typing import Any

import pytest

from .engine import ROOT, Engine, settings

pytestmark = [pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(1800)]

START_S = 90
# BinderHub runs a command of its own: whichever front end `python3` and PATH have, at its address.
BINDER = (
    "python3",
    "-c",
    "import os, sys, jupyterlab; os.execvp('jupyter-lab', sys.argv)",
    "--ip=0.0.0.0",
    "--port=8888",
    "--no-browser",
    "--ServerApp.base_url=/user/somebody/",
    "--IdentityProvider.token=of-the-binder",
)


def test_a_build_of_the_bare_clone_is_the_same_image(engine: Engine, image: str) -> None:
    """What repo2docker and many services do: the Dockerfile at the top, its folder as the context.

    Nothing is built anew, so each layer, and what was sent for it, is the same.
    """
    tag = f"{image}-bare"
    engine("build", "--tag", tag, *settings(), str(ROOT), deadline_s=1500)
    try:
        layers = "{{json .RootFS.Layers}}"
        bare = engine("image", "inspect", "--format", layers, tag)
        assert bare == engine("image", "inspect", "--format", layers, image)
    finally:
        engine("rmi", tag)


def test_started_as_binderhub_starts_it_the_labs_and_hosts_are_there(
    engine: Engine, image: str
) -> None:
    """No volume, no right, 2 GB; with Binder's own uid, which the image need not know."""
    words = ("--memory", "2g", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    words += ("--user", "1000", "--publish", "127.0.0.1::8888")
    with engine.container(*words, image, *BINDER) as name:
        port = engine("port", name, "8888").rpartition(":")[2]
        address = f"http://127.0.0.1:{port}/user/somebody/api/contents?token=of-the-binder"
        names = [entry["name"] for entry in answer(address)["content"]]
        assert "00_meet_your_hosts.ipynb" in names
        assert json.loads(engine("exec", name, "rdmalab", "up", "--json"))["restored"]


def answer(address: str) -> dict[str, Any]:
    """The server's answer, when it has started."""
    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except OSError:
            assert time.monotonic() < end, f"nobody answers at {address}"
            time.sleep(0.5)


def test_the_development_container_asks_for_no_right_and_names_what_is_there() -> None:
    folder = ROOT / ".devcontainer"
    text = (folder / "devcontainer.json").read_text(encoding="utf-8")
    wanted = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.M))
    assert (folder / wanted["build"]["dockerfile"]).resolve() == ROOT / "docker" / "Dockerfile"
    assert (folder / wanted["build"]["context"]).resolve() == ROOT
    assert not {"privileged", "capAdd", "features"} & wanted.keys()
    assert "--cap-drop=ALL" in wanted["runArgs"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    for there in (f" {wanted['workspaceFolder']}", wanted["remoteUser"]):
        assert there in dockerfile
