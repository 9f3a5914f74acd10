"""No test waits for a fixed time, and none bounds by less than a minute what must come: a machine
that is busy makes liars of both. Tests wait by `tests/waiting.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
LEAST_BOUND_S = 60.0
"""A sleep of so long is what hangs, which its test ends."""
PACED = "a model or a reward that takes a while to answer: more is harmless"
RECORDED = "it records for so long"
MIDDLE = "somewhere in the middle of a response, wherever that is"
LISTENED = "the bound that it tests: nothing comes within it"
ALLOWED = {
    "agents/test_environment.py::_episode": PACED,
    "agents/user_environments.py::hang_here": "it hangs, and its line is to be named",
    "backends/ray/test_node_processes.py::_episode": PACED,
    "backends/sglang/inside/test_adapter.py::main": MIDDLE,
    "backends/sglang/launch/test_server.py::die_in_the_middle": MIDDLE,
    "backends/sglang/launch/test_server.py::"
    "test_a_record_has_the_stacks_of_a_process_and_is_the_owners_alone": RECORDED,
    "backends/sglang/launch/test_server.py::"
    "test_of_a_process_that_is_gone_the_error_is_told": RECORDED,
    "backends/sglang/test_replacing.py::main": MIDDLE,
    "backends/sglang/weights/two_ranks.py::dawdle": "a rank that is later than the other",
    "backends/sglang/client/test_http.py::use": LISTENED,
    "doctor/test_finding.py::heavy": PACED,
    "fake_run.py::": "it is drawn for somebody to look at",
    "profiling/test_traces.py::"
    "test_a_trace_of_torch_is_split_into_what_was_done": "the pause is what is measured",
    "rollout/rewards/bad_rewards.py::batched": PACED,
    "rollout/rewards/bad_rewards.py::good_async": PACED,
    "rollout/rewards/bad_rewards.py::slow": PACED,
    "rollout/rewards/served/test_judge.py::replies": PACED,
    "rollout/rewards/test_processes.py::run": "a call that begins just before another's bound",
    "rollout/rewards/test_scoring.py::__call__": PACED,
    "runtime/recovery/test_engine_keepers.py::work": "looks that follow each other",
    "sandbox/test_local.py::cancelled": LISTENED,
    "trackers/test_background.py::"
    "test_a_queue_that_is_full_takes_no_more_and_nobody_waits": LISTENED,
    "web/browser/test_trouble.py::test_news_do_not_end_a_slow_answer": "news come twice a second",
    "web/test_app.py::call": "time for one too many",
    "workers/test_async_worker.py::play": "the second for which a kind of call counts as slow",
}
"""Function -> why it sleeps, or has a bound that is met."""
WAITS = ("wait", "join", "result", "wait_for", "timeout", "communicate", "wait_procs")


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Each call with the name of the function that it stands in."""
    left: list[tuple[str, ast.AST]] = [("", tree)]
    while left:
        inside, node = left.pop()
        if isinstance(node, ast.Call):
            yield inside, node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.name
        left += [(inside, below) for below in ast.iter_child_nodes(node)]


def _seconds(node: ast.AST | None, constants: dict[str, float]) -> float | None:
    """A number as it stands there, or that of a constant of the file."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def _shortest(file: Path) -> Iterator[tuple[str, str]]:
    """(function, call) of each wait of a file that is fixed or bounded by less than a minute."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    constants = {
        target.id: float(node.value.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for name, call in _calls(tree):
        called = ast.unparse(call.func).rpartition(".")[2]
        names = ("timeout", "within_s" if called.startswith("until") else "")
        bounds = [word.value for word in call.keywords if word.arg in names]
        if isinstance(call.func, ast.Attribute) and called in ("sleep", *WAITS):
            bounds += call.args
        seconds = [_seconds(bound, constants) for bound in bounds]
        if any(bound is not None and 0 < bound < LEAST_BOUND_S for bound in seconds):
            yield name, ast.unparse(call)


def test_no_test_waits_for_a_fixed_time_nor_bounds_what_must_come_by_less_than_a_minute() -> None:
    found = {
        f"{file.relative_to(HERE)}::{name}": call
        for file in sorted(HERE.rglob("*.py"))
        if file.relative_to(HERE).as_posix() != "waiting.py" and not _hurts(file)
        for name, call in _shortest(file)
    }
    assert {where: call for where, call in found.items() if where not in ALLOWED} == {}
    assert not {*ALLOWED} - {*found}, "they wait no more"


def _hurts(file: Path) -> bool:
    """True of the program that hurts real runs at moments that it draws (`make chaos`)."""
    return file.parent.name == "chaos" and not file.name.startswith("test_")
