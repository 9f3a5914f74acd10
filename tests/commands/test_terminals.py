"""Every verb prints something on every terminal: whatever its encoding, its width and the script of
what users wrote, no command fails because of a character."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.commands.app import main
from milescli.core.events import Notice, to_record
from milescli.recipe.load import load
from milescli.recipe.resolved import resolved_yaml
from tests.commands.conftest import Miles
from tests.commands.test_status import planted
from tests.end_to_end.runs import ROOT
from tests.insight.planted import Planted

TEXT = "2 加 3 等于几🤖 naïve “q” «x» Сколько"
VERBS = (
    ("data", "check", "数据.jsonl"),
    ("data", "check", "数据.jsonl", "--json"),
    ("data", "check", "没有🤖.jsonl"),
    ("data", "check", "对话.jsonl"),
    ("runs",),
    ("runs", "--json"),
    ("status", "运行"),
    ("status", "运行", "--json"),
    ("why", "运行"),
    ("export", "运行", "--to", "出口"),
    ("report", "运行", "--to", "报告.html"),
    ("resume", "没有"),
    ("eval", "没有"),
    ("profile", "运行"),
    ("launch", "--recipe", "quickstart", "--name", "名字", "--dry-run"),
    ("launch", "--recipe", "quickstart", "--set", "data.prompts=数据.jsonl", "--dry-run", "-v"),
    ("launch", "--recipe", "坏.yaml", "--dry-run"),
    ("launch", "--recipe", "没有🤖", "--dry-run"),
    ("convert", "hf-to-megatron", "没有", "出口"),
    ("recipes",),
    ("models",),
    ("algorithms",),
    ("plugins",),
    ("envs",),
    ("tools",),
    ("help", "rewards"),
    ("doctor", "--help"),
    ("🤖",),
    (),
)
"""Those that work, and those that are refused with what the user wrote."""
TERMINALS: dict[str, tuple[str, bool, dict[str, str]]] = {
    "ascii": ("ascii", False, {}),
    "latin-1": ("latin-1", False, {}),
    "cp1252": ("cp1252", False, {}),
    "gbk terminal": ("gbk", True, {"TERM": "xterm"}),
    "narrow ascii terminal": ("ascii", True, {"TERM": "xterm-256color", "COLUMNS": "40"}),
    "dumb": ("ascii", True, {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "40"}),
    "utf-8": ("utf-8", True, {"TERM": "xterm"}),
}
"""Name -> (encoding, whether it is a terminal, environment)."""


class Screen(io.TextIOWrapper):
    """A stream that says that it is a terminal, or not."""

    def __init__(self, encoding: str, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def shown(self) -> str:
        """What was printed. Raises UnicodeDecodeError where that is not of the encoding."""
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


@pytest.fixture
def files(miles: Miles) -> None:
    """What users wrote in their own scripts, and a run with such a name."""
    rows = [{"prompt": f"{TEXT} {number}", "label": "五"} for number in range(3)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path("数据.jsonl").write_text(lines, encoding="utf-8")
    turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "ответ ✓"}]
    line = json.dumps({"messages": turns}, ensure_ascii=False)
    Path("对话.jsonl").write_text(line + "\n", encoding="utf-8")
    Path("坏.yaml").write_text("description: 描述\n数据: 1\n", encoding="utf-8")
    run = RunDir(planted("运行", Planted()))
    with run.events_file.open("a", encoding="utf-8") as events:
        said = to_record(Notice(text=TEXT, level="warning"))
        events.write(json.dumps(said, ensure_ascii=False) + "\n")
    loaded = load("quickstart", environ={}, cwd=Path.cwd(), home=Path.cwd())
    run.recipe_file.write_text(resolved_yaml(loaded), encoding="utf-8")


@pytest.fixture
def on_screen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run a verb on a terminal: exit code, stdout, stderr."""

    def run(terminal: str, verb: tuple[str, ...]) -> tuple[int, str, str]:
        encoding, is_terminal, environment = TERMINALS[terminal]
        out, err = Screen(encoding, is_terminal), Screen(encoding, is_terminal)
        for name in ("NO_COLOR", "COLUMNS", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        return int(main(list(verb))), out.shown, err.shown

    return run


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_verb_says_the_same_on_every_terminal(on_screen, verb: tuple[str, ...]) -> None:
    shown = {terminal: on_screen(terminal, verb) for terminal in TERMINALS}
    expected = shown["utf-8"][0]
    assert expected != 70
    for terminal, (code, out, err) in shown.items():
        assert code == expected, (terminal, out, err)
        assert out or err, terminal
        assert "Traceback (most recent" not in out + err
        if "--json" in verb:
            assert all(isinstance(json.loads(line), dict) for line in out.splitlines())


@pytest.mark.usefixtures("files")
def test_programs_lose_nothing_and_people_see_a_mark(on_screen) -> None:
    out = on_screen("ascii", ("data", "check", "数据.jsonl", "--json"))[1]
    assert "\\u6570\\u636e.jsonl" in out and json.loads(out.splitlines()[-1])
    err = on_screen("latin-1", ("data", "check", "没有é🤖.jsonl"))[2]
    assert "??é?.jsonl" in err


STRICT = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Names of files and arguments are ASCII too, as are files that are opened without an encoding."""


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("verb", [VERBS[0], VERBS[2], VERBS[6]], ids=" ".join)
@pytest.mark.parametrize(
    "environment", [STRICT, {"PYTHONIOENCODING": "cp1252", "HOME": ""}], ids=["C", "cp1252"]
)
def test_a_process_without_utf_8_prints_too(
    verb: tuple[str, ...], environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "milescli", *verb],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == (6 if "没有🤖.jsonl" in verb else 0) or done.returncode == 3
    assert (done.stdout or done.stderr) and b"Traceback" not in done.stderr
