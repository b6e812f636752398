"""labs/build.py: the same bytes each time, nothing leaks, and what is wrong is refused by name."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

LABS = Path(__file__).parents[2] / "labs"
NOTEBOOKS = sorted(LABS.glob("[0-9][0-9]_*.ipynb"))


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("labs_build", LABS / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load_build()

GOOD = """\
# %% [markdown]
# # Lab 99: Try the build
#
# Some prose.

# %%
# %load_ext rdmalab
x = 1

# %% hide="input"
y = 2

# %% task="sum"
# %%on alice
# !hostname
total = None
### BEGIN SOLUTION
total = 40 + 2  # canary-solution
### END SOLUTION

# %% check="sum-value" points=2
# %%on alice
print("I looked at total.")
assert total is not None, "total is still None."
### BEGIN HIDDEN TESTS
assert total == 42, "canary-hidden"
### END HIDDEN TESTS
"""


def source_of(text: str, folder: Path) -> Path:
    path = folder / "source" / "99_try.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def cells_of(text: str, folder: Path) -> dict[str, dict[str, object]]:
    released = build.release(build.solved(source_of(text, folder)))
    return {cell["id"]: cell for cell in released.cells}


# --- the learner's form


def test_cells_get_stable_ids_and_nbgrader_metadata(tmp_path: Path) -> None:
    cells = cells_of(GOOD, tmp_path)
    assert list(cells) == ["cell-001", "cell-002", "cell-003", "sum", "sum-value"]
    assert cells["sum"]["metadata"]["nbgrader"]["solution"] is True
    check = cells["sum-value"]["metadata"]
    assert check["nbgrader"]["points"] == 2
    assert check["nbgrader"]["grade"] is True
    assert (check["editable"], check["deletable"]) == (False, False)
    assert cells["cell-003"]["metadata"]["jupyter"] == {"source_hidden": True}


def test_magics_are_live_and_first(tmp_path: Path) -> None:
    cells = cells_of(GOOD, tmp_path)
    assert cells["sum"]["source"].startswith("%%on alice\n!hostname\n")
    assert cells["cell-002"]["source"].startswith("%load_ext rdmalab\n")


def test_a_solution_becomes_a_harmless_line(tmp_path: Path) -> None:
    lines = cells_of(GOOD, tmp_path)["sum"]["source"].splitlines()
    assert lines[-2:] == ["total = None", build.STUB]
    compile("\n".join(lines[2:]), "task", "exec")


def test_nothing_of_the_solution_is_left(tmp_path: Path) -> None:
    text = build.text_of(build.release(build.solved(source_of(GOOD, tmp_path))))
    assert "canary" not in text
    assert "canary-solution" in build.text_of(build.solved(source_of(GOOD, tmp_path)))


def test_nbgrader_accepts_both_forms(tmp_path: Path) -> None:
    from nbgrader.nbgraderformat.v3 import MetadataValidatorV3

    notebook = build.solved(source_of(GOOD, tmp_path))
    MetadataValidatorV3().validate_nb(notebook)
    MetadataValidatorV3().validate_nb(build.release(notebook))


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    source = source_of(GOOD, tmp_path)
    texts = {build.text_of(build.release(build.solved(source))) for _ in range(3)}
    assert len(texts) == 1


def test_a_notebook_says_which_lab_it_is(tmp_path: Path) -> None:
    """Grading knows a submission by it, whatever its file is called."""
    released = build.release(build.solved(source_of(GOOD, tmp_path)))
    assert released.metadata.rdmalab == {"lab": "99_try"}


# --- an instructor's own hidden tests


def private(text: str, folder: Path) -> Path:
    path = folder / "private" / "99_try.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


PRIVATE = """\
# %% check="sum-value"
# %%on alice
assert type(total) is int, "canary-private"
"""


def test_private_hidden_tests_are_run_and_not_released(tmp_path: Path) -> None:
    """B47: they live outside of the public repository, and nothing of them is handed out."""
    source = source_of(GOOD, tmp_path)
    public = build.text_of(build.release(build.solved(source)))
    private(PRIVATE, tmp_path)
    notebook = build.solved(source)
    (check,) = (cell for cell in notebook.cells if cell.id == "sum-value")
    assert check.source.count("%%on alice") == 1
    assert check.source.index("canary-hidden") < check.source.index("canary-private")
    assert build.text_of(build.release(notebook)) == public


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('# %% check="sum-other"\nassert True\n', "names no check of this lab"),
        ("# %%\nassert True\n", "names no check of this lab"),
        ("# %% [markdown]\n# words\n", "names no check of this lab"),
        (f"{PRIVATE}### BEGIN HIDDEN TESTS\n### END HIDDEN TESTS\n", "leave out marks"),
        ('# %% check="sum-value"\nprint(total)\n', "a check must end with an assert"),
        ('# %% check="sum-value"\nassert total ==\n', "not valid Python"),
    ],
)
def test_faulty_private_tests_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    private(text, tmp_path)
    with pytest.raises(build.LabError, match=reason):
        build.solved(source_of(GOOD, tmp_path))


# --- refusals

TASK = '# %% task="sum"\ntotal = None\n'
REGION = "### BEGIN SOLUTION\ntotal = 42\n### END SOLUTION\n"
CHECK = '# %% check="sum-value" points=1\nassert total == 42, "no"\n'

REFUSED = {
    "unbalanced solution": (GOOD.replace("### END SOLUTION\n", ""), "no END SOLUTION"),
    "end without begin": (GOOD.replace("### BEGIN SOLUTION\n", ""), "out of balance"),
    "crossed regions": (
        GOOD.replace("### END SOLUTION", "### END HIDDEN TESTS"),
        "out of balance",
    ),
    "nested region": (
        TASK + "### BEGIN SOLUTION\n" + REGION + "### END SOLUTION\n" + CHECK,
        "out of balance",
    ),
    "lower-case region": (
        GOOD.replace("### BEGIN SOLUTION", "### begin solution"),
        "looks like a region mark",
    ),
    "region with a missing space": (
        GOOD.replace("### BEGIN HIDDEN TESTS", "###BEGIN HIDDEN TESTS"),
        "looks like a region mark",
    ),
    "region with a wrong word": (
        GOOD.replace("### BEGIN SOLUTION", "### START SOLUTION"),
        "### BEGIN SOLUTION|out of balance",
    ),
    "three hashes": (GOOD.replace("y = 2", "### ANSWER\ny = 2"), "'###' begins region marks only"),
    "solution in prose": (
        GOOD.replace("# Some prose.", "# ### BEGIN SOLUTION\n# x\n# ### END SOLUTION"),
        "does not belong into a prose cell",
    ),
    "solution in a plain cell": (GOOD.replace("y = 2", REGION), "does not belong into a hide cell"),
    "solution in a check": (
        TASK + REGION + CHECK.replace("assert", REGION + "assert"),
        "does not belong into a check cell",
    ),
    "task without region": (TASK + CHECK, "a task needs a region"),
    "task without check": (TASK + REGION, "has no check"),
    "unknown mark": (
        GOOD.replace('hide="input"', 'hide="output"'),
        "unknown mark \"hide='output'\"",
    ),
    "mark in brackets": (GOOD.replace('task="sum"', "[task id=sum]"), "unknown mark"),
    "mark without quotes": (GOOD.replace('task="sum"', "task=sum"), "unknown mark"),
    "points missing": (GOOD.replace(" points=2", ""), "unknown mark .check="),
    "points zero": (GOOD.replace("points=2", "points=0"), "unknown mark .check="),
    "points true": (GOOD.replace("points=2", "points=true"), "unknown mark .check="),
    "raw cell": (GOOD.replace("# %% [markdown]", "# %% [raw]"), "unknown mark"),
    "id twice": (GOOD + TASK + REGION + CHECK, "id 'sum' is used twice"),
    "id with a blank": (GOOD.replace('task="sum"', 'task="a sum"'), "lower-case letters"),
    "check of another task": (GOOD.replace("sum-value", "other-value"), "named sum-"),
    "check first": (CHECK + GOOD, "must stand under its task"),
    "check without assert": (
        GOOD + '# %% check="sum-more" points=1\nassert x\nx\n',
        "must end with an assert",
    ),
    "check whose only assert is hidden": (
        GOOD.replace('assert total is not None, "total is still None."\n', ""),
        "must end with an assert",
    ),
    "long cell": (GOOD.replace("y = 2", "y = 2\n" * 16), "16 lines"),
    "long solution": (GOOD.replace("total = 40 + 2", "total = 40\n" * 14), "at most 15"),
    "magic in the middle": (
        GOOD.replace("# %%on alice\n# !hostname", "# !hostname\n# %%on alice"),
        "only the first line",
    ),
    "body line that begins a cell in a string": (
        GOOD.replace("y = 2", 'y = """\n# %% not a cell\n"""'),
        "only the first line",
    ),
    "body line that splits its cell": (
        GOOD.replace("y = 2", "y = [\n# %%\n]"),
        "not valid Python",
    ),
    "not Python": (GOOD.replace("y = 2", "y = = 2"), "not valid Python"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    with pytest.raises(build.LabError, match=reason) as caught:
        build.solved(source_of(text, tmp_path))
    assert str(caught.value).startswith("99_try.py: ")


def test_hidden_tests_do_not_count_as_lines(tmp_path: Path) -> None:
    hidden = 'assert total == 42, "canary-hidden"\n'
    assert len(cells_of(GOOD.replace(hidden, hidden * 20), tmp_path)) == 5


# --- the command line


def test_check_names_the_stale_notebook_and_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source_of(GOOD, tmp_path)
    here = ["--labs", str(tmp_path)]
    assert build.main([*here, "--check"]) == 1
    assert "99_try.ipynb is out of date: run `python labs/build.py`" in capsys.readouterr().out
    assert build.main(here) == 0
    assert capsys.readouterr().out == "wrote 99_try.ipynb\n"
    assert build.main([*here, "--check"]) == 0
    assert build.main(here) == 0
    assert capsys.readouterr().out == ""


def test_a_refusal_is_one_sentence_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source_of(GOOD.replace("### END SOLUTION\n", ""), tmp_path)
    assert build.main(["--labs", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("build.py: 99_try.py: cell 4 ('%%on alice'): ")
    assert err.count("\n") == 1


def test_solved_form_goes_to_another_folder_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["--solved", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.ipynb")) == [p.name for p in NOTEBOOKS]
    assert build.main(["--solved", str(LABS)]) == 1
    assert "outside labs/" in capsys.readouterr().err


# --- the labs themselves

MARKER = re.compile(r"(begin|end)[^a-z]*(solution|hidden)|hidden[^a-z]*test", re.IGNORECASE)
PARTS = (
    "**You will do**",
    "**You will learn**",
    "**You need**",
    "**Before this**",
    "## Start",
    "**Predict.**",
    "**What happened.**",
    "### Task ",
    "<details><summary>Hint 1</summary>",
    "## On hardware",
    "## What this does not show",
    "## Food for thought",
    "## Troubleshooting",
    "## Further reading",
    "**Next lab:**",
    "## Clean up",
)


def by_name(path: Path) -> str:
    return path.stem


def test_every_source_has_its_notebook() -> None:
    assert [path.stem for path in build.sources()] == [path.stem for path in NOTEBOOKS]


def test_committed_notebooks_are_what_the_sources_give() -> None:
    assert [path.name for path in build.stale()] == [], "run `python labs/build.py` and commit"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_release_holds_no_trace_of_a_run_or_an_answer(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not MARKER.search(text)
    notebook = json.loads(text)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info", "rdmalab"}
    for cell in notebook["cells"]:
        assert "widgets" not in cell["metadata"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_no_line_of_a_solution_or_a_hidden_test_is_released(path: Path) -> None:
    solved = build.solved(LABS / "source" / f"{path.stem}.py")
    released = json.loads(path.read_text(encoding="utf-8"))
    for cell, shown in zip(solved.cells, released["cells"], strict=True):
        secret = {line.strip() for region, line in build.regions(cell.source) if region} - {""}
        shown_lines = {line.strip() for line in "".join(shown["source"]).splitlines()}
        assert not secret & shown_lines


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_every_lab_has_the_fixed_form(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    position = -1
    for part in PARTS:
        assert part in text, f"{path.name} has no {part!r}"
        if part.startswith("## "):
            assert text.index(part) > position, f"{part!r} stands too early"
            position = text.index(part)
    assert text.startswith("# Lab ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_pictures_exist_and_have_alt_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    cells = json.loads(text)["cells"]
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", prose)
    assert pictures, "a lab begins with a drawing"
    for alt, target in pictures:
        assert len(alt) > 40
        assert (LABS / target).is_file()


def test_the_readme_lists_every_lab() -> None:
    readme = (LABS / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"({path.name})" not in readme] == []
