"""The reward `code` runs the program in a response on tests, in a sandbox. The values that the
tests expect are never sent there."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from milescli.core.files import parse_json
from milescli.recipe.rewards import CodeSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards.code.asserts import Ungradable
from milescli.rollout.rewards.code.label_tests import (
    Asserts,
    Calls,
    Programs,
    Tests,
    names_of,
    read_label,
    same_output,
    same_value,
)
from milescli.rollout.rewards.code.remote_sandbox import RemoteSandbox
from milescli.rollout.rewards.extraction import code_of
from milescli.sandbox.base import Limits, Sandbox
from milescli.sandbox.choose import choose

_MIB = 1024**2
_OUTPUT_BYTES = 8 * _MIB
_START_S = 2.0
"""Time for the harness to start, beyond what the tests may take."""


class Code:
    r"""Returns 1.0 if the code of the response passes all tests of the label, else 0.0; with
    `rollout.code.score: share`, the share of tests that it passes. It runs in a sandbox
    (docs/sandbox.md).

    The code is the last fenced Python block that defines the tested function (or class); for whole
    programs, the last block that reads input or is a program; without blocks, the whole response.
    Thinking does not count, nor do blocks after the solution, such as an example of its use or its
    output. `class Solution` may use the names that LeetCode imports. The label is JSON: `{"inputs":
    [...], "outputs": [...]}`, the text that whole programs read and print (compared by lines;
    numbers with decimals may differ by 1e-6); with `"fn_name": "f"`, the arguments and results of a
    function, or of a method of `Solution`; or `{"asserts": [...]}`, statements and test functions.
    The expected values are compared outside of the sandbox, or in another one. A test fails if the
    code ends before it, takes too long (`rollout.code.limit_s` for a test, `total_s` for all) or
    too much memory.

    >>> label = '{"fn_name": "add", "inputs": [[1, 2], [0, 0]], "outputs": [3, 0]}'
    >>> right = "```python\ndef add(a, b):\n    return a + b\n```"
    >>> score(label=label, response=right + "\nIt is used so:\n```python\nadd(1, 2)\n```")
    1.0
    >>> score(label=label, response="def add(a, b): return a - b")
    0.0
    >>> score(label=label, response="def add(a, b): return a - b", code={"score": "share"})
    0.5
    >>> score(label='{"inputs": ["1 2"], "outputs": ["3"]}', response="print(3)")
    1.0
    >>> score(label='{"asserts": ["assert add(1, 2) == 3"]}', response=right)
    1.0
    >>> score(label=label, response="<think>" + right + "</think> I do not know.")
    0.0
    """

    needs_label = True
    scores_groups = False
    examples = (
        ("Add.", "```python\na, b = map(int, input().split())\nprint(a + b)\n```",
         '{"inputs": ["1 2"], "outputs": ["3"]}'),
        ("Add.", "def add(a, b): return a - b", '{"asserts": ["assert add(1, 2) == 3"]}'),
        ("Add.", "", '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}'),
    )  # fmt: skip

    def __init__(self, settings: CodeSettings) -> None:
        self.settings = settings
        self.max_concurrency = settings.concurrency or len(os.sched_getaffinity(0))

    def with_settings(self, rollout: Rollout) -> Code:
        """Return the reward with the recipe's settings. Raises RecipeError if they are invalid."""
        return Code(rollout.code)

    async def __call__(self, *, prompt: str, response: str, label: str | None) -> float:
        """Score one response; see the class. Raises ValueError if the label cannot be graded,
        MachineError if there is no sandbox, SandboxError if it fails."""
        tests = read_label(label)
        code = code_of(response, names=names_of(tests))
        if not code.strip():
            return 0.0
        sandbox = await asyncio.to_thread(self._sandbox)
        passed = await self._passed(tests, code, sandbox)
        return float(all(passed)) if self.settings.score == "all" else sum(passed) / len(passed)

    async def score(
        self, *, prompt: str, response: str, label: str | None, timeout_s: float
    ) -> float:
        """Score one response (BoundedReward); its own settings bound the call."""
        return await self(prompt=prompt, response=response, label=label)

    def check_label(self, label: str | None) -> str | None:
        """Return why no response can be correct, or None. Raises MachineError without a sandbox, so
        that a run does not begin."""
        self._sandbox()
        try:
            read_label(label)
        except Ungradable as error:
            return str(error)
        return None

    def _sandbox(self) -> Sandbox:
        if self.settings.url:
            return RemoteSandbox(self.settings.url)
        return choose(packages=self.settings.packages).sandbox

    async def _passed(self, tests: Tests, code: str, sandbox: Sandbox) -> list[bool]:
        if isinstance(tests, Programs):
            return await self._run_programs(tests, code, sandbox)
        if isinstance(tests, Calls):
            steps = [{"call": tests.name, "args": arguments} for arguments in tests.inputs]
            values = await self._run_steps(steps, code, sandbox)
            wanted = enumerate(tests.outputs)
            return [
                place in values
                and (same_value(values[place], one) or values[place] == tests.texts[place])
                for place, one in wanted
            ]
        return await self._run_asserts(tests, code, sandbox)

    async def _run_programs(self, tests: Programs, code: str, sandbox: Sandbox) -> list[bool]:
        """Run the tests one after the other, as many responses run at once. The sandbox's own start
        does not count as the code's time."""
        passed, left_s = list[bool](), self.settings.total_s
        for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
            if left_s <= 0:
                return [*passed, *[False] * (len(tests.inputs) - len(passed))]
            limits = self._limits(min(self.settings.limit_s, left_s))
            result = await sandbox.run(code, stdin=stdin, limits=limits)
            left_s -= result.seconds
            passed.append(
                result.ended == "exited"
                and result.exit_code == 0
                and same_output(result.stdout, expected)
            )
            if not passed[-1] and self.settings.score == "all":
                break
        return passed

    async def _run_asserts(self, tests: Asserts, code: str, sandbox: Sandbox) -> list[bool]:
        values = await self._run_steps(tests.split.response_steps, code, sandbox)
        steps, asserts = list[dict[str, Any]](), list[int | None]()
        for step in tests.split.judge_steps:
            if "judge" not in step:
                steps.append(step)
            elif all(place in values for place in step["values"].values()):
                asserts.append(len(steps))
                filled = {name: values[place] for name, place in step["values"].items()}
                steps.append({"judge": step["judge"], "values": filled})
            else:
                asserts.append(None)
        if all(place is None for place in asserts):
            return [False] * len(asserts)
        try:
            verdicts = await self._run_steps(steps, None, sandbox)
        except RecursionError:  # Python read a deeply nested value, but cannot write it again
            return [False] * len(asserts)
        return [place is not None and verdicts.get(place) is True for place in asserts]

    async def _run_steps(
        self, steps: list[dict[str, Any]], code: str | None, sandbox: Sandbox
    ) -> dict[int, Any]:
        """Return the value of each step, by its index; steps without a value are missing."""
        mark = secrets.token_hex(8)
        asked = {"mark": mark, "limit_s": self.settings.limit_s, "steps": steps}
        files = {"steps.json": json.dumps(asked)}
        if code is not None:
            files["solution.py"] = code
        seconds = min(self.settings.total_s, self.settings.limit_s * (len(steps) + 1))
        result = await sandbox.run(_harness(), files=files, limits=self._limits(seconds + _START_S))
        values = dict[int, Any]()
        for line in result.stdout.split("\n"):
            words = line.split(" ", 2)
            if len(words) == 3 and words[0] == mark and words[1].isdecimal():
                try:
                    values[int(words[1])] = parse_json(words[2])
                except ValueError:
                    continue
        return values

    def _limits(self, wall_s: float) -> Limits:
        return Limits(
            wall_s=wall_s,
            cpu_s=wall_s,
            memory_bytes=self.settings.memory_mib * _MIB,
            output_bytes=_OUTPUT_BYTES,
        )


@cache
def _harness() -> str:
    return Path(__file__).with_name("harness.py").read_text(encoding="utf-8")


code = Code(CodeSettings())
"""The built-in reward `code`."""
