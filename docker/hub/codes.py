"""A code for each learner, computed from the class's secret; nobody signs up, no list is kept.

::

    docker compose --file docker/hub/compose.yaml exec hub python3 -m codes ada bob

prints slips to hand out; one more for a latecomer is the same command. A code fits its name only.
Without the secret (``class.secret`` beside the hub's database) no code can be made; a new secret
makes all codes invalid.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any

from jupyterhub.auth import Authenticator
from traitlets import Bytes

__all__ = ["Codes", "class_secret", "code_of"]

SECRET = Path("/srv/hub/class.secret")
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
CODE_CHARS = 12  # of base32: 60 bits


def class_secret(file: Path = SECRET) -> bytes:
    """The class's secret, made at the first need; only this user can read it."""
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(secrets.token_bytes(32))
    except FileExistsError:
        pass
    return file.read_bytes()


def code_of(secret: bytes, name: str) -> str:
    """The code of a learner, as three groups of four letters and digits."""
    digest = hmac.new(secret, name.encode(), hashlib.sha256).digest()
    text = base64.b32encode(digest).decode().lower()[:CODE_CHARS]
    return "-".join(re.findall("....", text))


class Codes(Authenticator):
    """Lets in who has the code that belongs to the name."""

    secret = Bytes(help="The class's secret.").tag(config=True)

    async def authenticate(self, handler: Any, data: dict[str, str]) -> str | None:
        """The learner's name, or None where the code is not that name's."""
        name = self.normalize_username(data["username"].strip())
        wanted = code_of(self.secret, name).replace("-", "")
        given = re.sub(r"[\s-]", "", data["password"]).lower()
        right = hmac.compare_digest(wanted.encode(), given.encode())
        return name if right and NAME.fullmatch(name) else None


def main(names: list[str]) -> None:
    """Print a slip for each name; refuse those that a hub would not take."""
    wrong = [name for name in names if not NAME.fullmatch(name)]
    if wrong or not names:
        sys.exit(
            f"codes: {', '.join(wrong) or 'no name given'}. A name has up to 31 letters a-z, digits"
            " and -, and begins with a letter. For example: python3 -m codes ada bob"
        )
    secret = class_secret()
    for name in names:
        print(f"{name:<32}{code_of(secret, name)}")


if __name__ == "__main__":
    main(sys.argv[1:])
