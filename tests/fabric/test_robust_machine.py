"""Machines that lack something: KVM that does not work, modules, HOME, a name, free ports."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rdmalab.qemu import find_qemu

from .sandbox import Sandbox, own_copy, private_cache, sandbox, trust

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(400)]

NOBODY_KNOWN = 54321


# ---------------------------------------------------------------- KVM (B59)


def unproved() -> contextlib.AbstractContextManager[Path]:
    """A cache that has a saved start and no verdict on KVM; under emulation, as these tests are."""
    return private_cache("alice", "bob", verdict=False)


def emulated(box: Sandbox, why: str) -> float:
    """`up` succeeds under emulation and says why, in `status` too; how long it took, in s."""
    begin = time.monotonic()
    shown = box.up()
    taken_s = time.monotonic() - begin
    assert shown["accel"] == "tcg" and why in shown["accel_why"], shown
    (lab,) = json.loads(box.run("status", "--json").out)["labs"]
    assert (lab["accel"], lab["accel_why"]) == ("tcg", shown["accel_why"])
    assert "chmod" not in lab["accel_why"] and "666" not in lab["accel_why"]
    box.works()
    assert box.run("down").code == 0
    return taken_s


def test_b59_kvm_that_does_not_work_is_found_out_once() -> None:
    """B59: by a trial boot with a deadline; the verdict is kept, so the next start asks no more.

    Where KVM does work the same start says so, with the same file.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/kvm here that this user may open")
    with unproved() as cache, sandbox(cache) as box:
        shown = box.up()
        (memo,) = (cache / "kvm").iterdir()
        verdict = json.loads(memo.read_text())
        assert (verdict["name"], verdict["why"]) == (shown["accel"], shown["accel_why"])
        assert shown["accel"] == "kvm" or "KVM is there but does not work" in shown["accel_why"]
        before = memo.stat().st_mtime_ns
        assert box.run("down").code == 0
        again = box.up()
        assert memo.stat().st_mtime_ns == before and again["accel"] == shown["accel"]
        box.works()


@pytest.mark.may_skip("it takes root and a /dev/kvm to put another device in its place")
def test_b59_a_device_that_opens_and_is_no_kvm() -> None:
    """B59 (b): /dev/null in its place, for these commands alone: the reason is in QEMU's words."""
    if os.geteuid() != 0 or not os.path.exists("/dev/kvm"):
        pytest.skip("needs root and a /dev/kvm")
    with unproved() as cache, sandbox(cache) as box:
        mount = 'mount --bind /dev/null /dev/kvm && exec "$@"'
        box.prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
        assert emulated(box, "KVM is there but does not work: QEMU ended with 1") < 60


@pytest.mark.may_skip("it takes root and a /dev/kvm to put another device in its place")
def test_b59_no_device() -> None:
    """B59 (c): a folder in which there is none."""
    if os.geteuid() != 0 or not os.path.exists("/dev/kvm"):
        pytest.skip("needs root and a /dev/kvm")
    with unproved() as cache, sandbox(cache) as box:
        mount = "mount -t tmpfs tmpfs /dev && for n in null zero random urandom; do"
        mount += " mknod -m 666 /dev/$n c 1 $((1 + 0x$(case $n in null) echo 2;; zero) echo 4;;"
        mount += ' random) echo 7;; urandom) echo 8;; esac))); done && mkdir /dev/shm && exec "$@"'
        box.prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
        emulated(box, "this machine has no /dev/kvm")
        assert not (cache / "kvm").exists()


def test_b59_a_word_that_is_no_accelerator() -> None:
    """B59: RDMALAB_ACCEL decides, and a slip in it is said at once."""
    with sandbox() as box:
        done = box.run("up", RDMALAB_ACCEL="KVM")
        assert (done.code, done.out) == (2, "") and "it can be tcg or kvm" in done.err
        assert box.up(RDMALAB_ACCEL="tcg")["accel_why"] == "RDMALAB_ACCEL=tcg"


# ---------------------------------------------------------------- modules (B02)


def test_b02_up_never_asks_for_a_module_of_this_machine(tmp_path: Path) -> None:
    """B02: a `modprobe` that fails and tells who called it; nobody does."""
    stub = tmp_path / "modprobe"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\necho no such module >&2\nexit 1\n')
    stub.chmod(0o755)
    with sandbox() as box:
        path = f"{tmp_path}:{box.env['PATH']}"
        assert subprocess.run(["modprobe", "x"], env={"PATH": path}, check=False).returncode == 1
        (tmp_path / "called").unlink()
        for name in ("insmod", "rdma", "sudo"):
            shutil.copy(stub, tmp_path / name)
        box.up(PATH=path)
        box.works()
        assert box.run("down", PATH=path).code == 0
        assert not (tmp_path / "called").exists()


