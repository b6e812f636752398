"""The command line's contract: help, exit codes, one sentence on stderr, one document on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import typer

from rdmalab import cli

from .sandbox import Sandbox, sandbox

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

HOST_KEYS = {"name", "ip", "device", "gid", "gid_index", "mtu"}
UP_KEYS = {"lab", "backend", "accel", "restored", "ready_s", "hosts"}


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """A sandbox with alice and bob up."""
    with sandbox() as made:
        made.up()
        yield made


def commands() -> list[tuple[str, ...]]:
    """Every command, and every command of a group."""
    top = typer.main.get_command(cli.app)
    found: list[tuple[str, ...]] = [()]
    for name, command in top.commands.items():  # type: ignore[attr-defined]  # it is a group
        found.append((name,))
        found += [(name, inner) for inner in getattr(command, "commands", ())]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.app([*words, "--help"])
    shown = capsys.readouterr()
    assert ended.value.code == 0 and shown.err == ""
    assert "Usage:" in shown.out and len(shown.out.splitlines()) > 3


def test_the_contracts_commands_are_there() -> None:
    names = {" ".join(words) for words in commands()}
    wanted = {"doctor", "up", "status", "down", "exec", "lab", "selftest", "fault"}
    wanted |= {f"image {name}" for name in ("build", "info", "export", "import")}
    assert wanted <= names


def one_sentence(err: str) -> None:
    """Plain words on stderr, no traceback, and what to do next."""
    assert err.startswith("rdmalab: ") and err.endswith("\n"), err
    assert "Traceback" not in err and "This is a fault of rdmalab" not in err, err
    assert len(err.splitlines()) == 1, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["frobnicate"], "rdmalab --help"),
        (["up", "--no-such-option"], "rdmalab --help"),
        (["up", "Alice"], "small letters"),
        (["up", "alice", "alice"], "given twice"),
        (["up", *(f"h{number}" for number in range(9))], "1 to 8 hosts"),
        (["up", "--lab", "No Good"], "small letters"),
        (["up", "--backend", "cloud"], "there is: vm, docker, local."),
        (["up", "--backend", "desk"], "there is: vm, docker, local."),
        (["lab", "--no-browser", "--ip", "300.1.2.3"], "has no such address"),
        (["lab", "--no-browser", "--ip", "192.0.2.1"], "has no such address"),
        (["down", "--lab", "../.."], "small letters"),
        (["exec", "alice"], "rdmalab --help"),
        (["exec", "carol", "--", "true"], "alice, bob"),
        (["fault", "bob"], "rdmalab --help"),
        (["fault", "carol", "loss=5%"], "alice, bob"),
        (["fault", "bob", "loss=5"], "such as 5%"),
        (["fault", "bob", "delay=10"], "such as 10ms"),
        (["fault", "bob", "rate=fast"], "such as 100mbit"),
        (["fault", "bob", "jitter=1ms"], "loss=5%"),
        (["fault", "bob", "clear", "down"], "clear"),
        (["image", "import"], "rdmalab --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_2_and_a_sentence(box: Sandbox, words: list[str], said: str) -> None:
    done = box.run(*words)
    assert (done.code, done.out) == (2, "")
    one_sentence(done.err)
    assert said in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exec", "--lab", "none", "alice", "--", "true"], "rdmalab up"),
        (["fault", "--lab", "none", "bob", "down"], "rdmalab up"),
        (["image", "import", "/nonexistent.tar"], "Copy it again"),
        (["image", "export", "/nonexistent/x.tar"], "a folder that you can write"),
        (["image", "share", "/proc/share"], "a folder that you can write"),
        (["labs", "/proc/labs"], "name another folder"),
        (["up", "alice", "carol"], "rdmalab down"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_1_and_a_sentence(box: Sandbox, words: list[str], said: str) -> None:
    done = box.run(*words)
    assert (done.code, done.out) == (1, "")
    one_sentence(done.err)
    assert said in done.err


def document(out: str) -> object:
    """The one JSON document that is everything on stdout."""
    found, end = json.JSONDecoder().raw_decode(out)
    assert out[end:] == "\n", out
    return found


def test_up_json(box: Sandbox) -> None:
    """The keys of the contract, with the values that they promise; more keys may be there."""
    shown = document(box.run("up", "--json").out)
    assert isinstance(shown, dict) and shown.keys() >= UP_KEYS
    assert (shown["lab"], shown["backend"]) == ("default", "vm")
    assert shown["accel"] in ("kvm", "tcg") and isinstance(shown["restored"], bool)
    assert isinstance(shown["ready_s"], float) and shown["ready_s"] > 0
    alice, bob = shown["hosts"]
    assert alice.keys() >= HOST_KEYS
    assert (alice["name"], alice["ip"], alice["gid"]) == ("alice", "10.0.0.1", "::ffff:10.0.0.1")
    assert (bob["name"], bob["ip"], bob["gid"]) == ("bob", "10.0.0.2", "::ffff:10.0.0.2")
    assert alice["device"] != bob["device"]
    for host in (alice, bob):
        assert isinstance(host["gid_index"], int) and host["mtu"] in (1024, 2048, 4096)
    assert "key" not in alice and "curve" not in json.dumps(shown), "no secrets"


def test_status_json(box: Sandbox) -> None:
    shown = document(box.run("status", "--json").out)
    assert isinstance(shown, dict)
    (lab,) = shown["labs"]
    assert lab.keys() >= UP_KEYS and [host["name"] for host in lab["hosts"]] == ["alice", "bob"]


def test_doctor_json(box: Sandbox) -> None:
    done = box.run("doctor", "--json")
    checks = document(done.out)
    assert isinstance(checks, list) and done.code in (0, 1)
    assert all(check.keys() >= {"check", "status", "detail", "fix"} for check in checks)
    assert {check["status"] for check in checks} <= {"ok", "warn", "fail"}


def test_image_info_json(box: Sandbox) -> None:
    shown = document(box.run("image", "info", "--json").out)
    assert isinstance(shown, dict)
    assert shown.keys() >= {"id", "arch", "folder", "kernel", "created", "size_bytes"}


def test_exec_passes_output_and_exit_code_on(box: Sandbox) -> None:
    done = box.run("exec", "alice", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert done == (7, "out\n", "err\n")
    assert box.run("exec", "alice", "--", "sh", "-c", "kill -9 $$").code == 137
    assert box.run("exec", "alice", "--", "no-such-command").code == 127


def test_fault_and_clear(box: Sandbox) -> None:
    """Each as often as one likes; the way back is said with it."""
    for _ in range(2):
        done = box.run("fault", "bob", "loss=100%")
        assert done.code == 0 and "rdmalab fault bob clear" in done.out
    ping = ("exec", "alice", "--", "ping", "-c1", "-W1", "10.0.0.2")
    assert box.run(*ping).code != 0
    for _ in range(2):
        done = box.run("fault", "bob", "clear")
        assert done == (0, "bob: clear.\n", "")
    assert box.run(*ping).code == 0


def test_down_twice_is_no_error(box: Sandbox) -> None:
    done = box.run("down", "--lab", "none")
    assert done == (0, "Nothing was running.\n", "")
