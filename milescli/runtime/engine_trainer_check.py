"""Checks that the engine computes the same log-probs as the trainer, before the first step of every
attempt: a run with wrong engines never starts. `train.agreement` judges the figures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milescli.core.errors import MismatchError
from milescli.core.events import EngineTrainerChecked
from milescli.core.types import Prompt, StepReport, Trajectory
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.rollout.base import GenerateRequest
from milescli.rollout.episode.session import RecordingSession
from milescli.runtime.devices import Devices
from milescli.runtime.recording.sample_journal import SampleJournal
from milescli.train.agreement import MIN_BOUND, Agreement, Judgement, judge
from milescli.train.base import TrainBatch
from milescli.train.objectives import load_objective
from milescli.train.packing import images_of, pack

NUM_PROMPTS = 8
MAX_NEW_TOKENS = 32
BLAME_RATIO = 3.0
"""A layer is blamed if the difference with it, in multiples of rounding, is more than this many
times the difference without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrainerCheck:
    """Compares the log-probs of engine and trainer."""

    recipe: Recipe
    plan: Plan
    num_layers: int
    has_experts: bool
    devices: Devices
    """Engines and trainer, with equal weights; they take turns if they share devices."""
    run_typed: str
    """The run, as commands name it."""

    async def run(self, prompts: Sequence[Prompt]) -> EngineTrainerChecked:
        """Let the engine respond to the prompts and the trainer score the responses, twice. Both
        hold the same weights afterwards, and the engines answer.

        Raises MismatchError if they differ by more than rounding explains, or at all under
        `train.on_policy: exact`; the error says by how much, and which weight or layer is the first
        to differ, if that can be found. If the recipe gives them different number formats, any
        difference is explained."""
        found = await self._compare(prompts)
        if self.plan.formats_differ and math.isfinite(found.gap.max):
            found = replace(found, agreement=Agreement.EXPLAINED)
        if found.agreement is Agreement.WRONG:
            where = await self._blame(prompts, found)
            raise _mismatch_error(found, where, run=self.run_typed)
        if self.devices.engines_asleep:
            await self.devices.publish(self.devices.version)
        return EngineTrainerChecked(
            num_tokens=found.gap.num_tokens,
            diff_mean=found.gap.mean,
            diff_max=found.gap.max,
            bound_max=found.most_times * max(found.floor.max, MIN_BOUND),
            floor_mean=found.floor.mean,
            floor_max=found.floor.max,
            kl=found.gap.kl,
            floor_kl=found.floor.kl,
            far=found.gap.far,
            times=found.times,
            agreement=found.agreement.value,
        )

    async def _compare(self, prompts: Sequence[Prompt]) -> Judgement:
        trajectories = await self._sample(prompts)
        batch = self._batch_of(trajectories)
        async with self.devices.scoring():
            trainer = await self.devices.trainer.score(batch)
            rounded = await self.devices.trainer.score(batch, with_other_rounding=True)
        engine = [np.frombuffer(each.logprobs, np.float32) for each in trajectories]
        masks = [np.frombuffer(each.loss_mask, np.bool_) for each in trajectories]
        of_tokens = (
            np.concatenate([values[mask] for values, mask in zip(rows, masks, strict=True)])
            for rows in (engine, trainer, rounded)
        )
        exact = self.plan.on_policy == "exact"
        return judge(*of_tokens, has_experts=self.has_experts, exact=exact)

    async def _sample(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        recipe = self.recipe
        sessions = [
            RecordingSession(
                self.devices.engines,
                prompt=prompt,
                seed=recipe.run.seed + index,
                settings=GenerateRequest(
                    prompt_ids=(),
                    max_new_tokens=MAX_NEW_TOKENS,
                    temperature=recipe.rollout.temperature,
                    want_routed_experts=recipe.train.routing_replay,
                ),
                max_tokens=len(prompt.token_ids) + MAX_NEW_TOKENS,
                decode=lambda token_ids: "",
            )
            for index, prompt in enumerate(prompts)
        ]
        await asyncio.gather(
            *(
                session.generate(prompt.token_ids)
                for session, prompt in zip(sessions, prompts, strict=True)
            )
        )
        return [
            replace(session.trajectories()[0], images=prompt.images)
            for session, prompt in zip(sessions, prompts, strict=True)
        ]

    def _batch_of(self, trajectories: Sequence[Trajectory]) -> TrainBatch:
        recipe, plan = self.recipe, self.plan
        return pack(
            load_objective("supervised", recipe).sequences(trajectories),
            objective="supervised",
            dp=plan.trainer.dp,
            max_tokens_per_microbatch=plan.batch.max_row_tokens(plan.trainer.cp),
            temperature=recipe.rollout.temperature,
            images=images_of(trajectories),
        )

    async def _blame(self, prompts: Sequence[Prompt], whole: Judgement) -> str:
        """Return a text that names the first weight that differs; else the first layer, found by
        bisection over the number of layers that are not silent; or that none was found."""
        sends_adapter = self.recipe.train.lora.is_on and not self.plan.merges_adapter
        if self.recipe.weights.format != "hf" or sends_adapter:
            return (
                "the first differing layer was not located: the engine does not receive a whole "
                "model"
            )
        try:
            await self.devices.publish(self.devices.version, verify=True)
        except MismatchError as error:
            return f"the weights differ: {error.what} ({error.why})"
        right, wrong = await self._with_layers(prompts, 0), whole
        if right.agreement is Agreement.WRONG:
            return (
                "all weights are equal, and the difference exists without any layer: it is in "
                "the embedding, final norm or output layer"
            )
        first, last = 0, self.num_layers
        while last - first > 1:
            middle = (first + last) // 2
            found = await self._with_layers(prompts, middle)
            if found.agreement is Agreement.WRONG:
                last, wrong = middle, found
            else:
                first, right = middle, found
        if not wrong.times <= BLAME_RATIO * right.times:  # NaN is a jump
            return (
                f"all weights are equal, and layer {first} (of {self.num_layers}, from 0) is the "
                f"first that computes differently: {wrong.times:.3g} times the floor with it, "
                f"{right.times:.3g} times without it"
            )
        return (
            "all weights are equal; the cause was not located: the difference grows from layer "
            "to layer"
        )

    async def _with_layers(self, prompts: Sequence[Prompt], count: int) -> Judgement:
        """Evaluate the model that is left when all layers but the first `count` are silent."""
        async with self.devices.training():
            await self.devices.trainer.bypass_layers(count)
        await self.devices.publish(self.devices.version)
        return await self._compare(prompts)


def require_exact(
    plan: Plan, report: StepReport, *, step: int, run: str, journal: SampleJournal | None
) -> None:
    """Raise MismatchError if a step under `train.on_policy: exact` was trained on tokens whose
    log-probs differ between engine and trainer. Before that, discard the run's `journal`: a resumed
    run would train on the same log-probs again, and fail again. `run` is how commands call the
    run."""
    if plan.on_policy != "exact" or not report.logprob_diff_tokens:
        return
    if journal is not None:
        journal.discard()
    raise _inexact_error(
        f"step {step}: the log-probs of {report.logprob_diff_tokens} of {report.num_loss_tokens} "
        "trained tokens differ between engine and trainer, by at most "
        f"{report.logprob_diff_max:.2e}",
        why="`train.on_policy=exact` requires a difference of 0.0; the step was not saved",
        run=run,
    )


def _inexact_error(what: str, *, why: str, run: str) -> MismatchError:
    return MismatchError(
        what,
        why=why,
        fix=[
            f"miles resume {run}   # from the previous checkpoint: does it happen again?",
            f"miles resume {run} --set train.on_policy=auto   # accept rounding differences from "
            "now on",
        ],
    )


def _mismatch_error(found: Judgement, where: str, *, run: str) -> MismatchError:
    if found.most_times == 0.0:
        return _inexact_error(
            f"engine and trainer are not equal: the log-probs of {found.gap.num_different} of "
            f"{found.gap.num_tokens} tokens differ, by at most {found.gap.max:.2e}",
            why=f"`train.on_policy=exact` requires a difference of 0.0; {where}",
            run=run,
        )
    return MismatchError(
        f"engine and trainer disagree: {found.text}",
        why=f"{where}; they differ by {found.times:.3g} times the effect of rounding, but a "
        f"correct engine differs by less than {found.most_times:.3g} times",
        fix=[
            "miles doctor",
            "compare the model's config.json with logs/latest/engine-0-server.log",
        ],
    )
