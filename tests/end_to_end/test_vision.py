"""A vision-language model with experts, whose environment returns images: a whole run with replayed
routing, killed in the middle and resumed."""

from __future__ import annotations

import hashlib
import io
import json
import signal

from PIL import Image as Pillow

from milescli.checkpoint.run_dir import RunDir
from milescli.insight.samples import read_samples
from tests.backends.sglang.seeing import make_seeing
from tests.end_to_end.runs import Workplace, learned, step_done

RECIPE = """\
description: Looks at pictures
model: {path: seeing}
data: {prompts: rows.jsonl, max_prompt_tokens: 32}
rollout:
  agent: environment
  environment: {name: "tests.agents.user_environments:Looks", settings: {length: 3}, processes: 1}
  prompts_per_step: 4
  samples_per_prompt: 4
  max_response_tokens: 96
  max_turn_tokens: 6
  max_turns: 3
  max_staleness: 1
train: {steps: 4, routing_replay: true, optimizer: {lr: 3e-4}}
checkpoint: {every: 2}
run: {trackers: []}
machine: {cpu_threads: 1, start_timeout_s: 480, step_timeout_s: 120}
"""


def test_experts_see_images_of_an_environment_under_replay(workplace: Workplace) -> None:
    make_seeing(workplace.folder / "seeing", "qwen3_vl_moe")
    Pillow.new("RGB", (16, 16), "red").save(workplace.folder / "a.png")
    rows = [{"prompt": f"<image> t{n}", "images": ["a.png"]} for n in range(30, 62)]
    (workplace.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workplace.folder / "seeing.yaml").write_text(RECIPE)
    begun = workplace.start("launch", "--recipe", "seeing.yaml", "--name", "seeing")
    workplace.wait_for("seeing", step_done(3), begun)
    begun.send_signal(signal.SIGKILL)
    workplace.finish(begun)
    resumed = workplace.miles("resume", "seeing")
    assert resumed.code == 0, resumed
    events = workplace.events("seeing")
    checks = [event for event in events if event["event"] == "EngineTrainerChecked"]
    differ = [max(check[f"diff_{of}"] for check in checks) for of in ("max", "mean")]
    print("engine and trainer differ by at most", differ)
    assert len(checks) == 2 and differ[0] <= 1e-4 and differ[1] <= 1e-5
    assert any("not sampled again" in event.get("text", "") for event in events), "no journal"
    steps = workplace.steps("seeing")
    first, again = (learned(event)[0] for event in steps if event["step"] == 3)
    assert first == again, "images of the journal are not those that were sampled with"
    assert all(event["report"]["grad_norm"] > 0 for event in steps), "nothing was learned"
    run = RunDir(workplace.run("seeing"))
    (prompts,) = {tuple(one.record["images"]) for one in read_samples(run, 4)}
    returned = [one.record["returned_images"] for one in read_samples(run, 4)]
    assert max(map(len, returned)) == 2, "the last turn shows the pictures of two steps"
    for name in {*prompts, *(name for names in returned for name in names)}:
        data = run.image_file(name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == name
        assert Pillow.open(io.BytesIO(data)).size == (16, 16)
