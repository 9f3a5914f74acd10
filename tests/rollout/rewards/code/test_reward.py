"""Tests of the reward `code`: each form of label, in a real sandbox; and that what tests expect is
not where the code is."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from milescli.core.errors import MachineError, SandboxError
from milescli.recipe.rewards import CodeSettings
from milescli.rollout.contract import check_reward
from milescli.rollout.rewards.code import reward as module
from milescli.rollout.rewards.code.reward import Code, code
from milescli.sandbox.base import RunResult, Sandbox
from milescli.sandbox.choose import choose

ADD = {"asserts": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
SECRET = 271828182845904
"""Long, as addresses in memory are full of short numbers."""


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Sandbox:
    """Of this machine."""
    try:
        return choose().sandbox
    except MachineError as error:
        pytest.skip(str(error))


def _score(response: str, label: dict[str, Any], **settings: Any) -> float:
    reward = Code(CodeSettings(**settings))
    return asyncio.run(reward(prompt="", response=response, label=json.dumps(label)))


def test_it_bears_the_contract() -> None:
    assert check_reward(code, examples=code.examples) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "whole", "share"),
    [
        ("Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone.", 1.0, 1.0),
        ("print(3)", 0.0, 0.5),
        ("print(3)\nprint(7)", 0.0, 0.0),
        ("import sys\nprint(3)\nsys.exit(1)", 0.0, 0.0),
        ("not python", 0.0, 0.0),
        ("```python\n```", 0.0, 0.0),
        ("<think>print(1)</think>a, b = map(int, input().split()); print(f'{a + b} ')", 1.0, 1.0),
        ("a, b = map(int, input().split())\nprint(a + b)\nexit()", 1.0, 1.0),
    ],
)
def test_programs_are_held_to_what_they_print(response: str, whole: float, share: float) -> None:
    assert _score(response, SUM) == whole
    assert _score(response, SUM, score="share") == share


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("def f(x, y): return (x, y)", {"inputs": [[1, 2]], "outputs": [[1, 2]]}),
        (
            "class Solution:\n    def f(self, x): return x * 1.5",
            {"inputs": ["2"], "outputs": ["3.0"]},
        ),
        (
            "class Solution:\n    def f(self, x: List[int]) -> int: return heappop(x) + pow(2, 3)",
            {"inputs": [[[1]]], "outputs": [9]},
        ),
        ("def f(x): return x + x\nprint(f(1))\nquit()", {"inputs": [["1"]], "outputs": ["11"]}),
        ("def f(x): return {1: x}", {"inputs": [["a"]], "outputs": [{"1": "a"}]}),
        ("def f(): print('noise'); return None", {"inputs": [[]], "outputs": [None]}),
        ("def f(x): return x / 3", {"inputs": [[1]], "outputs": [0.333333333]}),
        ("def f(x): return x + 1", {"inputs": [[1]], "outputs": [[2]]}),
    ],
)
def test_functions_are_held_to_what_they_return(response: str, label: dict[str, Any]) -> None:
    assert _score(response, {"fn_name": "f", **label}) == 1.0
    assert _score("def f(*_): return 'x'", {"fn_name": "f", **label}) == 0.0


CLASS = "class S:\n    def __init__(s): s.x = []\n    def push(s, v): s.x.append(v); return s\n"


@pytest.mark.parametrize(
    ("response", "asserts"),
    [
        ("def f(x): return x", ["assert f(1) == 1 and f(2) == 2, 'message'"]),
        ("def f(x): return x / 3", ["assert abs(f(1) - 0.3333) < 1e-3"]),
        ("def f(x): return x", ["import math\nassert math.isclose(f(1.0), math.sqrt(1))"]),
        ("def f(x): return x", ["assert isinstance(f(1), int)", "assert list(map(f, [1])) == [1]"]),
        ("def f(x): return {1, 2}", ["assert f(0) == {2, 1}", "assert sorted(f(0)) == [1, 2]"]),
        ("def f(x): return (1, [b'x'])", ["assert f(0) == (1, [b'x'])"]),
        ("def f(x): return x", ["data = [1]\ndata.append(2)\nassert f(data) == [1, 2]"]),
        ("def f(x): x.sort()", ["data = [2, 1]\nf(data)\nassert data == [1, 2]"]),
        (CLASS, ["def test_it():\n    s = S()\n    s.push(1).push(2)\n    assert s.x == [1, 2]"]),
        (CLASS, ["from solution import S\nassert not S().x", "assert len(S().push(1).x) == 1"]),
        ("def f(x): return x", ["import solution\nassert solution.f(2) == 2"]),
        ("def f(x): return x", ["import math, main as m\nassert list(map(m.f, [2])) == [2]"]),
        (
            "def f(x): return x",
            ["from solution import f as g\ndef f(x): return 3\nassert g(2) == 2"],
        ),
        ("def sum(x): return -1", ["from main import sum\nassert sum([2]) == -1"]),
        ("def sum(x): return -1", ["import main\nassert main.sum([2]) == -1"]),
        ("def f(x): return x", ["import solution\nf = solution.f(2)\nassert f == 2"]),
        (
            "def f(x): return x",
            ["import solution\ndef run():\n    f = solution.f(2)\n    return f\nassert run() == 2"],
        ),
        (
            "def f(x): return x",
            ["import solution\nxs = [solution.f(f) for f in (1, 2)]\nassert xs == [1, 2]"],
        ),
        (
            "def f(x): return x",
            ["import solution\nassert hasattr(solution, 'f') and solution.f(2) == 2"],
        ),
        (
            "def solution(n): return n < 2 or n * solution(n - 1)",
            [
                "import solution\nfrom solution import *\nassert solution(3) == 6",
                "assert solution.solution(3) == 6",
            ],
        ),
        (
            "x = 0\ndef inc():\n    global x\n    x += 1",
            ["import solution\nsolution.inc()\nassert solution.x == 1"],
        ),
    ],
)
def test_asserts_hold_of_right_code_and_of_no_other(response: str, asserts: list[str]) -> None:
    assert _score(response, {"asserts": asserts}) == 1.0
    assert _score("def f(*_): return None\nS = None", {"asserts": asserts}) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "print('ok'); exit",
        "class E:\n    def __eq__(s, o): return True\ndef add(*_): return E()",
        "class I(int):\n    def __eq__(s, o): return True\ndef add(*_): return I(0)",
        "import builtins\nbuiltins.AssertionError = None\ndef add(*_): return 0",
        "import sys\nsys.settrace(lambda *_: None)\ndef add(*_): raise SystemExit",
        "import json\njson.dumps = lambda *_: 'true'\ndef add(*_): return 1",
        "def add(*_):\n    while True: pass",
    ],
)
def test_code_that_cheats_or_leaves_early_passes_nothing(response: str) -> None:
    assert _score(response, ADD, score="share", limit_s=1.0) == 0.0


SPY = f"""
import gc, glob, os, sys
def add(a, b):
    seen = [open(path, errors="replace").read() for path in glob.glob("**", recursive=True)]
    frame = sys._getframe()
    while frame:
        seen += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    seen += [repr(thing) for thing in gc.get_objects() if type(thing) in (list, dict, tuple)]
    seen += [repr(dict(os.environ)), repr(sys.argv), repr(sys.orig_argv)]
    own = "{SECRET - 1}"
    number = str(int(own) + 1)
    return int(number) if any(number in text for text in seen) else 0
