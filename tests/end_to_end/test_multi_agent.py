"""Runs in which several roles speak: each role's turns are trained on in its own conversation, and
worked episodes are imitated role by role."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.runs import Workplace

ROLES = (
    "{teller: {prompt: Tell., sees: prompt}, solver: {prompt: Add., sees: others, reward: gsm8k}}"
)
WORKED = [
    {"role": "assistant", "name": "teller", "content": "3 4"},
    {"role": "assistant", "name": "solver", "content": "#### 7"},
]
TOLD = "<|im_start|>system\nTell.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"
HEARD = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nteller: 3 4<|im_end|>\n"
SAYS = "<|im_start|>assistant\n"


def test_two_roles_imitate_a_worked_episode_and_are_trained_on_their_own_turns(
    workplace: Workplace,
) -> None:
    row = {"prompt": "What is 3 + 4?", "label": "7", "demonstration": WORKED}
    (workplace.folder / "duo.jsonl").write_text(json.dumps(row) + "\n")
    sets = ["rollout.agent=multi_agent", f"rollout.roles={ROLES}", "rollout.reward=gsm8k"]
    sets += ["data.max_prompt_tokens=96", "train.steps=2"]
    sets += ["data.prompts=duo.jsonl", "data.demonstrations=duo.jsonl", "data.eval=null"]
    sets += ["warmup.steps=100", "warmup.lr=1e-2"]
    words = [word for setting in sets for word in ("--set", setting)]
    finished = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", "duo", *words)
    assert finished.code == 0, finished
    done = workplace.steps("duo")
    assert len(done) == 2
    for event in done:
        # trainer and engine agree on the tokens of every turn, in its own role's context
        assert event["report"]["logprob_diff_max"] < 1e-3
        figures = event["rollout"]["figures"]
        assert figures["teller_turns"] == 1 and figures["rewritten_histories"] == 0
        # its own reward says of the solver's last turn what the episode's does
        assert figures["solver_reward"] == pytest.approx(event["rollout"]["reward_mean"], abs=0.2)
    assert done[0]["rollout"]["reward_mean"] > 0.5
    file = workplace.run("duo") / "rollouts" / "step_1.jsonl"
    samples = [json.loads(line)["episode"] for line in file.read_text().splitlines()]
    assert all(len(sample["trajectories"]) == 2 for sample in samples if sample["turns"] == 2)
    imitated = [f"{TOLD}{SAYS}3 4<|im_end|>", f"{HEARD}{SAYS}#### 7<|im_end|>"]
    assert imitated in [sample["trajectories"] for sample in samples]
    # the run plays on against what it was before the first step, and keeps its role's baseline
    old = ROLES.replace("prompt: Tell.", "prompt: Tell., policy: duo@0")
    changed = {"rollout.roles": old, "train.steps": "1", "warmup.steps": "1"}
    changed["train.algorithm"] = "rae"
    again = [f"{key}={value}" for key, value in {**_pairs(sets), **changed}.items()]
    words = [word for setting in again for word in ("--set", setting)]
    finished = workplace.miles("launch", "--recipe", "tiny.yaml", "--name", "self", *words)
    assert finished.code == 0, finished
    (event,) = workplace.steps("self")
    assert event["rollout"]["figures"]["turns"] == 1, "the other turn is the older one's"
    assert event["report"]["logprob_diff_max"] < 1e-3
    manifest = workplace.run("self") / "checkpoints" / "step_1" / "manifest.json"
    assert json.loads(manifest.read_text())["objective"].keys() == {'advantage.[null, "solver"]'}
    file = workplace.run("self") / "rollouts" / "step_1.jsonl"
    (told,) = json.loads(file.read_text().splitlines()[0])["episode"]["trajectories"]
    assert told.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nteller: 3 4")


def _pairs(sets: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in sets)
