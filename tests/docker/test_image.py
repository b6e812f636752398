"""The container image: what is in it, and hosts in a container that has no right at all."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .engine import ROOT, Engine

pytestmark = [pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(1800)]

SIZE_MAX = 700e6
LOCKED = ("--read-only", "--cap-drop", "ALL", "--network", "none", "--tmpfs", "/tmp")
LOCKED += ("--security-opt", "no-new-privileges", "--user", "12345:0")
# A modprobe that says when it was called.
MODPROBE = "#!/bin/sh\necho called > /tmp/modprobe-was-called\nexit 1\n"


@pytest.fixture(scope="module")
def locked(engine: Engine, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A container with nothing: another uid, no capability, no device, no network, no disk.

    Its process 1 is one that collects nobody, as where a command is run without an init.
    """
    stub = tmp_path_factory.mktemp("stub") / "modprobe"
    stub.write_text(MODPROBE)
    stub.chmod(0o755)
    stub.parent.chmod(0o755)
    mount = f"{stub}:/usr/local/bin/modprobe:ro"
    with engine.container(
        *LOCKED, "--volume", mount, "--entrypoint", "sleep", image, "1800"
    ) as name:
        yield name


def test_it_is_as_small_as_promised(engine: Engine, image: str) -> None:
    size = int(engine("image", "inspect", "--format", "{{.Size}}", image))
    assert size <= SIZE_MAX, f"{size / 1e6:.0f} MB"


def test_it_is_an_ordinary_users_with_an_init_and_a_health_check(
    engine: Engine, image: str
) -> None:
    (facts,) = json.loads(engine("image", "inspect", image))
    config = facts["Config"]
    assert config["User"] == "1000:0"
    assert config["Entrypoint"][0] == "tini"
    assert config["Healthcheck"]["Test"]
    assert not [word for word in config["Env"] if re.search("TOKEN|PASSWORD|CERT|proxy", word)]


def test_nothing_in_it_tells_where_it_was_built(engine: Engine, image: str) -> None:
    """No package list, no setting of the building machine, no pip, no solution of a lab."""
    look = (
        "ls /var/lib/apt/lists /var/cache/apt; ls -d /etc/pip.conf /etc/apt/apt.conf.d/90build"
        " /run/secrets/* /root/.cache /opt/rdmalab/labs/source /opt/rdmalab/venv/bin/pip;"
        " find / -xdev -perm -4000 -newer /etc/dpkg/dpkg.cfg.d/rdmalab -type f"
    )
    done = engine.ask("run", "--rm", "--user", "0", "--entrypoint", "sh", image, "-c", look)
    assert re.sub(r"^/var/\S+:$", "", done.stdout, flags=re.M).split() == []


def test_both_hosts_come_up_without_any_right(engine: Engine, locked: str) -> None:
    """B06: no kernel module, no device; restored from the saved start that is in the image."""
    state = json.loads(engine("exec", locked, "rdmalab", "up", "--json"))
    assert [host["name"] for host in state["hosts"]] == ["alice", "bob"]
    assert state["restored"], "the image's saved start does not fit its own QEMU"
    assert state["accel"] == "tcg"
    assert engine.ask("exec", locked, "ls", "/tmp/modprobe-was-called").returncode != 0
    devices = engine("exec", locked, "rdmalab", "exec", "bob", "--", "ibv_devices")
    assert "rxe_bob" in devices


def test_b04_memory_is_registered_whatever_the_containers_limit(
    engine: Engine, locked: str
) -> None:
    """B04: the container may pin next to nothing; the hosts' limit is the guest's own."""
    limit = engine("exec", locked, "sh", "-c", "ulimit -l")
    engine("exec", locked, "rdmalab", "up")
    code = (
        "from pyverbs.device import Context; from pyverbs.pd import PD; from pyverbs.mr import MR;"
        "import pyverbs.enums as e;"
        "ctx = Context(name='rxe_alice'); pd = PD(ctx);"
        "print(MR(pd, 16 << 20, e.IBV_ACCESS_LOCAL_WRITE).length)"
    )
    said = engine("exec", locked, "rdmalab", "exec", "alice", "--", "python3", "-c", code)
    assert said == str(16 << 20), f"the container's own limit is {limit} KiB"


def test_a_rehearsal_with_bytes_and_losses_passes(engine: Engine, locked: str) -> None:
    """SEND and WRITE with equal bytes, loss survived, clean-up: by hosts of its own."""
    card = json.loads(engine("exec", locked, "rdmalab", "selftest", "--json", deadline_s=300))
    assert card["passed"], card


