"""Kept samples: the newest steps, groups together, lines that cannot be read left out."""

from __future__ import annotations

import json
from pathlib import Path

from milescli.checkpoint.run_dir import RunDir
from milescli.insight.samples import by_group, read_last, read_samples, sample_steps


def line(prompt_index: int, response: str) -> str:
    told = {"prompt": "p", "response": response, "reward": 1.0, "stop_reason": "stop"}
    return json.dumps({**told, "prompt_index": prompt_index}) + "\n"


def test_the_newest_steps_are_read_with_their_groups_together(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.rollouts_dir.mkdir()
    for step in (1, 2, 9, 10):
        text = line(0, f"a{step}") + "{torn\n" + line(3, f"b{step}") + line(3, f"c{step}")
        (run.rollouts_dir / f"step_{step}.jsonl").write_text(text)
    assert sample_steps(run) == [1, 2, 9, 10]
    groups = by_group(read_last(run, num_steps=2))
    texts = {place: [one.response for one in group] for place, group in groups.items()}
    assert texts == {
        (9, 0): ["a9"],
        (9, 3): ["b9", "c9"],
        (10, 0): ["a10"],
        (10, 3): ["b10", "c10"],
    }
    assert read_samples(run, 7) == []
