"""Finding parts by name or import path."""

from typing import Literal

import pytest

from rl_tpu.errors import UserError
from rl_tpu.registry import check_options, describe, lookup

KNOWN = {"decoder": "json:JSONDecoder", "dumps": "json:dumps"}


def test_names_and_import_paths():
    import json

    assert lookup("thing", "dumps", KNOWN) is json.dumps
    assert lookup("thing", "json:loads", KNOWN) is json.loads
    assert lookup("thing", "json:JSONDecoder.decode", KNOWN) is json.JSONDecoder.decode


def test_modules_in_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "module_of_a_user.py").write_text("VALUE = 5\n")
    monkeypatch.setattr("sys.path", ["/nowhere"])
    monkeypatch.chdir(tmp_path)
    assert lookup("thing", "module_of_a_user:VALUE", {}) == 5


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import no_such_dependency\n", "No module named 'no_such_dependency'"),
        ("x = = 1\n", "SyntaxError"),
        ("\n1 / 0\n", "ZeroDivisionError: division by zero at {path}:2"),
    ],
)
def test_module_that_fails_to_import(tmp_path, monkeypatch, source, expected):
    path = tmp_path / "broken_module_of_a_user.py"
    path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        lookup("thing", "broken_module_of_a_user:f", {})
    assert expected.format(path=path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dump", "unknown thing 'dump', did you mean 'dumps'? (known: decoder, dumps); your own"),
        ("xyz", "unknown thing 'xyz' (known: decoder, dumps)"),
        ("json:", "unknown thing"),
        (":dumps", "unknown thing"),
        ("no_such_package.module:f", "no module 'no_such_package'"),
        ("json.no_such:f", "no module 'json.no_such'"),
        ("json:dump_s", "did you mean 'dumps'"),
    ],
)
def test_unknown_names(name, expected):
    with pytest.raises(UserError) as error:
        lookup("thing", name, KNOWN)
    assert expected in str(error.value)


def reward(text, answer, *, kind: str = "a", limit: int | None = None, **_others):
    return 0.0


def test_options():
    given = ("text", "answer")
    check_options("reward", "r", reward, given, {"kind": "b", "limit": 3})
    check_options("reward", "r", reward, given, {"anything": 3})
    with pytest.raises(UserError, match=r"option limit.*valid integer.*'many'"):
        check_options("reward", "r", reward, given, {"limit": "many"})
    with pytest.raises(UserError, match="text"):
        check_options("reward", "r", reward, given, {"text": "x"})
    with pytest.raises(UserError, match="not callable"):
        check_options("reward", "r", "a string", given, {})


def test_describe_prefers_the_users_file():
    with pytest.raises(UserError) as error:
        check_options("reward", "r", "a string", (), {})
    assert "registry.py:" in describe(error.value)
    assert f"{__file__}:" in describe(error.value, __file__)


class Base:
    def __init__(self, given, *, limit: int = 3, kind: Literal["a", "b"] = "a"):
        self.limit, self.kind = limit, kind


class Extended(Base):
    def __init__(self, given, extra: float = 0.5, **common):
        super().__init__(given, **common)


class Plain:
    def __init__(self, given, **anything):
        self.anything = anything


def test_a_constructor_that_hands_options_on_has_those_of_its_base():
    check_options("thing", "t", Extended, ["given"], {"extra": 1.0, "limit": 4, "kind": "b"})
    with pytest.raises(UserError, match=r"'limt', did you mean 'limit'\?; its options: extra, limit, kind"):
        check_options("thing", "t", Extended, ["given"], {"limt": 4})
    with pytest.raises(UserError, match=r"thing 't', option kind: .*'a' or 'b'; it is 'c'"):
        check_options("thing", "t", Extended, ["given"], {"kind": "c"})
    check_options("thing", "t", Plain, ["given"], {"whatever": 1})  # it has them for itself
