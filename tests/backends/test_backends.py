"""`docker` and `local` on a real kernel: test suites that run in the test machine.

They are pytest's as here. Some are the vm backend's own, which prove that labs run unchanged:
perftest and rping between the hosts, Lab 01's solution with what it claims. Others (``inside/``)
are about what one backend is: containers and their rights, devices shared or one each, the ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from .disks import ROOT
from .machine import Machine, pass_on

SUITE_S = 2400  # under a load of ten; four minutes where nothing else runs
pytestmark = pytest.mark.timeout(SUITE_S + 600)

INSIDE = "tests/backends/inside"
TOOLS = "tests/fabric/test_tools.py"
LAB01 = "tests/labs/test_lab01.py"
PERFTEST = (
    f"{TOOLS}::test_perftest_latency",
    f"{TOOLS}::test_perftest_write_bandwidth[4096]",
    f"{TOOLS}::test_rping_both_ways[bob-alice]",
)
SOLVED = tuple(
    f"{LAB01}::{name}"
    for name in (
        "test_after_all_attempts_the_solution_still_passes",
        "test_b04_the_limit_for_pinned_memory_is_met_and_told_in_numbers",
        "test_sixteen_combinations_of_rights_are_answered_as_the_manual_says",
        "test_b23_each_side_hears_what_the_lab_says",
        "test_b22_the_guards_stand_at_both_edges",
    )
)
MEMLOCK = ("prlimit", "--memlock=67108864:67108864")  # what Lab 01 runs into, and is written for

# The wire between two devices that docs/backends.md tells readers to make, without its last line.
WIRE = re.search(
    r"```\n(ip link add w0 .*\n)RDMALAB_DEVICES=rxe_a,rxe_b rdmalab up",
    (ROOT / "docs/backends.md").read_text(encoding="utf-8"),
    re.DOTALL,
)
UNWIRE = """
rdma link delete rxe_a
rdma link delete rxe_b
ip link delete w0
ip rule add pref 0 lookup local
for pref in 10 11 12 13 20 21 100; do ip rule delete pref $pref; done
"""


def suite(machine: Machine, backend: str, *tests: str, **variables: str) -> None:
    """Run tests in the machine. All must pass, as many as are named or more; none may skip."""
    words = ["python3", "-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=900", "-v"]
    ran = machine.run(
        [*MEMLOCK, *words, "--durations=8", *tests],
        env={"RDMALAB_BACKEND": backend, "RDMALAB_REQUIRE_ALL": "1", **variables},
        timeout_s=SUITE_S,
        check=False,
        hear=pass_on,
    )
    assert ran.code == 0, f"{backend}: see above"
    passed = re.search(r"(\d+) passed", ran.out)
    assert passed and int(passed[1]) >= len(tests)


def test_docker(machine: Machine) -> None:
    """One pair of hosts for most, a second for the lab, then the ends of the first."""
    hosts, ends = f"{INSIDE}/docker_hosts.py", f"{INSIDE}/docker_ends.py"
    suite(machine, "docker", *PERFTEST, hosts, *SOLVED, ends)


@pytest.fixture
def wire(machine: Machine) -> Iterator[None]:
    """Two devices for the local backend; the machine's network is as before afterwards."""
    assert WIRE, "the page has another wire"
    machine.run(f"set -e\n{WIRE[1]}")
    yield
    machine.run(UNWIRE)


def test_local(machine: Machine, wire: None) -> None:
    """A device each, over a wire, for perftest and Lab 01's solution; then one for both.

    rping is left out: rdma_cm asks the routes of the machine, which know no way from it to itself.
    """
    each = {"RDMALAB_DEVICES": "rxe_a,rxe_b"}
    suite(machine, "local", *PERFTEST[:2], *SOLVED, f"{INSIDE}/local_hosts.py", **each)
