"""A learner's folder: filled once, never overwritten, and brought up to date where it may be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rdmalab.errors import MachineError
from rdmalab.workfolder import RECORD, fill

NOTEBOOK = "00_first.ipynb"


@pytest.fixture
def labs(tmp_path: Path) -> Path:
    """Labs as they are handed out, beside what is not."""
    folder = tmp_path / "labs"
    texts = {NOTEBOOK: "version 1", "01_second.ipynb": "second", "images/a.svg": "<svg>"}
    texts |= {"data/x.csv": "1,2", "source/00_first.py": "solution", "build.py": "builds"}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def names(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in found} - {RECORD}


def test_the_labs_are_laid_and_the_solutions_are_not(labs: Path, tmp_path: Path) -> None:
    said = fill(tmp_path / "mine", labs)
    assert names(tmp_path / "mine") == {NOTEBOOK, "01_second.ipynb", "images/a.svg", "data/x.csv"}
    assert said == [f"4 files of the labs are laid into {tmp_path / 'mine'}"]
    assert fill(tmp_path / "mine", labs) == []


def test_what_a_learner_changed_is_kept(labs: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    fill(mine, labs)
    (mine / NOTEBOOK).write_text("my answer")
    (mine / "own.ipynb").write_text("my own")
    assert fill(mine, labs) == []
    assert (mine / NOTEBOOK).read_text() == "my answer"
    assert (mine / "own.ipynb").read_text() == "my own"


def test_a_new_version_replaces_what_was_not_touched(labs: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    fill(mine, labs)
    (labs / NOTEBOOK).write_text("version 2")
    fill(mine, labs)
    assert (mine / NOTEBOOK).read_text() == "version 2"
    assert f"{NOTEBOOK.removesuffix('.ipynb')}.new.ipynb" not in names(mine)


def test_a_new_version_lies_beside_what_was_changed_and_is_told_once(
    labs: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    fill(mine, labs)
    (mine / NOTEBOOK).write_text("my answer")
    (labs / NOTEBOOK).write_text("version 2")
    (told,) = fill(mine, labs)
    assert "00_first.new.ipynb" in told
    assert (mine / NOTEBOOK).read_text() == "my answer"
    assert (mine / "00_first.new.ipynb").read_text() == "version 2"
    assert fill(mine, labs) == []
    assert (mine / NOTEBOOK).read_text() == "my answer"


def test_a_deleted_notebook_is_laid_again(labs: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    fill(mine, labs)
    (mine / NOTEBOOK).unlink()
    fill(mine, labs)
    assert (mine / NOTEBOOK).read_text() == "version 1"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}'])
def test_without_a_record_nothing_is_overwritten(labs: Path, tmp_path: Path, text: str) -> None:
    """As in a folder that was filled by hand, or whose record is damaged."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / NOTEBOOK).write_text("my answer")
    (mine / RECORD).write_text(text)
    fill(mine, labs)
    assert (mine / NOTEBOOK).read_text() == "my answer"
    assert json.loads((mine / RECORD).read_text())[NOTEBOOK]


def test_a_folder_that_cannot_be_written_is_named(labs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="cannot be laid into"):
        fill(tmp_path / "file", labs)
