"""Runs whose agents take several turns: the trainer scores what the engine sampled, a resumed run
is the one that was not stopped, and tools are called because the model says so."""

from __future__ import annotations

import json

from tests.end_to_end.runs import Workplace

CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "3*4"}}}
WORKED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "calculator", "content": "12"},
    {"role": "assistant", "content": "#### 12"},
]


def _launch(workplace: Workplace, name: str, sets: list[str], *, steps: int) -> None:
    words = [word for setting in [*sets, f"train.steps={steps}"] for word in ("--set", setting)]
    finished = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", name, *words)
    assert finished.code == 0, finished


def _step(workplace: Workplace, name: str, number: int) -> dict:
    (event,) = (
        event
        for event in workplace.events(name)
        if event["event"] == "StepDone" and event["step"] == number
    )
    return event


def _samples(workplace: Workplace, name: str, step: int) -> list[dict]:
    file = workplace.run(name) / "rollouts" / f"step_{step}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_dialogue_is_trained_on_token_by_token_and_resumes(
    workplace: Workplace, ppo: str, ppo_again: str
) -> None:
    for step in (1, 2):
        done = _step(workplace, ppo, step)
        # trainer and engine agree on the tokens of every turn, in the context of all before it
        assert done["report"]["logprob_diff_max"] < 1e-3
        figures = done["rollout"]["figures"]
        assert figures["turns"] == 4 and figures["said"] == 3
        assert figures["rewritten_histories"] == 0
    for sample in _samples(workplace, ppo, 1):
        first, second = sample["episode"]["trajectories"]
        assert [text.count("<|im_start|>assistant") for text in (first, second)] == [3, 2]
        assert "add(a): Add." in first and "Go on." in second and "And é?" in first

    assert _samples(workplace, ppo_again, 3) == _samples(workplace, ppo, 3)


def test_a_model_that_calls_the_calculator_is_told_and_scored(workplace: Workplace) -> None:
    row = {"prompt": "What is 3 * 4?", "label": "12", "demonstration": WORKED}
    (workplace.folder / "called.jsonl").write_text(json.dumps(row) + "\n")
    sets = ["rollout.agent=tools", "rollout.tools=[calculator]", "rollout.reward=gsm8k"]
    sets += ["data.prompts=called.jsonl", "data.demonstrations=called.jsonl", "data.eval=null"]
    sets += ["rollout.max_response_tokens=128", "data.max_prompt_tokens=96"]
    sets += ["warmup.steps=150", "warmup.lr=1e-2"]
    _launch(workplace, "called", sets, steps=1)
    done = _step(workplace, "called", 1)
    assert done["rollout"]["reward_mean"] > 0.5
    assert done["rollout"]["figures"]["tool_calls"] > 0.5
    told = "<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n#### 12<|im_end|>"
    texts = [s["episode"]["trajectories"][0] for s in _samples(workplace, "called", 1)]
    assert any(text.endswith(told) for text in texts)


def test_an_environment_pays_for_turns_and_bad_episodes_are_played_anew(
    workplace: Workplace,
) -> None:
    sets = ["rollout.agent=environment", "data.prompts=task:seeds", "data.eval=task:seeds-heldout"]
    sets += ["rollout.environment.name=tests.end_to_end.agents:Echo", "eval.num_prompts=2"]
    sets += ["rollout.environment.processes=1", "rollout.max_turn_tokens=4"]
    sets += ["rollout.max_response_tokens=128", "train.advantage=turns", "train.gamma=0.5"]
    _launch(workplace, "echo", sets, steps=2)
    for step in (1, 2):
        done = _step(workplace, "echo", step)
        assert done["report"]["logprob_diff_max"] < 1e-3
        assert done["rollout"]["reward_mean"] == 6.0
        figures = done["rollout"]["figures"]
        assert figures["turns"] == 3 and figures["environment_s"] > 0
        for sample in _samples(workplace, "echo", step):
            (text,) = sample["episode"]["trajectories"]
            assert text.count("Go on.") == 2 and sample["reward"] == 6.0
    failed = [
        _step(workplace, "echo", step)["rollout"]["figures"].get("failed_episodes", 0.0)
        for step in (1, 2)
    ]
    assert 0 < sum(failed) < 2
    told = [event["text"] for event in workplace.events("echo") if event["event"] == "Notice"]
    assert any("repeating an episode" in text and "the board is away" in text for text in told)
