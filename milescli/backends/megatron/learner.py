"""Applies a rank's models to a shard: an optimizer step of the policy, and of the critic if there
is one; teachers' log-probs; a measurement; scores. Collective: all ranks are called with equal
arguments except for the shard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from milescli.backends.megatron.loaded_model import LoadedModel
from milescli.backends.megatron.mesh import Mesh
from milescli.backends.megatron.state.saving import release_state
from milescli.backends.megatron.state.snapshot import Reference
from milescli.backends.megatron.step import replay, rounding, stepping
from milescli.backends.megatron.step.microbatch import Microbatch
from milescli.backends.megatron.step.shard import RankShard
from milescli.backends.megatron.trained_model import TrainedModel
from milescli.core.plug_points import BEFORE_LOG_PROBS, OBJECTIVES
from milescli.core.types import StepReport
from milescli.recipe.schema import Recipe
from milescli.train.base import Objective, StepResult, TrainShard
from milescli.train.objectives import load_objective
from milescli.train.objectives.reward_model import Value
from milescli.train.objectives.supervised import Supervised
from milescli.train.streams import RANK_STREAMS, Stream

TIMED_PARTS = ("forward_backward_s", "save_wait_s", "optimizer_s")
"""Parts of a step whose seconds are in a StepReport."""


@dataclass(slots=True, kw_only=True)
class Learner:
    """Trains and queries the models of one rank."""

    recipe: Recipe
    mesh: Mesh
    policy: TrainedModel
    critic: TrainedModel | None
    draft: TrainedModel | None
    reference: Reference
    teachers: list[LoadedModel]
    """Models of `train.distill.teachers`, in order; empty if the run needs none."""
    shares_prompts: bool = False
    """True if sequences share their prompts, as `BatchPlan.shares_prompts` says."""
    _objectives: dict[str, Objective[Any]] = field(default_factory=dict)
    _before_log_probs: Any = field(init=False)

    def __post_init__(self) -> None:
        self._before_log_probs = BEFORE_LOG_PROBS.load(self.recipe.train.before_log_probs)

    def step(
        self, shard: TrainShard, lr: float | None, critic_lr: float | None = None
    ) -> StepResult:
        """Make one optimizer update per entry of `shard.updates`, then as many of the critic (if
        there is one and `critic_lr` is given), and of the trained draft model (if the shard was
        sampled). `lr` None leaves the policy unchanged. The report is equal on all ranks; the
        log-probs of `shard.logprob_ids` are on the ranks that report its tokens. Raises
        NotFiniteError before an update that would corrupt the weights; earlier updates of the step
        are kept."""
        objective = self._objective(shard.objective)
        own, seconds = self._on_rank(shard, in_update=True), _Stopwatch()
        self._fill(own, objective)
        figures, logprobs = [], []
        weight = self.recipe.train.mtp.loss_weight or 0.0
        terms = stepping.mtp_terms(own, weight=weight, mesh=self.mesh)
        indexer = self.policy.facts.indexer
        trains_indexer = indexer is not None and indexer.trained
        if trains_indexer:
            stepping.begin_indexer_losses(own, mesh=self.mesh)
        for number, microbatches in enumerate(own.updates):
            self.policy.passes.counts_routes = number == 0
            loss = stepping.UpdateLoss(
                objective=objective,
                shard=own,
                mesh=self.mesh,
                measures_engine=number == 0 or Stream.OLD in own,
                mtp=terms[number],
                logprobs=logprobs if number == 0 and Stream.OLD not in own else None,
            )
            self.policy.gradients(microbatches, loss, temperature=shard.temperature)
            seconds.lap("forward_backward_s")
            if lr is not None:
                release_state()
            seconds.lap("save_wait_s")
            grad_norm = self.policy.update(lr) if lr is not None else 0.0
            seconds.lap("optimizer_s")
            figures.append(stepping.reduce_figures(loss, grad_norm=grad_norm))
        total = stepping.report(
            figures, lr=lr or 0.0, num_microbatches=len(own.microbatches), seconds=seconds.laps
        )
        more = self._route_figures()
        if trains_indexer:
            more[stepping.INDEXER_KL] = stepping.end_indexer_losses(
                own, num_indexers=self.policy.facts.num_indexers, mesh=self.mesh
            )
        total = replace(total, figures={**total.figures, **more})
        if self.critic is not None and critic_lr is not None:
            total = self._critic_step(self.critic, own, total, lr=critic_lr)
        draft_lr, objective_of_run = self.recipe.train.draft.lr, self.recipe.train.objective
        if self.draft is not None and draft_lr is not None and shard.objective == objective_of_run:
            total = self._draft_step(self.draft, shard, total, lr=draft_lr)
        return StepResult(report=total, logprobs=own.logprobs_before(logprobs))

    def _route_figures(self) -> dict[str, float]:
        """Return `routes_differ`: the share of the replayed routes that differ from the trainer's
        own choice, before the first update. Collective if routing is replayed."""
        if not self.policy.replays_routing:
            return {}
        share = replay.share_of_changed_routes(self.policy.passes.routers, self.mesh)
        return {} if share is None else {"routes_differ": share}

    def _critic_step(
        self, critic: TrainedModel, own: RankShard, total: StepReport, *, lr: float
    ) -> StepReport:
        """Update the critic on the returns of the same tokens; add its figures to the policy's."""
        with self.on_device(critic):
            report = self._updates(critic, own, Value(recipe=self.recipe), temperature=1.0, lr=lr)
        of_critic = {
            "value_loss": report.loss,
            "value_grad_norm": report.grad_norm,
            "value_lr": lr,
            **report.figures,
        }
        return _with_figures(total, report, of_critic)

    def _draft_step(
        self, draft: TrainedModel, shard: TrainShard, total: StepReport, *, lr: float
    ) -> StepReport:
        """Update the draft model by the cross-entropy of the policy's samples. Up to a term that
        does not depend on the draft model, this is the KL from the policy to it."""
        own = RankShard(shard, mesh=self.mesh, facts=draft.facts, read_patches=draft.read_patches)
        heat = shard.temperature
        with self.on_device(draft):
            objective = Supervised(recipe=self.recipe)
            report = self._updates(draft, own, objective, temperature=heat, lr=lr)
        of_draft = {"draft_loss": report.loss, "draft_grad_norm": report.grad_norm}
        return _with_figures(total, report, of_draft)

    def _updates(
        self,
        model: TrainedModel,
        own: RankShard,
        objective: Objective[Any],
        *,
        temperature: float,
        lr: float,
    ) -> StepReport:
        """Make the updates of a model other than the policy, one for each of the policy's."""
        figures, seconds = [], _Stopwatch()
        for microbatches in own.updates:
            loss = stepping.UpdateLoss(
                objective=objective, shard=own, mesh=self.mesh, measures_engine=False
            )
            model.gradients(microbatches, loss, temperature=temperature)
            seconds.lap("forward_backward_s")
            release_state()
            seconds.lap("save_wait_s")
            grad_norm = model.update(lr)
            seconds.lap("optimizer_s")
            figures.append(stepping.reduce_figures(loss, grad_norm=grad_norm))
        return stepping.report(
            figures, lr=lr, num_microbatches=len(own.microbatches), seconds=seconds.laps
        )

    @contextmanager
    def on_device(self, model: LoadedModel) -> Iterator[None]:
        """Hold the model (the critic, a teacher) on the device within the block, while the policy
        waits in host memory. On a CPU all models are always in memory."""
        if self.mesh.device.type == "cpu":
            yield
            return
        self.policy.sleeper.sleep()
        model.sleeper.wake()
        try:
            yield
        finally:  # what follows an error, such as a save, needs the policy
            model.sleeper.sleep()
            self.policy.sleeper.wake()

    def measure(self, shard: TrainShard) -> StepReport:
        """Return the loss and figures of the shard's batch as `step` would report them, without
        changing anything. Equal on all ranks."""
        objective = self._objective(shard.objective)
        own, seconds = self._on_rank(shard, in_update=True), _Stopwatch()
        self._fill(own, objective)
        figures = []
        for microbatches in own.updates:
            loss = stepping.UpdateLoss(
                objective=objective, shard=own, mesh=self.mesh, measures_engine=False
            )
            self.policy.passes.measure(
                microbatches, loss, temperature=shard.temperature, candidates=loss.candidates
            )
            loss.require_finite()
            figures.append(stepping.reduce_figures(loss, grad_norm=0.0))
        seconds.lap("forward_backward_s")
        return stepping.report(
            figures, lr=0.0, num_microbatches=len(own.microbatches), seconds=seconds.laps
        )

    def accumulate(self, shard: TrainShard, *, backward: bool) -> StepResult:
        """Compute the loss of the shard's only update, and with `backward` its gradients, which
        stay in the buffers: no update follows. The report is equal on all ranks; the log-probs of
        `shard.logprob_ids`, or of their first candidates, are on the ranks that report its tokens.
        Raises NotFiniteError."""
        own, logprobs = self._on_rank(shard), list[tuple[Microbatch, torch.Tensor]]()
        seconds = _Stopwatch()
        loss = stepping.UpdateLoss(
            objective=self._objective(shard.objective),
            shard=own,
            mesh=self.mesh,
            measures_engine=False,
            logprobs=logprobs,
            reports_candidates=True,
        )
        (microbatches,) = own.updates
        if backward:
            self.policy.gradients(microbatches, loss, temperature=shard.temperature)
        else:
            self.policy.passes.measure(
                microbatches, loss, temperature=shard.temperature, candidates=loss.candidates
            )
            loss.require_finite()
        seconds.lap("forward_backward_s")
        figures = [stepping.reduce_figures(loss, grad_norm=0.0)]
        report = stepping.report(
            figures, lr=0.0, num_microbatches=len(microbatches), seconds=seconds.laps
        )
        return StepResult(report=report, logprobs=own.logprobs_before(logprobs))

    def _fill(self, own: RankShard, objective: Objective[Any]) -> None:
        """Compute the streams that the objective needs, then those that it computes from them."""
        for stream in RANK_STREAMS:
            if stream not in objective.needs or stream is Stream.CANDIDATES:
                continue
            if stream is Stream.TEACHER:
                self._run_teachers(own, with_candidates=Stream.CANDIDATES in objective.needs)
                continue
            if stream is Stream.VALUES:
                assert self.critic is not None, f"`{own.shard.objective}` needs a critic"
                with self.on_device(self.critic):
                    values = self.critic.passes.score(own.microbatches, temperature=1.0)
                    own.fill(stream, values)
                continue
            with self._weights_of(stream):
                own.fill(stream, self._score(own, stream, everywhere=False))
        if self.mesh.is_last_stage:
            tokens = own.all_tokens()
            with OBJECTIVES.guarded(own.shard.objective):
                objective.complete(tokens)
            own.keep(tokens)

    def _run_teachers(self, own: RankShard, *, with_candidates: bool) -> None:
        """Let each teacher score its own sequences, or, with candidates, name its most likely
        tokens."""
        assert self.teachers, f"`{own.shard.objective}` needs a teacher"
        settings, heat = self.recipe.train.distill, own.shard.temperature
        rows: list[Microbatch] = []
        outputs: list[tuple[torch.Tensor, ...]] = []
        for number, teacher in enumerate(self.teachers):
            microbatches = own.rows_of_teacher(number, teacher.facts)
            rows += microbatches
            with self.on_device(teacher):
                if with_candidates:
                    outputs += teacher.passes.top_tokens(
                        microbatches, count=settings.top_k, temperature=heat
                    )
                else:
                    scores = teacher.passes.score(microbatches, temperature=heat, everywhere=False)
                    outputs += [(score,) for score in scores]
        if with_candidates:
            own.fill(Stream.CANDIDATES, [ids for ids, _ in outputs], microbatches=rows)
        own.fill(Stream.TEACHER, [parts[-1] for parts in outputs], microbatches=rows)

    def _weights_of(self, stream: Stream) -> AbstractContextManager[None]:
        """Replace the policy's weights by the reference's within the context, if the reference
        computes the stream."""
        return self.reference.swapped_in() if stream is Stream.REFERENCE else nullcontext()

    def score(
        self, shard: TrainShard, *, with_other_rounding: bool = False
    ) -> list[np.ndarray] | None:
        """Return per sequence of the shard the log-prob of each token given those before it, [n]
        float32, 0.0 for the first; None on ranks that do not report its tokens.
        `with_other_rounding` applies `step.rounding`."""
        own = self._on_rank(shard)
        model = self.policy.model.module
        with rounding.with_other_rounding(model) if with_other_rounding else nullcontext():
            own.fill(Stream.OLD, self._score(own, Stream.OLD, everywhere=True))
        return own.gathered(Stream.OLD)

    def score_by_teachers(self, shard: TrainShard) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Return for each sequence of the shard the teacher's most likely tokens and their
        log-probs, [n, k] each; None on ranks that do not report its tokens."""
        own = self._on_rank(shard)
        self._run_teachers(own, with_candidates=True)
        ids, logprobs = (own.gathered(stream) for stream in (Stream.CANDIDATES, Stream.TEACHER))
        return None if ids is None or logprobs is None else list(zip(ids, logprobs, strict=True))

    def _objective(self, name: str) -> Objective[Any]:
        """Return the objective; created once."""
        if name not in self._objectives:
            self._objectives[name] = load_objective(name, self.recipe)
        return self._objectives[name]

    def _on_rank(self, shard: TrainShard, *, in_update: bool = False) -> RankShard:
        """Lay out the shard on this rank. `in_update`: only values at trained tokens matter."""
        return RankShard(
            shard,
            mesh=self.mesh,
            facts=self.policy.facts,
            routed_layers=[layer for layer, _ in self.policy.passes.routers],
            read_patches=self.policy.read_patches,
            shares_prompts=in_update and self.shares_prompts,
        )

    def _score(self, own: RankShard, stream: Stream, *, everywhere: bool) -> list[torch.Tensor]:
        """Return [S] log-probs for each microbatch, on ranks of the last stage."""
        if self._before_log_probs is not None:
            release_state()  # it may change what it is given
            with torch.no_grad():
                self._before_log_probs(model=self.policy.model.module, stream=str(stream))
        return self.policy.passes.score(
            own.microbatches, temperature=own.shard.temperature, everywhere=everywhere
        )


def _with_figures(total: StepReport, report: StepReport, figures: dict[str, float]) -> StepReport:
    """Return the policy's report with the figures and the seconds of another model added."""
    return replace(
        total,
        figures={**total.figures, **figures},
        **{name: getattr(total, name) + getattr(report, name) for name in TIMED_PARTS},
    )


class _Stopwatch:
    """Measures the seconds of the parts of a step."""

    def __init__(self) -> None:
        self.laps = dict.fromkeys(TIMED_PARTS, 0.0)
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        now = time.monotonic()
        self.laps[name] += now - self._last
        self._last = now
