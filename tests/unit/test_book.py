"""The labs for checking and grading: found by number or name, built once, refused with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rdmalab.errors import UsageError
from rdmalab.grading.book import Book

LABS = Path(__file__).parents[2] / "labs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Labs of a test's own: the build and one source."""
    (tmp_path / "source").mkdir()
    shutil.copy(LABS / "build.py", tmp_path)
    shutil.copy(LABS / "source" / "00_meet_your_hosts.py", tmp_path / "source")
    return tmp_path


@pytest.mark.parametrize("words", ["0", "00", "00_meet_your_hosts"])
def test_a_lab_is_found_by_number_or_name(folder: Path, words: str) -> None:
    assert Book(folder).find(words) == "00_meet_your_hosts"


def test_an_unknown_lab_is_refused_with_those_that_there_are(folder: Path) -> None:
    with pytest.raises(UsageError, match="no lab '7'; there are: 00_meet_your_hosts"):
        Book(folder).find("7")


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="RDMALAB_LABS"):
        Book(tmp_path)


def test_what_is_released_is_what_is_committed(folder: Path) -> None:
    released = Book(folder).released("00_meet_your_hosts")
    committed = json.loads((LABS / "00_meet_your_hosts.ipynb").read_text())
    assert [cell.id for cell in released.cells] == [cell["id"] for cell in committed["cells"]]


def test_a_faulty_source_is_named(folder: Path) -> None:
    source = folder / "source" / "00_meet_your_hosts.py"
    source.write_text(source.read_text().replace("### END SOLUTION", "### END SOLUTIONS", 1))
    with pytest.raises(UsageError, match=r"00_meet_your_hosts\.py.*looks like a region mark"):
        Book(folder).solved("00_meet_your_hosts")
