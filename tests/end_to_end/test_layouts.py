"""Other plans, same program: split devices with staleness, tensor and pipeline parallel trainers,
experts with routing replay."""

from __future__ import annotations

import json
import signal

from tests.end_to_end.runs import (
    Workplace,
    learned,
    processes_of_run,
    saved,
    step_done,
    wait_until_gone,
)

MOE = (
    "model.scratch.family=qwen3_moe",
    "model.scratch.num_experts=4",
    "model.scratch.tie_embeddings=false",
    "model.scratch.moe_ffn_hidden_size=64",
)


def _sets(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def test_rollout_runs_ahead_within_the_bound_and_a_kill_loses_nothing_that_was_sampled(
    workplace: Workplace,
) -> None:
    process = workplace.start(
        "launch", "--recipe", "tiny.yaml", "--name", "stale", *_sets(
            "rollout.max_staleness=2", "engines.placement=split", "weights.channel=distributed",
            "weights.verify=true", "train.steps=20", "checkpoint.every=10", "train.kl_coef=0.01",
        ),
    )  # fmt: skip
    workplace.wait_for("stale", saved(10), process)
    workplace.wait_for("stale", step_done(12), process)
    ours = processes_of_run(process.pid)
    process.send_signal(signal.SIGKILL)
    workplace.finish(process)
    assert not wait_until_gone(ours)
    killed = workplace.steps("stale")
    measured = [event["rollout"]["staleness_max"] for event in killed]
    assert max(measured) in (1, 2), measured
    assert measured[0] == 0
    assert (
        json.loads((workplace.run("stale") / "plan.json").read_text())["channel"] == "distributed"
    )

    resumed = workplace.miles("resume", "stale")
    assert resumed.code == 0, resumed
    assert "used: they are not sampled again" in resumed.err
    after = {event["step"]: event for event in workplace.steps("stale")[len(killed) :]}
    again = [event for event in killed if event["step"] in after]
    assert [event["step"] for event in again][:2] == [11, 12] and max(after) == 20
    for event in again:
        assert learned(after[event["step"]]) == learned(event), f"step {event['step']}"


def test_experts_with_replayed_routing_live_the_whole_life_and_go_on_under_another_layout(
    workplace: Workplace,
) -> None:
    finished = workplace.miles(
        "launch", "--recipe", "tiny.yaml", "--name", "moe", *_sets(
            *MOE, "parallel.tp=2", "parallel.ep=2", "train.routing_replay=true", "train.steps=2",
            "engines.num=2",
        ),
    )  # fmt: skip
    assert finished.code == 0, finished
    assert _layout(workplace, "moe") == {"tp": 2, "ep": 2, "pp": 1}
    resumed = workplace.miles(
        "resume", "moe", "--steps", "4", *_sets("parallel.tp=1", "parallel.ep=1", "parallel.pp=2")
    )
    assert resumed.code == 0, resumed
    assert _layout(workplace, "moe") == {"tp": 1, "ep": 1, "pp": 2}
    reports = [event["report"] for event in workplace.steps("moe")]
    assert len(reports) == 4
    assert max(report["logprob_diff_max"] for report in reports) <= 1e-4
    assert max(report["logprob_diff_mean"] for report in reports) <= 1e-5
    folder = workplace.folder / "moe-hf"
    assert workplace.miles("export", "moe", "--to", str(folder)).code == 0
    from tests.end_to_end.hugging_face import greedy

    rows = [
        json.loads(line)
        for line in (workplace.run("moe") / "eval" / "step_4.jsonl").read_text().splitlines()
    ]
    assert greedy(folder, [row["prompt_ids"] for row in rows], max_new_tokens=16) == [
        row["response_ids"] for row in rows
    ]


def _layout(workplace: Workplace, name: str) -> dict[str, int]:
    trainer = json.loads((workplace.run(name) / "plan.json").read_text())["trainer"]
    return {key: trainer[key] for key in ("tp", "ep", "pp")}
