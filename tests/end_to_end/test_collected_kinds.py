"""Every kind of episode is played by processes that collect, and no number of a run differs from
the run that plays it in the driver: not where it was killed and resumed, nor where such a process
died."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.chaos.oracle import OF_ENGINES
from tests.end_to_end.runs import (
    ROOT,
    Finished,
    Workplace,
    actor_of,
    learned,
    processes_of_run,
    saved,
    step_done,
    wait_until_gone,
)
from tests.end_to_end.test_agents import WORKED
from tests.end_to_end.test_reward_model import train_judge
from tests.shared_memory import forgotten

SHORT = ["train.steps=4", "checkpoint.every=2", "eval.num_prompts=2"]
COLLECTORS = ["machine.collectors=2"]
GAME = [
    "rollout.agent=environment",
    "rollout.environment={name: 'tests.end_to_end.agents:Letters', processes: 2}",
    "data.prompts=task:seeds",
    "data.eval=task:seeds-heldout",
    "rollout.max_turn_tokens=8",
    "rollout.max_response_tokens=128",
    "train.advantage=gigpo",
]
SERVER = f"[{sys.executable}, {ROOT / 'tests/agents/mcp_program.py'}]"
CALLED = [
    "rollout.agent=tools",
    f"rollout.mcp={{sums: {{command: {SERVER}, tools: [add]}}}}",
    "rollout.reward=gsm8k",
    "data.prompts=added.jsonl",
    "data.demonstrations=added.jsonl",
    "data.eval=null",
    "rollout.max_response_tokens=128",
    "data.max_prompt_tokens=256",
    "warmup.steps=60",
    "warmup.lr=1e-2",
]
DIALOGUE = [
    "rollout.agent=tests.end_to_end.agents:dialogue",
    "rollout.max_response_tokens=128",
    "rollout.reward=tests.end_to_end.rewards:variety",
]
SCORED = [
    "model.scratch.vocabulary=task:sums-mistakes",
    "rollout.reward={reward_model: 1.0, 'tests.end_to_end.rewards:variety': 0.5}",
    "rollout.reward_model.path=runs/judge",
    "rollout.generation=tests.end_to_end.pieces:twice",
]
"""By a reward model that `judge` trained; responses are made by a function of the user's."""
ROLES = [
    "rollout.agent=multi_agent",
    "rollout.roles={teller: {prompt: Tell., sees: prompt, policy: whole@0}, critic: {prompt: Judge."
    ", reward: 'tests.end_to_end.rewards:variety'}, solver: {prompt: Add.}}",
    "rollout.stop=[a, e, o, t, '1']",
    "rollout.max_turn_tokens=32",
    "rollout.max_response_tokens=192",
    "data.max_prompt_tokens=96",
    "data.demonstrations=null",
    "warmup.steps=0",
    "engines.num=2",
]
KINDS = {"game": GAME, "called": CALLED, "dialogue": DIALOGUE, "scored": SCORED, "roles": ROLES}
DYING = {
    "scored": ("reward model", "reward-model.log", "ray::"),
    "roles": ("engine 1", "engine-1-server.log", "sglang::scheduler"),
}
"""What else is killed: its name, its log, and a mark of its command line."""


def _words(sets: list[str]) -> list[str]:
    return [word for setting in [*SHORT, *sets] for word in ("--set", setting)]


def _write_calls(workplace: Workplace) -> None:
    """The row that `called` learns from: a call, its result, an answer."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 9}}}
    worked = [{**WORKED[0], "tool_calls": [call]}, {**WORKED[1], "name": "add"}, WORKED[2]]
    row = {"prompt": "What is 3 + 9?", "label": "12", "demonstration": worked}
    (workplace.folder / "added.jsonl").write_text(json.dumps(row) + "\n")


def _reports(workplace: Workplace, name: str) -> dict[int, tuple[dict, dict]]:
    """Of each step as it was done last, without seconds and the last bits of the engines'
    log-probs, which choose no token."""
    reports = {}
    for step in workplace.steps(name):
        report, rollout = learned(step)
        figures = {key: x for key, x in rollout["figures"].items() if not key.endswith("_s")}
        own = {key: x for key, x in report.items() if key not in OF_ENGINES}
        reports[step["step"]] = own, {**rollout, "figures": figures}
    return reports


def _samples(workplace: Workplace, name: str, step: int) -> list[dict]:
    """Those of a step that are kept, without seconds."""
    samples = workplace.samples(name, step)
    for sample in samples:
        episode = sample.get("episode", {})
        sample["episode"] = {k: x for k, x in episode.items() if not k.endswith("_s")}
    return samples


def _hurt(workplace: Workplace, kind: str) -> Finished:
    """A run whose driver is killed after step 2 was saved, and one of whose processes is killed
    when it was resumed."""
    name, sets = f"{kind}-apart", KINDS[kind]
    command = ("launch", "--recipe", "tiny.yaml", "--name", name, *_words([*sets, *COLLECTORS]))
    launched = workplace.start(*command)
    for happened in (saved(2), step_done(2)):
        workplace.wait_for(name, happened, launched)
    ours = processes_of_run(launched.pid)
    launched.send_signal(signal.SIGKILL)
    workplace.finish(launched)
    assert not wait_until_gone(ours)
    before = len(workplace.events(name))
    resumed = workplace.start("resume", name)
    workplace.wait_for(name, step_done(3), resumed, after=before)
    actor_of(resumed.pid, "collector-1.log").kill()
    if kind in DYING:
        _, log, mark = DYING[kind]
        actor_of(resumed.pid, log, mark=mark).kill()
    return workplace.finish(resumed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_episode_has_the_numbers_of_a_run_without_processes(
    workplace: Workplace, shared_memory: set[str], kind: str, request: pytest.FixtureRequest
) -> None:
    if kind == "scored":
        train_judge(workplace)
    elif kind == "called":
        _write_calls(workplace)
    elif kind == "roles":
        request.getfixturevalue("whole")
    launch = ("launch", "--recipe", "tiny.yaml", "--name", f"{kind}-alone", *_words(KINDS[kind]))
    finished = workplace.miles(*launch)
    assert finished.code == 0, finished
    finished = _hurt(workplace, kind)
    assert finished.code == 0, finished
    assert not forgotten(shared_memory)
    reports = _reports(workplace, f"{kind}-alone")
    assert _reports(workplace, f"{kind}-apart") == reports
    assert any(report["grad_norm"] > 0 for report, _ in reports.values()), "nothing was learned"
    if kind == "dialogue":
        figures = [rollout["figures"] for _, rollout in reports.values()]
        assert all(each["has_secret"] == 1.0 for each in figures), "as any code of the user's"
    for step in (1, 4):
        ours = _samples(workplace, f"{kind}-apart", step)
        assert ours == _samples(workplace, f"{kind}-alone", step)
    folders = [workplace.export(f"{kind}-{how}", step=4) for how in ("alone", "apart")]
    files = [path.name for path in folders[0].glob("*.safetensors")]
    assert files
    assert all((folders[0] / f).read_bytes() == (folders[1] / f).read_bytes() for f in files)
    workers = [e["worker"] for e in workplace.events(f"{kind}-apart") if "Replaced" in e["event"]]
    also = [DYING[kind][0]] if kind in DYING else []
    assert sorted(workers) == sorted(["collector 1", *also]), finished
