"""A package in a virtual environment of its own: installed to the end or not at all, on a Python
that it runs on. The package of these tests is a wheel that they write; nothing is downloaded."""

from __future__ import annotations

import ast
import fcntl
import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from milescli.agents.foreign import install as installing
from milescli.agents.foreign.install import find_interpreter, install
from milescli.agents.foreign.packages import (
    PACKAGES,
    PROGRAMS,
    Package,
    environments_dir,
    package_named,
)
from milescli.core.errors import MachineError, RecipeError
from milescli.core.pins import pin
from tests.test_layers import imports_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OfFile(Package):
    """Installed from a file."""

    wheel: str
    text: str
    """Of the program that runs there."""

    @property
    def requirements(self) -> list[str]:
        """See Package."""
        return [self.wheel]

    @property
    def program(self) -> Path:
        """See Package."""
        path = Path(self.wheel).with_suffix(".py")
        path.write_text(self.text, encoding="utf-8")
        return path


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where they are installed."""
    monkeypatch.setenv("MILES_ENVIRONMENTS", str(tmp_path / "environments"))
    return tmp_path


def package_of(folder: Path, *, wheel: str = "tiny-1.0-py3-none-any.whl", text: str) -> OfFile:
    """With a wheel that holds one module."""
    path = folder / "tiny-1.0-py3-none-any.whl"
    told = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
    kind = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {"tiny.py": "word = 'here'\n", "tiny-1.0.dist-info/METADATA": told}
    files |= {"tiny-1.0.dist-info/WHEEL": kind, "tiny-1.0.dist-info/RECORD": ""}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return OfFile(
        name="tiny",
        about="",
        use="",
        python=(3, 11),
        python_below=(3, 15),
        wheel=str(folder / wheel),
        text=text,
    )


def test_what_is_installed_to_the_end_counts_and_nothing_else_does(here: Path) -> None:
    said = list[str]()
    bad = package_of(here, text="import tiny, nothing_of_the_kind\n")
    with pytest.raises(MachineError) as caught:
        install(bad, python=sys.executable, say=said.append)
    assert "nothing_of_the_kind" in caught.value.why and bad.record is None
    assert "is not installed in" in (bad.lack or "")
    good = package_of(here, text="import tiny\nassert tiny.word == 'here'\n")
    done = install(good, python=sys.executable, say=said.append)
    assert not done.was_there and good.lack is None
    assert any("pip install" in line for line in said)
    ran = subprocess.run(
        [str(good.interpreter), "-c", "import tiny; print(tiny.word)"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert ran.stdout == "here\n"
    said.clear()
    again = install(good, python="nothing that is sent", say=said.append)
    assert again.was_there and not said and again.python == done.python
    record = good.folder / "installed.json"
    record.write_text(json.dumps({**(good.record or {}), "requirements": ["tiny==0.9"]}))
    assert "has tiny==0.9, and this miles works with" in (good.lack or "")


def test_a_folder_that_miles_did_not_make_stays_as_it_is(here: Path) -> None:
    package = package_of(here, text="")
    (package.folder / ".git").mkdir(parents=True)
    with pytest.raises(MachineError, match="cannot be installed in") as caught:
        install(package, python=sys.executable, say=lambda line: None)
    assert caught.value.fixes[0].startswith("export MILES_ENVIRONMENTS=/path/to/another/folder")
    assert [entry.name for entry in package.folder.iterdir()] == [".git"]


def test_what_pip_says_is_in_the_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = package_of(here, wheel="other-1.0-py3-none-any.whl", text="")
    with pytest.raises(MachineError) as caught:
        install(lacking, python=sys.executable, say=lambda line: None)
    assert "exit code 1; it printed last:" in caught.value.why
    assert "other-1.0-py3-none-any.whl" in caught.value.why
    assert caught.value.fixes == ["miles env install tiny   # starts over"]
    monkeypatch.setattr(installing, "VENV_TIMEOUT_S", 0.05)
    with pytest.raises(MachineError) as caught:
        install(lacking, python=sys.executable, say=lambda line: None)
    assert "it took longer than 0.05 s" in caught.value.why and lacking.record is None


def test_a_python_that_it_does_not_run_on_is_refused(here: Path) -> None:
    old = here / "python3"
    old.write_text("#!/bin/sh\necho 3 9 1\n")
    old.chmod(0o755)
    for python, why in ((str(old), "is 3.9.1"), (str(here / "none"), "cannot be started")):
        with pytest.raises(MachineError) as caught:
            find_interpreter(package_named("harbor"), python)
        assert why in caught.value.why and "from 3.12 and below 3.15" in caught.value.why
        assert "--python PATH" in caught.value.fixes[0]
    path, version = find_interpreter(package_named("verifiers"), None)
    assert path == sys.executable and version.startswith("3.")


def test_two_do_not_install_the_same_at_once(here: Path) -> None:
    package = package_of(here, text="")
    environments_dir().mkdir(parents=True)
    with package.folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MachineError, match="is installing"):
            install(package, python=None, say=lambda line: None)


def test_each_is_pinned_and_has_a_program() -> None:
    for package in PACKAGES:
        assert package.requirements == [f"{package.name}=={pin(package.name)}"]
        assert package.program.is_file()
    for program in PROGRAMS.glob("*.py"):  # nothing of miles is there
        imports = imports_of(ast.parse(program.read_text()), program.stem, is_package=False)
        assert not [one for one in imports if one.module.split(".")[0] == "milescli"]
    with pytest.raises(RecipeError, match="no package of environments `openev`") as caught:
        package_named("openev")
    assert caught.value.fixes == ["miles env install openenv"]
