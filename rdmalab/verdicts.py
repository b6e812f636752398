"""What a check says about a submission: the question to a kernel's judge, and its answer.

The judge runs in the submission's own process, so its answer is believed only with a seal: a
signature over question and answer with a secret that the kernel was told before any learner's code
ran (see ``hostside/judge.py``).
"""

from __future__ import annotations

import ast
import functools
import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import BackendError
from .hostside import checkcode

__all__ = ["Brief", "Judged", "Outcome"]

PATIENCE_S = 60.0

NO_SEAL = (
    "The kernel's answer does not come from its judge: the notebook has taken its place, or has"
    " changed what it needs."
)


@dataclass(frozen=True)
class Brief:
    """What a check needs to know of its lab.

    ``given``: the lab's own definitions on this host so far, as one source; they are made anew, so
    that none is the learner's. ``asked``: classes that a task asks for. Of the names that checks
    make, ``later`` are kept for later checks, ``carry`` taken over from earlier ones; ``keep`` are
    names of the notebook that a check may set there, as it would if it were run as a cell.
    """

    given: str = ""
    asked: Sequence[str] = ()
    carry: Sequence[str] = ()
    later: Sequence[str] = ()
    keep: Sequence[str] = ()


BARE = Brief()


@dataclass(frozen=True)
class Outcome:
    """How a check ended. ``ended``: ``ok``, ``raised`` or ``refused`` (it could not be judged).

    ``why``: the sentence of the failed assertion, or the error, or why not; ``printed``: what the
    check printed, up to 64 Ki characters.
    """

    ended: str
    why: str = field(default="")
    printed: str = field(default="")

    @property
    def passed(self) -> bool:
        """Whether the check ran to its last statement."""
        return self.ended == "ok"


@functools.lru_cache(maxsize=256)
def outline(source: str, given: str) -> dict[str, Any]:
    """What the judge needs to know of a check's source and of the lab's definitions, as JSON.

    ``given``: the definitions one by one, ``defined``: their names; ``made``: the names that the
    check makes, ``reads``: those that it takes from the notebook or from earlier checks;
    ``packages``: what is imported. Worked out here, where it takes no emulated processor's time.
    """
    check, lab = checkcode.parse(source), checkcode.parse(given)
    defined = checkcode.bound(lab)
    return {
        "source": source,
        "given": [ast.unparse(node) for node in lab.body],
        "defined": sorted(defined),
        "made": sorted(checkcode.bound(check)),
        "reads": sorted(checkcode.reached(check, lab) - defined - checkcode.imported(check)),
        "packages": sorted(checkcode.modules_of(check) | checkcode.modules_of(lab)),
    }


def question(source: str, brief: Brief) -> str:
    """A check as its judge is asked. :class:`~rdmalab.hostside.checkcode.CheckError` if it is none.

    No two are alike, so that an old answer is none to a new question.
    """
    lists = {name: list(getattr(brief, name)) for name in ("asked", "carry", "later", "keep")}
    return json.dumps({"token": secrets.token_hex(16), **outline(source, brief.given), **lists})


class Judged:
    """What asks a kernel's judge: a part of :class:`~rdmalab.kernels.HostKernel`."""

    secret: bytes | None = None  # of the judge in the kernel that runs now

    if TYPE_CHECKING:  # HostKernel has it

        def request(self, kind: str, content: Any, buffers: Any, limit: Any, output: Any) -> Any:
            """One request on the shell channel, and its reply."""

    def guard(self, timeout_s: float = PATIENCE_S) -> None:
        """Give this kernel its judge, who must be there before any learner's code.

        Raises ``BackendError`` for a lab that was started without judges.
        """
        secret = secrets.token_bytes(32)
        reply = self.request("rdmalab_judge_request", {"secret": secret.hex()}, [], timeout_s, None)
        if reply["content"].get("status") != "ok":
            raise BackendError("This lab has no judges: only one with a desk has.")
        self.secret = secret

    def check(
        self, source: str, brief: Brief = BARE, *, timeout_s: float | None = PATIENCE_S
    ) -> Outcome:
        """Judge a check where the submission ran.

        Raises what :meth:`~rdmalab.kernels.HostKernel.run` raises when the kernel is busy, does
        not finish in time or ends.
        """
        if self.secret is None:
            self.guard()
        assert self.secret is not None
        try:
            text = question(source, brief)
        except checkcode.CheckError as error:
            return Outcome("refused", str(error))
        secret = self.secret
        reply = self.request("rdmalab_check_request", {"text": text}, [], timeout_s, None)
        return opened(secret, text, reply["content"])


def opened(secret: bytes, text: str, content: Any) -> Outcome:
    """The outcome that a reply tells, if its seal is good."""
    parts = [content.get(name) for name in ("ended", "why", "printed", "seal")]
    if not all(isinstance(part, str) for part in parts):
        return Outcome("refused", NO_SEAL)
    ended, why, printed, seal = parts
    words = "\0".join((text, ended, why, printed)).encode(errors="replace")
    if not hmac.compare_digest(hmac.digest(secret, words, "sha256").hex(), seal):
        return Outcome("refused", NO_SEAL)
    return Outcome(ended, why, printed)
