"""`miles` in this process: exit code, stdout, stderr. Runtime modules may be replaced, because real
ones start engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from milescli.commands.app import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """With --json; before it there are lines of work that takes long on a busy machine."""
        return json.loads(self.out.splitlines()[-1])


Miles = Callable[..., Said]
Replace = Callable[..., None]


@pytest.fixture
def miles(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Miles:
    """Run a command line in an empty directory with an empty home."""
    for name, folder in (
        ("HOME", "home"),
        ("XDG_CONFIG_HOME", "home/config"),
        ("XDG_STATE_HOME", "state"),
    ):
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def run(*argv: str) -> Said:
        capsys.readouterr()
        code = main(list(argv))
        captured = capsys.readouterr()
        return Said(code=int(code), out=captured.out, err=captured.err)

    return run


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """`replace("milescli.runtime.launch", launch=function)`"""

    def put(module: str, **functions: object) -> None:
        stand_in = ModuleType(module)
        for name, function in functions.items():
            setattr(stand_in, name, function)
        monkeypatch.setitem(sys.modules, module, stand_in)

    return put
