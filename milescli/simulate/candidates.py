"""Compares layouts and asynchronous settings of a recipe on a machine, and recommends one with its
reason. Called by `miles simulate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from milescli import models
from milescli.core.errors import FitError, MachineError, MilesError, RecipeError
from milescli.models.facts import ModelFacts
from milescli.plan.choices import WEIGHT_BYTES, choose_precision
from milescli.plan.devices import spec_of
from milescli.plan.on_devices import TrainerEnginePair, pairs_by_share
from milescli.plan.placement import choose_placement, devices_per_node
from milescli.plan.types import Log
from milescli.platform.machine import Machine
from milescli.recipe.schema import Recipe
from milescli.simulate import hardware
from milescli.simulate.assumptions import Assumptions
from milescli.simulate.hardware import Speeds
from milescli.simulate.lengths import Lengths, LogNormal
from milescli.simulate.measured import Measured
from milescli.simulate.pipeline import Failures, Outcome, Settings, Simulation

ASYNC: tuple[tuple[int, Literal["prompts", "done"]], ...] = (
    (0, "prompts"),
    (1, "prompts"),
    (1, "done"),
    (2, "done"),
    (4, "done"),
)
"""(max_staleness, order) that are simulated on the best split."""
SIMILAR_FACTOR = 1.05
"""Settings whose throughput is within this factor of the best count as equally fast: the least
stale of them is recommended."""
MIN_GAIN = 0.001
"""Smallest gain for which a faster candidate is mentioned."""

RESPONSES, MIN_STEPS, MAX_STEPS = 50_000, 7, 40
"""Number of responses to simulate of each candidate, and the least and the most steps for them."""

Vary = Callable[[Sequence[str]], Recipe]
"""Returns the user's recipe with further `--set`s; raises RecipeError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Describes one way to divide the devices."""

    name: str
    """colocated; 96 + 32 (devices of engines and of the trainer); as in RUN."""
    sets: tuple[str, ...]
    """Arguments of `--set` that choose it."""
    speeds: Speeds
    tp: int
    """Number of devices per engine."""
    engine_devices: int
    trainer_devices: int
    num_devices: int
    colocated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Holds a layout with asynchronous settings, and the result of its simulation."""

    layout: Layout
    recipe: Recipe
    sets: tuple[str, ...]
    outcome: Outcome
    hours: float
    """Hours for all steps of the recipe."""
    gpu_hours: float
    simulation: Simulation
    """The finished simulation, with the time of each event."""

    @property
    def staleness(self) -> int:
        """Return rollout.max_staleness."""
        return self.recipe.rollout.max_staleness

    @property
    def rollout(self) -> str:
        """Describe the asynchronous setting in words."""
        order = self.recipe.rollout.order
        return "on-policy" if not self.staleness else f"staleness {self.staleness}, {order}"


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Simulates candidates of one recipe on one machine."""

    vary: Vary
    machine: Machine
    facts: ModelFacts
    assume: Assumptions
    measured: Measured | None = None
    teachers: Sequence[ModelFacts] = ()
    steps: int | None = None
    """Number of steps to simulate for each candidate; None: by the size of a step."""
    seed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    """Candidate -> why it was not simulated."""
    candidates: list[Candidate] = field(default_factory=list)

    def run(self) -> Candidate:
        """Simulate all candidates, and return the recommended one. Raises RecipeError if the recipe
        samples nothing, FitError if no layout fits, MachineError for a CPU without a run."""
        recipe = self.vary([])
        if recipe.learns_from_rows or recipe.adapters:
            raise RecipeError(
                f"recipe `{recipe.name}` cannot be simulated",
                why="it trains several adapters, which are not simulated"
                if recipe.adapters
                else "it learns from rows and samples nothing: the dry run predicts its seconds",
                fix=f"miles launch --recipe {recipe.name} --on MACHINE --dry-run",
            )
        layouts = self._layouts(recipe)
        own = (max(1, recipe.rollout.max_staleness), recipe.rollout.order)
        for layout in layouts:
            self._try(layout, *((0, "prompts") if layout.colocated else own))
        if best := self._best_split():
            for layout in self._neighbouring_split(best, layouts):
                self._try(layout, *own)
            best = self._best_split() or best
            for setting in ASYNC:
                if setting != own:
                    self._try(best.layout, *setting)
        if not self.candidates:
            raise self._no_candidate_error(recipe)
        return self.recommended

    # ------------------------------------------------------------------ layouts

    def _layouts(self, recipe: Recipe) -> list[Layout]:
        per_node = devices_per_node(recipe, self.machine, Log())
        if per_node == 0:
            return [self._as_in_run(recipe)]
        found, refused = list[Layout](), list[MilesError]()
        for name in ("colocated", "split"):
            is_one = per_node * recipe.machine.nodes == 1 and name == "split"
            if recipe.engines.placement not in ("auto", name) or is_one:
                continue
            sets = [f"engines.placement={name}"]
            if name == "colocated":
                sets += ["rollout.max_staleness=0", "rollout.order=prompts"]
            try:
                found += self._planned(sets, colocated=name == "colocated")
            except (FitError, RecipeError) as error:
                self.skipped[name] = error.what
                refused.append(error)
        if not found and refused:
            raise refused[0]
        return found

    def _planned(self, sets: Sequence[str], *, colocated: bool) -> list[Layout]:
        """Return the layouts that the planner would choose for each number of engine devices.
        Raises FitError, RecipeError."""
        recipe = self.vary(sets)
        per_node = devices_per_node(recipe, self.machine, Log())
        choose_placement(recipe, per_node * recipe.machine.nodes)  # refuses what a launch refuses
        pairs = pairs_by_share(
            recipe,
            self.machine,
            self.facts,
            devices_per_node=per_node,
            colocated=colocated,
            size=WEIGHT_BYTES[choose_precision(recipe, self.machine, Log())],
            teachers=self.teachers,
        )
        return [self._of_pair(pair, per_node * recipe.machine.nodes) for pair in pairs.values()]

    def _best_split(self) -> Candidate | None:
        split = [one for one in self.candidates if not one.layout.colocated]
        return max(split, key=lambda one: one.outcome.samples_per_s, default=None)

    def _neighbouring_split(self, best: Candidate, layouts: Sequence[Layout]) -> list[Layout]:
        """Return the split halfway from the best one to its neighbour, with more engines if the
        trainer waits longer than engines are idle."""
        own, outcome = best.layout, best.outcome
        sign = 1 if outcome.trainer_wait > outcome.engines_idle else -1
        others = [
            one.engine_devices
            for one in layouts
            if not one.colocated and sign * (one.engine_devices - own.engine_devices) > 0
        ]
        if not others or not own.sets:
            return []
        near = min(others, key=lambda devices: abs(devices - own.engine_devices))
        num = (own.engine_devices + near) // 2 // own.tp
        sets = [own.sets[0], f"engines.num={num}", f"engines.tp={own.tp}"]
        is_new = num * own.tp not in (near, own.engine_devices)
        try:
            return self._planned(sets, colocated=False) if is_new else []
        except (FitError, RecipeError):
            return []

    def _of_pair(self, pair: TrainerEnginePair, num_devices: int) -> Layout:
        engines, colocated = pair.engines.layout, pair.space.colocated
        if self.measured is not None and self._applies(self.measured, pair):
            run, ratios = self.measured.run, hardware.factors(self.measured, pair)
            self.assume = self.assume.with_values(f"run {run}, over its prediction", **ratios)
        own = pair.trainer.layout.world_size
        taken = engines.num * engines.tp
        sets = ("engines.placement=colocated",)
        if not colocated:
            sets = (
                "engines.placement=split",
                f"engines.num={engines.num}",
                f"engines.tp={engines.tp}",
            )
        return Layout(
            name="colocated" if colocated else f"{taken} + {own}",
            sets=sets,
            speeds=hardware.predicted(pair, self.assume),
            tp=engines.tp,
            engine_devices=taken,
            trainer_devices=own,
            num_devices=num_devices,
            colocated=colocated,
        )

    def _applies(self, measured: Measured, pair: TrainerEnginePair) -> bool:
        """Return True if the run's speeds apply to this model on this machine."""
        forecast = measured.plan.forecast
        device, _ = spec_of(self.machine)
        is_device = forecast is not None and forecast.device == device.name
        return is_device and measured.is_of(pair.space.time.table)

    def _as_in_run(self, recipe: Recipe) -> Layout:
        if self.measured is None or self.measured.plan.device_kind != "cpu":
            raise MachineError(
                "a run on a CPU can only be simulated after a run",
                why="the seconds of a CPU are not predicted, and the cores of engines and trainer "
                "are the same",
                fix=[
                    f"miles simulate --recipe {recipe.name} --on 8xH100",
                    f"miles simulate --recipe {recipe.name} --from RUN   # a finished run here",
                ],
            )
        plan, run = self.measured.plan, self.measured.run
        if not self.measured.is_of(models.table(self.facts)):
            raise RecipeError(
                f"run {run} trained another model than recipe `{recipe.name}`",
                why="the seconds of a CPU are those of the run's own model",
                fix=f"miles simulate --recipe RECIPE --from {run}   # with that run's recipe",
            )
        return Layout(
            name=f"as in {run}",
            sets=(),
            speeds=hardware.of_run(self.measured),
            tp=plan.engines.tp,
            engine_devices=plan.engines.num * plan.engines.tp,
            trainer_devices=plan.trainer.world_size,
            num_devices=1,
            colocated=False,
        )

    # ------------------------------------------------------------------ candidates

    def _try(self, layout: Layout, staleness: int, order: Literal["prompts", "done"]) -> None:
        """Simulate a candidate, unless the recipe's other keys rule it out."""
        sets = (*layout.sets, f"rollout.max_staleness={staleness}", f"rollout.order={order}")
        try:
            recipe = self.vary(sets)
        except RecipeError as error:
            self.skipped[f"{layout.name}, staleness {staleness}, {order}"] = error.what
            return
        steps = self.steps or round(
            min(MAX_STEPS, max(MIN_STEPS, RESPONSES / recipe.sequences_per_step))
        )
        simulation = Simulation(
            self._settings(layout, recipe), self._lengths(recipe), steps, self.seed
        )
        outcome = simulation.run()
        hours = outcome.step_s * recipe.train.steps / 3600
        self.candidates.append(
            Candidate(
                layout=layout,
                recipe=recipe,
                sets=sets,
                outcome=outcome,
                hours=hours,
                gpu_hours=hours * layout.num_devices,
                simulation=simulation,
            )
        )

    def _lengths(self, recipe: Recipe) -> Lengths:
        longest = recipe.rollout.max_response_tokens
        own = self.measured.lengths.cut(longest) if self.measured is not None else None
        if own is not None and self.assume.response_tokens == own.mean:
            return own
        return LogNormal(
            mean=self.assume.response_tokens, sigma=self.assume.response_sigma, longest=longest
        )

    def _settings(self, layout: Layout, recipe: Recipe) -> Settings:
        assume, rollout, speeds = self.assume, recipe.rollout, layout.speeds
        mtbf_s = assume.mtbf_hours * 3600
        return Settings(
            num_engines=speeds.num_engines,
            speed=speeds.engine,
            train_token_s=speeds.train_token_s,
            publish_s=speeds.publish_s,
            prompts_per_step=rollout.prompts_per_step,
            samples_per_prompt=rollout.samples_per_prompt,
            prompt_tokens=assume.prompt_tokens,
            staleness=rollout.max_staleness,
            order=rollout.order,
            stale_groups=rollout.stale_groups,
            on_update=rollout.on_update,
            over_sampling=rollout.over_sampling,
            kept_share=assume.kept_share,
            turns=(int(assume.turns), assume.tool_s, assume.tool_sigma_s),
            straggler_share=assume.straggler_share,
            straggler_factor=assume.straggler_factor,
            failures=Failures(
                engine_mtbf_s=mtbf_s / layout.tp,
                trainer_mtbf_s=mtbf_s / layout.trainer_devices,
                restart_s=assume.restart_s,
                save_every=min(
                    recipe.checkpoint.every or recipe.train.steps,
                    recipe.fault.copy_every or recipe.train.steps,
                ),
            )
            if mtbf_s
            else None,
        )

    @property
    def recommended(self) -> Candidate:
        """Return the least stale of the candidates that are about as fast as the fastest; of
        equally stale ones the colocated one, then the fastest."""
        most = max(one.outcome.samples_per_s for one in self.candidates)
        return min(
            (one for one in self.candidates if one.outcome.samples_per_s * SIMILAR_FACTOR >= most),
            key=lambda one: (
                one.staleness,
                not one.layout.colocated,
                -one.outcome.samples_per_s,
            ),
        )

    def _no_candidate_error(self, recipe: Recipe) -> MilesError:
        return RecipeError(
            f"no candidate of recipe `{recipe.name}` can be simulated",
            why="; ".join(f"{name}: {why}" for name, why in self.skipped.items()),
            fix=f"miles launch --recipe {recipe.name} --dry-run   # what the recipe asks for",
        )


