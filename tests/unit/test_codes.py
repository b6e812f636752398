"""The codes of a class: one for each name, made from a secret that only the hub can read."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "docker" / "hub" / "codes.py"
SECRET = b"s" * 32


@pytest.fixture(scope="module")
def codes() -> ModuleType:
    """The hub's module, which stands in no package."""
    spec = importlib.util.spec_from_file_location("codes", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def let_in(codes: ModuleType, name: str, code: str) -> str | None:
    """Whom the hub lets in for a name and a code, as they were typed."""
    door = codes.Codes(secret=SECRET)
    found: str | None = asyncio.run(door.authenticate(None, {"username": name, "password": code}))
    return found


def test_a_code_fits_its_name_and_its_class_only(codes: ModuleType) -> None:
    code = codes.code_of(SECRET, "ada")
    assert re.fullmatch("[a-z2-7]{4}-[a-z2-7]{4}-[a-z2-7]{4}", code)
    assert let_in(codes, "ada", code) == "ada"
    assert let_in(codes, "bob", code) is None
    assert let_in(codes, "ada", codes.code_of(b"t" * 32, "ada")) is None
    assert let_in(codes, "ada", code[:-1]) is None
    assert let_in(codes, "ada", "") is None


def test_a_code_is_read_as_people_type_it(codes: ModuleType) -> None:
    code = codes.code_of(SECRET, "ada")
    for typed in (code.upper(), code.replace("-", ""), f" {code.replace('-', ' ')} "):
        assert let_in(codes, " Ada ", typed) == "ada"


@pytest.mark.parametrize("name", ["", "../ada", "ada/bob", "a" * 40, "9", "ädä"])
def test_a_name_that_could_be_something_else_is_refused(codes: ModuleType, name: str) -> None:
    """Names of containers, networks and volumes are made of it."""
    assert let_in(codes, name, codes.code_of(SECRET, name)) is None
    with pytest.raises(SystemExit, match="A name has up to 31 letters"):
        codes.main([name])


def test_the_secret_is_made_once_and_nobody_else_can_read_it(
    codes: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "class.secret"
    secret = codes.class_secret(file)
    assert len(secret) == 32
    assert codes.class_secret(file) == secret
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "codes" not in sys.modules
