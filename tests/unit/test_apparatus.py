"""What a check takes along: the lab's own functions, imports and constants, host by host."""

from __future__ import annotations

from rdmalab.grading.apparatus import Apparatus, body_of, hosts_of


def heard(*cells: str) -> Apparatus:
    apparatus = Apparatus()
    for cell in cells:
        apparatus.hear(cell)
    return apparatus


def test_where_a_cell_runs_is_in_its_first_line() -> None:
    assert hosts_of("%%on alice bob\nx") == ("alice", "bob")
    assert hosts_of("x = 1\n%%on alice") == ()
    assert body_of("%%on alice\nx\ny") == "\nx\ny"


def test_a_function_comes_with_what_it_needs() -> None:
    apparatus = heard(
        "%%on alice\nimport os, time\nLIMIT, low = 3, 4\nMOST = 5\n",
        "%%on alice bob\ndef inner():\n    return os.sep * MOST\ndef unused(): pass",
        "%%on alice\n!ls\ndef outer():\n    return inner()\n",
    )
    brought = apparatus.for_check("%%on alice\nassert outer() == 3, 'No.'")
    assert list(brought) == ["alice"]
    space: dict[str, object] = {}
    exec(brought["alice"], space)
    assert space["outer"]() == "/////" and "unused" not in space  # type: ignore[operator]
    assert "LIMIT" not in brought["alice"]


def test_a_check_on_the_desk_brings_along_what_it_calls_on_hosts() -> None:
    apparatus = heard(
        "%%on bob\ndef collect(): return 1",
        "%%on alice\ndef collect(): return 2",
        "def race(): lab.bob.run('x = collect()')",
    )
    brought = apparatus.for_check("race()\nassert lab.bob.get('x')")
    assert brought[""].startswith("def race") and "return 1" in brought["bob"]


def test_the_latest_meaning_of_a_name_counts_and_a_tasks_name_is_the_learners() -> None:
    apparatus = heard("def f(): return 1\ndef g(): return 1", "def f(): return 2", "g = f()")
    assert apparatus.for_check("f(), g") == {"": "def f():\n    return 2"}
    apparatus.hear("def f():\n    pass", task=True)
    assert apparatus.for_check("f(), g") == {}


def test_values_that_were_measured_stay_as_they_are() -> None:
    apparatus = heard("facts = measure()\nTIMES = [1]\nready = False")
    assert apparatus.for_check("assert facts and TIMES and not ready") == {}