"""


@pytest.mark.parametrize(
    "label",
    [
        {"asserts": [f"assert add(1, 2) == {SECRET}"]},
        {"asserts": [f"expected = {SECRET}\nassert add(1, 2) == expected"]},
        {"asserts": [f"def test_it():\n    assert {SECRET} == add(1, 2)"]},
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [SECRET]},
    ],
)
def test_what_is_expected_is_nowhere_near_the_code(label: dict[str, Any]) -> None:
    assert _score(SPY, label) == 0.0
    assert _score(f"def add(*_): return {SECRET}", label) == 1.0


def test_one_test_that_hangs_costs_its_own_share() -> None:
    hangs = "def add(a, b):\n    while a == 1: pass\n    return a + b"
    assert _score(hangs, ADD, score="share", limit_s=0.5) == 0.5


def test_a_label_without_tests_is_refused_before_the_run() -> None:
    assert code.check_label(None) and code.check_label("x") and code.check_label("[]")
    assert code.check_label(json.dumps(SUM)) is None


class Slow(Sandbox):
    """Each program runs for a second, as it says itself, and no time passes here."""

    kind = "slow"

    def __init__(self) -> None:
        self.limits: list[float] = []
        self.depth = 0

    async def run(self, code: str, **asked: Any) -> RunResult:
        self.limits.append(asked["limits"].wall_s)
        return RunResult(stdout="3", stderr="", exit_code=0, ended="exited", seconds=1.0)


def test_the_time_of_all_tests_is_the_codes_and_not_the_sandboxs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow()
    monkeypatch.setattr(module, "RemoteSandbox", lambda url: slow)
    label = {"inputs": ["1"] * 4, "outputs": ["3"] * 4}
    settings = {"url": "http://127.0.0.1:1", "score": "share", "limit_s": 1.5}
    assert _score("print(3)", label, total_s=4.0, **settings) == 1.0
    assert slow.limits == [1.5, 1.5, 1.5, 1.0], "each test at most what is left of all"
    assert _score("print(3)", label, total_s=1.5, **settings) == 0.5
    assert _score("print(3)", label, total_s=0.01, **settings) == 0.25


def test_a_value_that_python_reads_and_cannot_write_again_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nested(Slow):
        async def run(self, code: str, **asked: Any) -> RunResult:
            result = await super().run(code, **asked)
            mark, depth = json.loads(asked["files"]["steps.json"])["mark"], self.depth
            return replace(result, stdout=f"{mark} 0 {'[' * depth}{']' * depth}")

    sandbox = Nested()
    monkeypatch.setattr(module, "RemoteSandbox", lambda url: sandbox)
    for sandbox.depth in range(900, 1000):
        assert _score("add = 1", {"asserts": ["assert add == 3"]}, url="http://127.0.0.1:1") == 0.0


def test_a_sandbox_that_fails_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Slow):
        async def run(self, code: str, **asked: Any) -> RunResult:
            raise SandboxError("the sandbox did not respond", why="it had 90 s", fix="doctor")

    monkeypatch.setattr(module, "RemoteSandbox", lambda url: Broken())
    with pytest.raises(SandboxError):
        _score("print(3)", SUM, url="http://127.0.0.1:1")