def reason(best: Candidate, others: Sequence[Candidate]) -> str:
    """Return why a candidate is recommended, in a sentence."""
    rate, idle = best.outcome.samples_per_s, best.outcome.engines_idle
    strict = [one for one in others if not one.staleness]
    text = f"{rate:.3g} samples/s; engines are idle {idle:.0%}, the trainer waits "
    text += f"{best.outcome.trainer_wait:.0%} of the time"
    if best.staleness and strict:
        fastest = max(one.outcome.samples_per_s for one in strict)
        text += f"; {rate / fastest:.2f} times the fastest on-policy candidate"
    faster = max(others, key=lambda one: one.outcome.samples_per_s)
    if (gain := faster.outcome.samples_per_s / rate - 1) >= MIN_GAIN:
        text += (
            f"; {faster.layout.name} with {faster.rollout} is only {gain:.1%} faster, and has "
            f"staleness {faster.outcome.staleness_mean:.1f} on average"
        )
    return text


def with_measured(assume: Assumptions, measured: Measured, recipe: Recipe) -> Assumptions:
    """Return the assumptions with the lengths of a run, cut where the recipe cuts them; values that
    the user set stay."""
    return assume.with_values(
        f"run {measured.run}",
        response_tokens=measured.lengths.cut(recipe.rollout.max_response_tokens).mean,
        prompt_tokens=measured.prompt_tokens,
        kept_share=measured.kept_share,
    )
