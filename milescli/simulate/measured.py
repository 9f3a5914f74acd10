"""Reads lengths and speeds of a finished run from its files, for `miles simulate --from RUN`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import CheckpointError, DataError
from milescli.core.history import History
from milescli.insight import samples
from milescli.insight.facts import read_facts
from milescli.insight.reader import read_history
from milescli.models.base import WeightTable
from milescli.models.costs import token_flops
from milescli.plan.types import Plan
from milescli.simulate.lengths import Lengths, LogNormal, Recorded

FIRST_STEPS = 2
"""Number of first steps that are left out: caches are filled and kernels compiled in them."""
MIN_STEPS = 4
MIN_GROUPS = 16
"""Kept groups from which lengths are drawn; with fewer, a log-normal has the run's mean and longest
response."""
TAIL = 3.0
"""Approximate distance, in standard deviations of the logarithm, from the mean to the longest of
the hundreds of responses of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Holds the lengths and speeds of a run."""

    run: str
    lengths: Lengths
    prompt_tokens: float
    kept_share: float
    step_s: float
    """Seconds of a decode step at any load."""
    request_s: float
    """Additional seconds for each running request."""
    running: float
    """Mean number of concurrent requests of an engine while it ran any."""
    train_token_s: float
    """Seconds of training for each token, prompts included."""
    publish_s: float
    plan: Plan
    token_flops: object
    """As in the manifest: shows whether another model is the same."""

    def is_of(self, table: WeightTable) -> bool:
        """Return True if the run trained this model, as far as its size shows."""
        return self.token_flops == asdict(token_flops(table))


def read_measured(run: RunDir) -> Measured:
    """Read a run. Raises DataError if it has too few steps, or sampled nothing."""
    history, facts = read_history(run), read_facts(run)
    places = np.arange(len(history.columns)) >= FIRST_STEPS

    def column(name: str) -> np.ndarray:
        values = np.frombuffer(history.columns.get(name), dtype=np.float64)[places]
        return np.nan_to_num(values)

    plan = _plan(run)
    if plan is None or places.sum() < MIN_STEPS or not column("rollout/generated_tokens").any():
        raise DataError(
            f"run `{run.name}` does not tell how fast its engines were",
            why="its plan.json is missing, or of another version of miles"
            if plan is None
            else f"{FIRST_STEPS + MIN_STEPS} steps that sample are needed, and it has "
            f"{len(history.columns)} steps",
            fix="miles runs   # lists others",
        )
    engines = plan.engines.num - plan.engines_apart
    step_s, request_s, running = _decoding(column, num_engines=engines)
    refused, kept = column("rollout/dropped_groups").sum(), column("rollout/num_groups").sum()
    trained_s = column("time/train_s").sum() + column("time/pack_s").sum()
    return Measured(
        run=run.name,
        lengths=_lengths(run, history, longest=int(facts.key("rollout.max_response_tokens", 1))),
        prompt_tokens=float(column("rollout/prompt_tokens_mean").mean()),
        kept_share=float(kept / max(kept + refused, 1)),
        step_s=step_s,
        request_s=request_s,
        running=running,
        train_token_s=float(trained_s / column("train/num_tokens").sum()),
        publish_s=float(column("time/publish_s").mean()),
        plan=plan,
        token_flops=facts.manifest.get("token_flops"),
    )


def _plan(run: RunDir) -> Plan | None:
    try:
        return Plan.read(run.plan_file)
    except CheckpointError:
        return None


def _decoding(
    column: Callable[[str], np.ndarray], *, num_engines: int
) -> tuple[float, float, float]:
    """Return (seconds of a decode step, additional seconds for each request, concurrent requests).
    In a step, an engine decodes tokens / running times, which takes step_s for each and request_s
    for each token: least squares over the steps, neither below 0."""
    whole, tokens = column("time/step_s"), column("rollout/generated_tokens")
    active = np.maximum(
        column("time/rollout_s"), whole - column("flow/idle_s") - column("time/publish_s")
    )
    active = np.maximum(active, 1e-9)
    running = np.maximum(1.0, column("flow/running_mean") * whole / active)
    pairs = np.stack([tokens / running, tokens / num_engines], axis=1)
    options = [np.linalg.lstsq(pairs, active, rcond=None)[0]]
    for place in (0, 1):
        alone = np.zeros(2)
        alone[place] = pairs[:, place] @ active / (pairs[:, place] @ pairs[:, place])
        options.append(alone)
    fitting = [one for one in options if (one >= 0).all()]
    step_s, request_s = min(fitting, key=lambda one: float(((pairs @ one - active) ** 2).sum()))
    return float(step_s), float(request_s), float(running.mean() / num_engines)


def _lengths(run: RunDir, history: History, *, longest: int) -> Lengths:
    groups: dict[tuple[int, int], list[int]] = {}
    steps = [step for step in samples.sample_steps(run) if step > FIRST_STEPS]
    for one in (sample for step in steps for sample in samples.read_samples(run, step)):
        ids: Sequence[int] = one.record.get("response_ids") or ()
        if ids:
            groups.setdefault((one.step, one.prompt_index), []).append(len(ids))
    if len(groups) >= MIN_GROUPS:
        return Recorded(groups=list(groups.values()))
    columns = history.columns
    means = np.asarray(columns.get("rollout/response_tokens_mean"))[FIRST_STEPS:]
    most = np.asarray(columns.get("rollout/response_tokens_max"))[FIRST_STEPS:]
    mean = float(np.nanmean(means))
    sigma = float(np.clip(np.log(np.nanmean(most) / mean) / TAIL, 0.05, 2.0))
    return LogNormal(mean=mean, sigma=sigma, longest=max(longest, int(mean) + 1))
