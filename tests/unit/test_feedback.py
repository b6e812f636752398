"""The learner's page: whole, escaped, and without a word that is not for learners."""

from __future__ import annotations

from html.parser import HTMLParser

from rdmalab.grading.feedback import page
from rdmalab.grading.results import CheckResult, SubmissionResult, TaskResult

EVIL = "</pre><script>alert(1)</script><img src=x onerror=y>\"'&"


class Tags(HTMLParser):
    """Collects tags, and finds what is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def made(evil: str) -> SubmissionResult:
    checks = (
        CheckResult(evil, 1, 1, "passed", told=(evil,)),
        CheckResult("x-y", 2, 0, "failed", reason_told=evil, printed="secret", reason="secret"),
        CheckResult("x-z", 1.5, 0, "not run", reason_told=evil),
    )
    task = TaskResult("x", evil, evil, checks)
    return SubmissionResult(evil, evil, "01", evil, (task,), [evil], evil)


def test_everything_that_a_submission_has_a_hand_in_is_escaped() -> None:
    tags = Tags()
    tags.feed(page(made(EVIL)))
    assert tags.open == []
    assert not tags.seen & {"script", "img", "iframe", "link", "a", "object"}
    assert tags.attributes <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
        "style",
    } | {"aria-hidden"}


def test_it_says_points_and_reasons_and_no_more() -> None:
    text = page(made("plain words"))
    assert "1 of 4.5 points" in text and "0 of 2 points" in text and "not run" in text
    assert "secret" not in text and "plain words" in text


def test_a_page_for_what_could_not_be_read() -> None:
    text = page(SubmissionResult("x", "x.ipynb", problem="x.ipynb is no notebook."))
    assert "x.ipynb is no notebook." in text and "points" not in text.split("</style>")[1]
