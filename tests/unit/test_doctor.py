"""The doctor, in right and wrong cases: what it says of a machine, and that it only looks.

The machines are small trees below a temporary folder with fake programs on PATH; the devices and
permissions in them are real ones, opened by a real other uid where the case is about that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmalab import doctor, qemu
from rdmalab.doctor import Check, devices, kvm, machine, packages, software
from rdmalab.doctor.__main__ import main
from rdmalab.errors import ImageError, MachineError

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


@pytest.fixture
def tree() -> Iterator[Path]:
    """An empty tree that every user may enter (pytest's own temporary folders are private)."""
    folder = Path(tempfile.mkdtemp(prefix="rdmalab-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def script(path: Path, body: str) -> Path:
    """A shell script; with it goes PATH of its own, since tests may take the machine's away."""
    write(path, f"#!/bin/sh\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\n{body}\n").chmod(0o755)
    return path


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Give up root's rights over files for a while; for an ordinary user there is nothing to do."""
    if os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


# ---------------------------------------------------------------- KVM


def test_b59_kvm_that_this_user_may_not_open(tree: Path) -> None:
    """B59 (a): the device is there with mode 000. The advice is the group, never chmod 666."""
    node = write(tree / "kvm")
    node.chmod(0o000)
    with another_user():
        check = kvm.check_device(node)
    assert (check.status, check.code) == ("warn", "kvm_permission")
    assert "usermod -aG kvm" in check.fix
    assert "chmod" not in check.fix and "666" not in check.fix
    assert "emulation" in check.detail


@pytest.mark.may_skip("the case is root's to make")
def test_b59_the_group_that_owns_the_device_is_named(tree: Path) -> None:
    """B59 (a), on a distribution that did it right: one step, with the device's real group."""
    node = write(tree / "kvm")
    node.chmod(0o660)
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file to another group")
    os.chown(node, 0, 12345)
    with another_user():
        assert kvm.check_device(node).fix.startswith("Join its group: `sudo usermod -aG 12345 ")


def test_b59_kvm_in_a_closed_folder(tree: Path) -> None:
    """B59 (a), one level higher: not even the device's mode can be seen."""
    node = write(tree / "closed" / "kvm")
    node.parent.chmod(0o000)
    with another_user():
        assert kvm.check_device(node).code == "kvm_permission"
    node.parent.chmod(0o700)


def test_b59_a_device_that_opens_but_is_no_kvm(tree: Path) -> None:
    """B59 (b): a character device that opens and fails the ioctl."""
    (tree / "kvm").symlink_to("/dev/null")
    check = kvm.check_device(tree / "kvm")
    assert (check.status, check.code) == ("warn", "kvm_broken")
    assert "opens" in check.detail and "ENOTTY" in check.detail


def test_b59_no_kvm_at_all(tree: Path) -> None:
    """B59 (c)."""
    check = kvm.check_device(tree / "kvm")
    assert (check.status, check.code) == ("warn", "kvm_missing")


def test_b59_a_node_without_a_driver(tree: Path) -> None:
    """The node is there and open to all, but nothing in the kernel stands behind it (ENXIO)."""
    with socket.socket(socket.AF_UNIX) as listener:  # opening a socket's name gives ENXIO too
        listener.bind(str(tree / "kvm"))
        check = kvm.check_device(tree / "kvm")
    assert check.code == "kvm_broken"
    assert os.strerror(errno.ENXIO) in check.detail


@pytest.mark.parametrize(("version", "code"), [(12, "kvm_unproved"), (11, "kvm_broken")])
def test_kvm_is_asked_for_its_version_and_a_machine(
    version: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ioctl(fd: int, request: int, argument: int) -> int:
        asked.append(request)
        return version if request == kvm.KVM_GET_API_VERSION else os.dup(fd)

    monkeypatch.setattr(kvm.fcntl, "ioctl", ioctl)
    before = len(os.listdir("/proc/self/fd"))
    check = kvm.check_device(Path("/dev/null"))
    assert check.code == code
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
    assert (kvm.KVM_CREATE_VM in asked) == (version == 12)
    if code == "kvm_unproved":
        assert "rdmalab up" in check.detail, "an open device is no proof, and says so"


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (("kvm", "a trial boot succeeded"), "kvm_ok"),
        (("tcg", "a trial guest did not come up in 8 s"), "kvm_hangs"),
        (MachineError("no QEMU"), "kvm_unproved"),
    ],
)
def test_b59_the_trial_boot_has_the_last_word(
    verdict: tuple[str, str] | MachineError, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that makes virtual machines may still hang every guest."""

    def kvm_verdict(image: object, program: object) -> qemu.Accel:
        if isinstance(verdict, MachineError):
            raise verdict
        return qemu.Accel(*verdict)

    monkeypatch.delenv("RDMALAB_ACCEL", raising=False)
    monkeypatch.setattr(
        kvm, "check_device", lambda node: Check("kvm", "ok", "x", code="kvm_unproved")
    )
    monkeypatch.setattr("rdmalab.image.find_image", lambda: "an image")
    monkeypatch.setattr(qemu, "find_qemu", lambda: "a program")
    monkeypatch.setattr(qemu, "kvm_verdict", kvm_verdict)
    assert kvm.check().code == code
    monkeypatch.setattr("rdmalab.image.find_image", lambda: None)
    assert kvm.check().code == "kvm_unproved"
    monkeypatch.setenv("RDMALAB_ACCEL", "tcg")
    assert kvm.check().code == "kvm_overridden"


# ---------------------------------------------------------------- the kernel module rdma_rxe

NOT_FOUND = (
    "echo 'modprobe: FATAL: Module rdma_rxe not found in directory /lib/modules/x' >&2; exit 1"
)
REFUSED = (
    "echo \"modprobe: ERROR: could not insert 'rdma_rxe': Operation not permitted\" >&2; exit 1"
)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (NOT_FOUND, "rxe_absent", "no rdma_rxe"),
        (REFUSED, "rxe_refused", "Operation not permitted"),
        ("echo install /bin/false", "rxe_refused", "install /bin/false"),
        ("echo insmod /lib/modules/x/rdma_rxe.ko", "rxe_present", "this kernel has it"),
        ("exec sleep 60", "rxe_refused", "no answer within"),
        ("exit 1", "rxe_refused", "no reason"),
    ],
)
def test_b02_each_answer_of_modprobe_is_a_case_of_its_own(
    tree: Path, programs: Path, body: str, code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B02: absent, refused (with the reason) and there to be loaded are told apart."""
    script(programs / "modprobe", body)
    monkeypatch.setattr(devices, "MODPROBE_TIMEOUT_S", 1)
    check = devices.rxe_module(tree)
    assert (check.status, check.code) == ("warn", code)
    assert said in check.detail and check.fix
    assert "Traceback" not in check.detail


def test_b02_a_loaded_module_needs_no_modprobe(tree: Path, programs: Path) -> None:
    (tree / "sys/module/rdma_rxe").mkdir(parents=True)
    script(programs / "modprobe", "exit 1")
    assert devices.rxe_module(tree).code == "rxe_loaded"


def test_b02_no_modprobe(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "program", lambda name: None)
    assert devices.rxe_module(tree).code == "modprobe_missing"


def test_b02_a_refusal_shows_the_kernels_line_and_the_missing_ipv6(
    tree: Path, programs: Path
) -> None:
    """B02: with IPv6 switched off the module's start fails as 'Operation not permitted'."""
    script(programs / "modprobe", REFUSED)
    script(
        programs / "dmesg", "echo '[1.0] eth0: up'; echo '[9.1] rdma_rxe: Failed to create IPv6'"
    )
    check = devices.rxe_module(tree)
    assert "Failed to create IPv6" in check.detail
    assert "IPv6 is switched off" in check.detail
    (tree / "proc/sys/net/ipv6").mkdir(parents=True)
    assert "IPv6 is switched off" not in devices.rxe_module(tree).detail


def test_b02_looking_never_loads_a_module(tree: Path, programs: Path, tmp_path: Path) -> None:
    """The default path never touches this machine's modules: every call is a dry run."""
    script(programs / "modprobe", f'printf "%s\\n" "$*" >> {tmp_path}/calls')
    doctor.run_checks("vm", root=tree)
    doctor.run_checks("local", root=tree)
    assert (tmp_path / "calls").read_text().splitlines() == ["-n -v rdma_rxe"] * 2


def test_b02_only_root_with_fix_really_loads(
    tree: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a real try tells that a module which is there is refused."""
    script(programs / "modprobe", f'[ "$1" = -n ] || {{ {REFUSED}; }}')
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert devices.rxe_module(tree, load=True).code == "rxe_present"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert devices.rxe_module(tree).code == "rxe_present"
    assert devices.rxe_module(tree, load=True).code == "rxe_refused"
    script(programs / "modprobe", "exit 0")
    assert devices.rxe_module(tree, load=True).code == "rxe_loaded"


@pytest.mark.skipif(Path("/sys/module/rdma_rxe").exists(), reason="rdma_rxe is loaded here")
@pytest.mark.may_skip("the machine is better than the case")
def test_b02_the_whole_doctor_with_two_bad_modprobes(programs: Path) -> None:
    """B02's own test: two codes, one next step each, exit 1 for the local backend, no traceback."""
    steps = {}
    for body, code in ((NOT_FOUND, "rxe_absent"), (REFUSED, "rxe_refused")):
        script(programs / "modprobe", body)
        command = [sys.executable, "-m", "rdmalab.doctor", "--json", "--backend", "local"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        (check,) = [c for c in json.loads(done.stdout) if c["check"] == "rxe module"]
        assert check["code"] == code
        assert done.returncode == 1
        assert "Traceback" not in done.stdout + done.stderr
        steps[code] = check["fix"]
    assert all(steps.values()) and steps["rxe_absent"] != steps["rxe_refused"]


@pytest.mark.parametrize(
    ("release", "step"),
    [
        ("6.8.0-31-generic", "linux-modules-extra-6.8.0-31-generic"),
        ("6.12.0-1-cloud-amd64", "cloud kernels come without it"),
        ("5.15.153.1-microsoft-standard-WSL2", "WSL"),
        ("7.3.4+deb13-amd64", "linux-image-amd64"),
    ],
)
def test_b02_the_next_step_fits_the_kernel(release: str, step: str) -> None:
    assert step in devices._absent_step(release)


# ---------------------------------------------------------------- RDMA devices in three layers


def rdma_tree(tree: Path, names: tuple[str, ...] = ("rxe0",)) -> Path:
    """What a machine with working rxe devices looks like."""
    for number, name in enumerate(names):
        write(tree / f"sys/class/infiniband/{name}/parent", "eth0\n")
        write(tree / f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"{name}\n")
        write(tree / f"dev/infiniband/uverbs{number}")
        (tree / f"dev/infiniband/uverbs{number}").chmod(0o666)
    write(tree / "sys/class/infiniband_verbs/abi_version", "6\n")
    write(tree / "etc/libibverbs.d/rxe.driver", "driver rxe\n")
    write(tree / "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav57.so")
    return tree


def fake_ibv_devices(programs: Path, *names: str) -> None:
    lines = "".join(f"    {name:<16}\t505400fffe00000{n}\n" for n, name in enumerate(names))
    header = "    device          \t   node GUID\n    ------          \t----------------\n"
    script(programs / "ibv_devices", f"cat <<'END'\n{header}{lines}END")


def test_b03_all_layers_agree(tree: Path, programs: Path) -> None:
    fake_ibv_devices(programs, "rxe0")
    check = devices.rdma_devices(rdma_tree(tree))
    assert (check.status, check.code) == ("ok", "rdma_ok")
    assert "rxe0" in check.detail


@pytest.mark.parametrize(
    "lost", ["etc/libibverbs.d/rxe.driver", "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav57.so"]
)
def test_b03_provider_missing(tree: Path, programs: Path, lost: str) -> None:
    """B03 (1): the kernel has the device, the node opens, only libibverbs does not list it."""
    fake_ibv_devices(programs)
    (rdma_tree(tree) / lost).unlink()
    check = devices.rdma_devices(tree)
    assert (check.status, check.code) == ("fail", "provider_missing")
    assert "rxe0" in check.detail and "rxe" in check.detail.split("list it:")[1]
    assert "ibverbs-providers" in check.fix


def test_b03_a_missing_plugin_is_not_a_missing_library(tree: Path, programs: Path) -> None:
    """What libibverbs really prints then also ends in 'cannot open shared object file'."""
    warning = (
        "libibverbs: Warning: couldn't load driver 'librxe-rdmav34.so': librxe-rdmav34.so: "
        "cannot open shared object file: No such file or directory"
    )
    script(programs / "ibv_devices", f'echo "{warning}" >&2')
    check = devices.rdma_devices(rdma_tree(tree))
    assert check.code == "provider_missing" and "couldn't load driver" in check.detail


def test_b03_uverbs_permission(tree: Path, programs: Path) -> None:
    """B03 (2): the node is closed to this user, whatever libibverbs lists."""
    for listed in ((), ("rxe0",)):
        fake_ibv_devices(programs, *listed)
        node = rdma_tree(tree) / "dev/infiniband/uverbs0"
        node.chmod(0o000)
        programs.parent.chmod(0o755)
        with another_user():
            check = devices.rdma_devices(tree)
        node.chmod(0o600)
        assert check.code == "uverbs_permission"
        assert "/dev/infiniband/uverbs0" in check.detail


def test_b03_only_some_nodes_are_mapped(tree: Path, programs: Path) -> None:
    """B03: a container with one of two nodes works; what is missing is still named."""
    fake_ibv_devices(programs, "rxe0")
    (rdma_tree(tree, ("rxe0", "rxe1")) / "dev/infiniband/uverbs1").unlink()
    check = devices.rdma_devices(tree)
    assert check.code == "rdma_ok"
    assert "rxe1" in check.detail and "uverbs1" in check.detail
    (tree / "dev/infiniband/uverbs0").unlink()
    assert devices.rdma_devices(tree).code == "uverbs_missing"


def test_b03_no_uverbs_module(tree: Path, programs: Path) -> None:
    fake_ibv_devices(programs)
    shutil.rmtree(rdma_tree(tree) / "sys/class/infiniband_verbs")
    check = devices.rdma_devices(tree)
    assert check.code == "uverbs_missing" and "ib_uverbs" in check.detail


def test_b03_no_libibverbs(tree: Path, programs: Path) -> None:
    script(programs / "ibv_devices", "exit 127")
    check = devices.rdma_devices(rdma_tree(tree))
    assert check.code == "libibverbs_missing" and "libibverbs1" in check.fix


def test_b03_nothing_at_all_is_no_failure_of_the_default_backend(tree: Path) -> None:
    check = devices.rdma_devices(tree)
    assert check.code == "rdma_none" and "--backend local" in check.fix
    assert [c.status for c in doctor.weigh([check], "vm")] == ["warn"]
    assert [c.status for c in doctor.weigh([check], "local")] == ["fail"]


def test_libibverbs_is_asked_directly_where_its_program_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ctypes twin of ibv_devices: it lists devices, or says that there is no library."""
    monkeypatch.setattr(packages, "program", lambda name: None)
    names, complaint = devices.listed_by_libibverbs()
    assert names == set() or names or "not installed" in complaint


# ---------------------------------------------------------------- memory, disk, limits


def memory_tree(tree: Path, available_mib: int, cgroup: str, files: dict[str, str]) -> Path:
    write(tree / "proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {available_mib * 1024} kB\n")
    write(tree / "proc/self/cgroup", cgroup)
    for name, text in files.items():
        write(tree / "sys/fs/cgroup" / name, text + "\n")
    return tree


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("cgroup", "files", "free_mib"),
    [
        pytest.param("0::/\n", {}, 8000, id="no limit"),
        pytest.param(
            "0::/a/b\n",
            {"a/b/memory.max": "max", "a/b/memory.current": "1"},
            8000,
            id="v2 without a limit",
        ),
        pytest.param(
            "0::/a/b\n",
            {"a/memory.max": str(1000 * MIB), "a/memory.current": str(400 * MIB)},
            600,
            id="v2, the limit of the group above",
        ),
        pytest.param(
            "0::/\n",
            {
                "memory.max": str(1000 * MIB),
                "memory.current": str(900 * MIB),
                "memory.stat": f"anon 5\ninactive_file {300 * MIB}",
            },
            400,
            id="v2, page cache is given up on demand",
        ),
        pytest.param(
            "5:cpu,memory:/docker/x\n0::/\n",
            {"memory/memory.limit_in_bytes": str(500 * MIB), "memory/memory.usage_in_bytes": "0"},
            500,
            id="v1, seen from inside a container",
        ),
        pytest.param(
            "5:memory:/\n",
            {
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/memory.usage_in_bytes": "0",
            },
            8000,
            id="v1 without a limit",
        ),
    ],
)
def test_memory_is_what_the_control_group_leaves(
    tree: Path, cgroup: str, files: dict[str, str], free_mib: int
) -> None:
    free_bytes, _ = machine.available_memory(memory_tree(tree, 8000, cgroup, files))
    assert free_bytes == free_mib * MIB


def test_too_little_memory_names_what_is_needed(tree: Path) -> None:
    files = {"memory.max": str(500 * MIB), "memory.current": str(100 * MIB)}
    check = machine.memory(memory_tree(tree, 8000, "0::/\n", files))
    assert (check.status, check.code) == ("fail", "memory_short")
    assert "400 MiB" in check.detail and "500 MiB" in check.detail and "700 MiB" in check.detail


def test_disk_of_a_cache_that_cannot_be_written(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDMALAB_CACHE_DIR", "/proc/rdmalab")
    check = machine.disk()
    assert (check.status, check.code) == ("fail", "cache_unwritable")
    assert "/proc/rdmalab" in check.detail


def test_disk_says_where_and_how_much(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMALAB_CACHE_DIR", str(tree / "cache"))
    usage = shutil.disk_usage(tree)
    for free, code in ((10 * MIB, "disk_short"), (2000 * MIB, "disk_tight"), (2**40, "disk_ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        check = machine.disk()
        assert check.code == code and str(tree / "cache") in check.detail


def test_b04_memlock_is_given_in_one_unit_spelled_out() -> None:
    """B04: `ulimit -l` counts in KiB and Docker in bytes, so both KiB and MiB are spelled out."""
    code = "from rdmalab.doctor import machine as m; print(m.memlock(True)); print(m.memlock())"
    limits = (64 * 1024, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, limits),
    )
    local, default = done.stdout.splitlines()
    assert "64 KiB (0.0625 MiB)" in local and "memlock_low" in local and "ENOMEM" in local
    assert "status='ok'" in default


@pytest.mark.parametrize(
    ("name", "value", "step"),
    [
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
    ],
)
def test_user_namespaces_that_are_switched_off(
    tree: Path, name: str, value: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    write(tree / "proc/sys" / name, f"{value}\n")
    check = machine.user_namespaces(tree)
    assert check.code == "userns_off" and step in check.fix


def test_user_namespaces_need_a_range_of_ids(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machine, "user_name", lambda: "ada")
    write(tree / "etc/subuid", "adam:100000:65536\n")
    assert machine.user_namespaces(tree).code == "userns_no_range"
    write(tree / "etc/subuid", "adam:100000:65536\nada:165536:65536\n")
    assert machine.user_namespaces(tree).code == "userns_ok"


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(machine.getpass, "getuser", nameless)
    assert machine.user_name() == str(os.getuid())


@pytest.mark.parametrize(
    ("name", "status"),
    [("x86_64", "ok"), ("aarch64", "warn"), ("arm64", "warn"), ("s390x", "fail")],
)
def test_arch_says_what_was_tested(name: str, status: str) -> None:
    assert machine.arch(name).status == status


# ---------------------------------------------------------------- software


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("echo 'QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)'", "qemu_ok"),
        ("echo 'QEMU emulator version 10.0.2'", "qemu_ok"),
        ("echo 'QEMU emulator version 6.2.0'", "qemu_old"),
        ("echo 'error while loading shared libraries: libx.so' >&2; exit 127", "qemu_broken"),
    ],
)
def test_qemu_is_started_not_only_found(programs: Path, body: str, code: str) -> None:
    script(programs / packages.qemu_program(), body)
    assert software.qemu().code == code


def test_another_qemu_can_be_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = script(programs / "my-qemu", "echo 'QEMU emulator version 9.9.9'")
    monkeypatch.setenv("RDMALAB_QEMU", str(named))
    assert "9.9.9" in software.qemu().detail
    assert packages.NEEDS[0] not in packages.missing()


def test_a_library_is_there_if_it_can_be_loaded() -> None:
    assert packages.present("lib:libc.so.6") and not packages.present("lib:libnope.so.9")


def test_no_qemu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "program", lambda name: None)
    check = software.qemu()
    assert (check.status, check.code) == ("fail", "qemu_missing")
    assert packages.NEEDS[0].apt in check.fix


@contextlib.contextmanager
def engine(path: Path, answer: bytes) -> Iterator[None]:
    """Something that listens where a Docker engine would, and answers one request."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            channel, _ = listener.accept()
            with channel:
                channel.recv(4096)
                channel.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(timeout=10)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"Version": "26.1"}', "docker_ok"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "docker_silent"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "docker_silent"),
        (b"", "docker_silent"),
    ],
)
def test_docker_is_asked_not_only_found(
    tree: Path, answer: bytes, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with engine(tree / "docker.sock", answer):
        check = software.docker(tree / "docker.sock")
    assert check.code == code and check.status == ("ok" if code == "docker_ok" else "warn")


def test_docker_that_is_not_there_or_closed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert software.docker(tree / "docker.sock").code == "docker_missing"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "docker.sock"))
        (tree / "docker.sock").chmod(0o000)
        with another_user():
            assert software.docker(tree / "docker.sock").code == "docker_permission"


def test_jupyter_missing_says_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_importable", lambda name: name != "jupyterlab")
    check = software.jupyter()
    assert (check.status, check.code) == ("fail", "jupyter_missing")
    assert sys.executable in check.detail and "make setup" in check.fix


@pytest.mark.parametrize(
    ("found", "lacking", "status", "code"),
    [
        (None, [], "warn", "image_missing"),
        (None, [packages.Need("build", "x", "x")], "fail", "image_missing"),
        (ImageError("root.erofs is damaged.", next_step="Build."), [], "fail", "image_damaged"),
    ],
)
def test_the_image_is_there_whole_or_can_be_built(
    found: None | ImageError,
    lacking: list[packages.Need],
    status: str,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_image() -> None:
        if found:
            raise found

    monkeypatch.setattr("rdmalab.image.find_image", find_image)
    monkeypatch.setattr(packages, "missing", lambda: lacking)
    check = software.image()
    assert (check.status, check.code) == (status, code) and check.fix


# ---------------------------------------------------------------- the answer as a whole


def test_only_what_the_backend_needs_can_fail() -> None:
    checks = [Check("qemu", "fail", "x"), Check("rdma devices", "fail", "x")]
    assert [c.status for c in doctor.weigh(checks, "vm")] == ["fail", "warn"]
    assert [c.status for c in doctor.weigh(checks, "local")] == ["warn", "fail"]


def test_json_is_one_list_with_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--json"])
    listed = json.loads(capsys.readouterr().out)
    assert all(set(c) == {"check", "status", "detail", "fix", "code"} for c in listed)
    assert all(c["status"] in ("ok", "warn", "fail") for c in listed)
    assert all(c["detail"] and c["code"] for c in listed)
    assert all(c["fix"] for c in listed if c["status"] != "ok"), "each problem has its next step"
    assert code == (1 if any(c["status"] == "fail" for c in listed) else 0)


def test_the_table_has_one_line_for_each_check() -> None:
    checks = [Check("qemu", "ok", "QEMU 7.2"), Check("kvm", "warn", "closed", "join", "x")]
    assert doctor.render(checks) == (
        "ok    qemu          QEMU 7.2\nwarn  kvm           closed -> join"
    )
    assert "\033[" in doctor.render(checks, colour=True)


def test_the_doctor_runs_with_a_bare_python(tree: Path) -> None:
    """No site-packages at all: this is how `make setup` starts on a new machine."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE, str(ROOT), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    codes = {c["code"] for c in json.loads(done.stdout)}
    assert "jupyter_missing" in codes and "Traceback" not in done.stderr
    assert done.returncode == 1


BARE = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("rdmalab.doctor", run_name="__main__", alter_sys=True)
"""


def test_an_old_python_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(software, "PYTHON_MIN", (9, 9))
    assert main(["--fix", "--system"]) == 1
    said = capsys.readouterr()
    assert "too old" in said.err and "Traceback" not in said.err and not said.out


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--backend", "cloud"])
    assert stop.value.code == 2