def test_down_is_believed_where_process_1_collects_nobody(engine: Engine, locked: str) -> None:
    """An ended QEMU stays as a zombie there: it is not taken for a running lab, nor waited for."""
    engine("exec", locked, "rdmalab", "up")
    begun = time.monotonic()
    assert "Stopped: default" in engine("exec", locked, "rdmalab", "down")
    assert time.monotonic() - begun < 20
    assert json.loads(engine("exec", locked, "rdmalab", "status", "--json")) == {
        "labs": [],
        "leftovers": [],
    }
    states = engine("exec", locked, "sh", "-c", "cat /proc/[0-9]*/stat")
    assert not re.search(r"\(qemu-system\S*\) [^Z]", states), states
    again = json.loads(engine("exec", locked, "rdmalab", "up", "--json"))
    assert again["restored"]


def test_the_doctor_is_content(engine: Engine, locked: str) -> None:
    done = engine.ask("exec", locked, "rdmalab", "doctor", "--json")
    assert done.returncode == 0, done.stdout
    assert {c["check"]: c["status"] for c in json.loads(done.stdout)}["packages"] == "ok"


@pytest.mark.may_skip("only where there is a /dev/kvm; elsewhere the test above says the same")
def test_a_kvm_that_is_passed_in_is_proved_first(engine: Engine, image: str) -> None:
    """B59: used where it works, given up with a reason where it does not; hosts in any case."""
    if not os.path.exists("/dev/kvm"):
        pytest.skip("no /dev/kvm on this machine")
    owner = os.stat("/dev/kvm")  # the last --user counts
    words = [*LOCKED, "--device", "/dev/kvm", "--user", f"{owner.st_uid}:{owner.st_gid}"]
    said = engine("run", "--rm", *words, image, "rdmalab", "up", "--json", deadline_s=300)
    state = json.loads(said[said.index("{") :])
    assert len(state["hosts"]) == 2
    assert state["accel"] == "kvm" or "KVM is there but does not work" in state["accel_why"]


def test_without_a_place_to_write_it_says_which_one_is_missing(engine: Engine, image: str) -> None:
    words = [word for word in LOCKED if word not in ("--tmpfs", "/tmp")]
    done = engine.ask("run", "--rm", *words, image)
    assert done.returncode == 1
    assert "--tmpfs /tmp" in done.stderr
    assert "Traceback" not in done.stderr


def test_containers_of_a_machine_share_one_copy_of_the_memory(engine: Engine, image: str) -> None:
    """On a volume that was filled once: mapped where it lies, nothing in the container's cache."""
    volume = f"rdmalabtest{os.getpid()}"
    shared = ("--env", "RDMALAB_SHARED_DIR=/shared:/opt/rdmalab/share")
    fill = ("--user", "0", "--volume", f"{volume}:/shared", "--entrypoint", "rdmalab")
    try:
        engine("run", "--rm", *fill, image, "image", "share", "--no-pack", "/shared")
        mount = ("--volume", f"{volume}:/shared:ro")
        words = [*LOCKED, *mount, *shared, "--entrypoint", "sleep"]
        with engine.container(*words, image, "600") as name:
            state = json.loads(engine("exec", name, "rdmalab", "up", "--json"))
            assert state["restored"]
            maps = engine("exec", name, "sh", "-c", "cat /proc/[0-9]*/maps 2>/dev/null; :")
            assert re.search(r"-p .* /shared/snapshots/\w+/ram$", maps, re.M), maps[-2000:]
            cache = engine("exec", name, "sh", "-c", "du -sm /tmp/rdmalab-cache-12345")
            assert int(cache.split()[0]) < 5, cache
    finally:
        engine("volume", "rm", "--force", volume)


# ---------------------------------------------------------------- the Dockerfiles


def instructions(file: str) -> list[str]:
    """A Dockerfile's instructions, each on one line, without comments."""
    text = (ROOT / file).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [line for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines() if line]


@pytest.mark.parametrize("file", ["docker/Dockerfile", "docker/hub/Dockerfile"])
def test_the_dockerfile_has_none_of_the_usual_faults(file: str) -> None:
    """What hadolint would say: latest, lists left, recommends, root at the end, ADD, cd, sudo."""
    lines = instructions(file)
    stages = {line.split()[-1] for line in lines if line.startswith("FROM") and " AS " in line}
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            source = rest.split()[0]
            assert source in stages or (":" in source and not source.endswith(":latest")), line
        assert word != "ADD", line
        if "apt-get install" in line:
            assert "--no-install-recommends" in line, line
            assert "--yes" in line, line
            assert "rm -rf /var/lib/apt/lists/*" in line, line
        if word == "RUN":
            assert not re.search(r"(^|[;&\s])(sudo|cd|apt) ", rest), line
        if word in ("CMD", "ENTRYPOINT"):
            assert rest.startswith("["), f"{line}: signals would go to a shell"
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users, "root at the end"
    assert users[-1].split(":")[0] not in ("0", "root")


def test_what_is_sent_to_the_engine_is_what_is_needed() -> None:
    """The ignore file takes nothing by default, so that no secret and no .git goes along."""
    lines = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert all(Path(ROOT, rule[1:]).exists() for rule in rules if rule.startswith("!"))
