"""Kept samples: the newest steps, groups together, lines that cannot be read left out."""

from __future__ import annotations

import json
from pathlib import Path

from milescli.checkpoint.run_dir import RunDir
from milescli.insight.samples import by_group, read_last, read_samples, sample_steps


def line(prompt_index: int, response: str, **more: int) -> str:
    told = {"prompt": "p", "response": response, "reward": 1.0, "stop_reason": "stop"}
    return json.dumps({**told, "prompt_index": prompt_index, **more}) + "\n"


def test_the_newest_steps_are_read_with_their_groups_together(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.rollouts_dir.mkdir()
    for step in (1, 2, 9, 10):
        text = line(0, f"a{step}") + "{torn\n" + line(3, f"b{step}") + line(3, f"c{step}")
        (run.rollouts_dir / f"step_{step}.jsonl").write_text(text)
    assert sample_steps(run) == [1, 2, 9, 10]
    groups = by_group(read_last(run, num_steps=2))
    texts = [[one.response for one in group] for group in groups]
    assert texts == [["a9"], ["b9", "c9"], ["a10"], ["b10", "c10"]]
    assert read_samples(run, 7) == []


def test_two_groups_of_one_prompt_in_a_step_stay_two(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.rollouts_dir.mkdir()
    places = ((0, 0), (0, 1), (0, 0), (0, 1), (4, 0), (0, 0), (0, 2))
    text = "".join(line(prompt, f"{prompt} {one}", sample_index=one) for prompt, one in places)
    (run.rollouts_dir / "step_1.jsonl").write_text(text)
    texts = [[one.response for one in group] for group in by_group(read_samples(run, 1))]
    assert texts == [["0 0", "0 1"], ["0 0", "0 1"], ["4 0"], ["0 0", "0 2"]]
