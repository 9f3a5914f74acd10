"""A finished run whose decode steps, training and lengths are known, for tests of what is read from
one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from milescli import models
from milescli.core.events import FlowStats, PhaseSeconds
from milescli.models.costs import token_flops
from milescli.models.facts import ModelFacts
from milescli.plan.types import Plan
from tests.fake_run import WrittenRun, step_done
from tests.plans import PLAN

STEP_S, REQUEST_S, TRAIN_TOKEN_S, PUBLISH_S = 0.02, 0.005, 1e-3, 0.25
"""What the run's seconds are made of."""
PROMPT = 10
GROUPS, SAMPLES = 2, 2


def write_run(path: Path, facts: ModelFacts, *, plan: Plan = PLAN, keeps: bool = True) -> None:
    """Write a strict run of 20 steps on one engine."""
    written, rng = WrittenRun(path=path), np.random.default_rng(0)
    plan = replace(plan, engines=replace(plan.engines, num=1, max_running_requests=8))
    written.run.plan_file.write_text(plan.to_json())
    costs = asdict(token_flops(models.table(facts)))
    written.run.manifest_file.write_text(json.dumps({"token_flops": costs, "recipe": {}}))
    for step in range(1, 21):
        lengths = rng.integers(5, 60, (GROUPS, SAMPLES))
        written.tell(_step(step, lengths))
        if keeps:
            kept = [
                {"prompt_index": group, "response_ids": [1] * int(length)}
                for group, row in enumerate(lengths)
                for length in row
            ]
            written.keep(step, *kept)


def _step(step: int, lengths: np.ndarray):  # type: ignore[no-untyped-def]
    tokens, ends = int(lengths.sum()), sorted(lengths.ravel().tolist())
    rollout_s = STEP_S * ends[-1] + REQUEST_S * tokens
    train_s = TRAIN_TOKEN_S * (tokens + lengths.size * PROMPT)
    step_s = rollout_s + train_s + PUBLISH_S
    # open responses over time: each decode step lasts STEP_S and REQUEST_S for each that runs
    open_s, before = 0.0, 0
    for place, end in enumerate(ends):
        batch = len(ends) - place
        open_s += batch * (end - before) * (STEP_S + REQUEST_S * batch)
        before = end
    done = step_done(step, 20)
    stats = replace(
        done.rollout,
        num_groups=GROUPS,
        response_tokens_mean=float(lengths.mean()),
        response_tokens_max=ends[-1],
        prompt_tokens_mean=float(PROMPT),
        generated_tokens=tokens,
    )
    return replace(
        done,
        rollout=stats,
        report=replace(done.report, num_tokens=tokens + lengths.size * PROMPT),
        seconds=PhaseSeconds(
            rollout_s=rollout_s,
            pack_s=0.0,
            train_s=train_s,
            publish_s=PUBLISH_S,
            save_s=0.0,
            step_s=step_s,
        ),
        flow=FlowStats(idle_s=step_s - rollout_s, running_mean=open_s / step_s),
    )