def test_b02_a_kernel_without_ipv6_still_gives_the_ipv4_gid(tmp_path: Path) -> None:
    """B02: older rxe could not even be loaded then; the hosts' own kernel must not care."""
    wrapper = tmp_path / "qemu"
    wrapper.write_text(
        '#!/bin/bash\nwords=("$@")\nfor i in "${!words[@]}"; do\n'
        '  [ "${words[i]}" = -append ] && words[i+1]+=" ipv6.disable=1"\ndone\n'
        f'exec {shlex.quote(find_qemu().path)} "${{words[@]}}"\n'
    )
    wrapper.chmod(0o755)
    with private_cache() as cache, sandbox(cache) as box:
        box.env["RDMALAB_QEMU"] = str(wrapper)
        shown = box.up()
        assert [host["gid"] for host in shown["hosts"]] == ["::ffff:10.0.0.1", "::ffff:10.0.0.2"]
        assert "ipv6.disable=1" in box.run("exec", "alice", "--", "cat", "/proc/cmdline").out
        code = (
            "import rdmalab; alice = rdmalab.up().alice; alice.run('from rdmalab import here');"
            "alice.run('from pyverbs.device import Context; ctx = Context(name=here.device)');"
            "alice.run('gid = ctx.query_gid(1, here.gid_index).gid'); print(alice.get('gid'))"
        )
        line = [sys.executable, "-c", code]
        done = subprocess.run(line, env=box.env, capture_output=True, text=True, timeout=200)
        assert done.stdout == "0000:0000:0000:0000:0000:ffff:0a00:0001\n", done


# ---------------------------------------------------------------- HOME, and who one is


def test_home_that_cannot_be_written() -> None:
    """Not even by root: nothing can be made below /proc. The cache is where it is said to be."""
    with sandbox() as box:
        for home in ("/proc/no-home", "/dev/null", ""):
            box.up(HOME=home)
            assert box.run("exec", "alice", "--", "hostname", HOME=home).out == "alice\n"
            assert box.run("down", HOME=home).code == 0
        code = "import rdmalab; lab = rdmalab.up(); lab.alice.run('print(1 + 1)'); lab.down()"
        line = [sys.executable, "-c", code]
        env = {**box.env, "HOME": "/proc/no-home"}
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=200)
        assert (done.returncode, done.stdout) == (0, "2\n"), done


def test_home_that_cannot_be_written_and_no_word_where_else() -> None:
    """The cache is then below the folder for temporary files, and private."""
    with sandbox() as box:
        del box.env["RDMALAB_CACHE_DIR"]
        done = box.run("image", "info", HOME="/proc/no-home")
        assert done.code == 1 and "rdmalab image build" in done.err
        (folder,) = box.tmp.iterdir()
        assert folder.name == f"rdmalab-cache-{os.getuid()}"
        assert folder.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(folder)
        box.env["RDMALAB_CACHE_DIR"] = str(box.cache)


@pytest.fixture
def stranger() -> Iterator[Sandbox]:
    """A sandbox of a user whom this machine knows by number only: no name, no home, no groups."""
    if os.geteuid() != 0:
        pytest.skip("needs root to be another user")
    identity = [f"--reuid={NOBODY_KNOWN}", "--regid=0", "--clear-groups"]
    reach = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    with private_cache("alice", "bob") as cache, sandbox() as box:
        for name in ("HOME", "USER", "LOGNAME", "SHELL", "MAIL"):
            box.env.pop(name, None)
        box.cache = box.home / "cache"
        box.env["RDMALAB_CACHE_DIR"] = str(box.cache)
        # This Python and this checkout may lie in a folder of root's: reading is all this allows.
        box.prefix = ["setpriv", *identity, *reach, "--", "env", "-i"]
        box.prefix += [f"{name}={value}" for name, value in box.env.items()]
        shutil.move(cache, box.cache)
        (start,) = (box.cache / "snapshots").iterdir()
        own_copy(start)
        trust(start)
        box.runtime.mkdir(mode=0o700)
        shutil.rmtree(box.cache / "images")
        for path in [box.cache, box.runtime, *box.cache.rglob("*")]:
            os.chown(path, NOBODY_KNOWN, 0)
        yield box


@pytest.mark.may_skip("it takes root to become another user")
def test_a_user_without_a_name(stranger: Sandbox) -> None:
    """As in a container on a shared cluster: everything works, from the image on."""
    file = stranger.home / "image.tar"
    doctor = stranger.run("doctor", "--json")
    assert isinstance(json.loads(doctor.out), list) and "Traceback" not in doctor.err
    with sandbox() as roots:
        exported = roots.run("image", "export", str(file))
        assert exported.code == 0, exported.err
    file.chmod(0o644)
    imported = stranger.run("image", "import", str(file))
    assert imported.code == 0, imported.err
    shown = stranger.up()
    assert shown["restored"]
    if os.path.exists("/dev/kvm") and not os.stat("/dev/kvm").st_mode & 0o006:
        assert "group kvm" in shown["accel_why"], shown
    owners = {psutil.Process(pid).uids().real for pid in stranger.qemus()}
    assert owners == {NOBODY_KNOWN}
    stranger.works("default", "bob", "10.0.0.1")
    assert stranger.run("fault", "bob", "loss=1%").code == 0
    assert stranger.run("down", "--all").out == "Stopped: default.\n"
    assert stranger.left() == []
