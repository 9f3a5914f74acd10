"""`miles eval`: checkpoints of a run that is not running, measured with engines alone."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from milescli.core.concurrency import in_thread
from milescli.core.errors import CheckpointError, FitError
from milescli.core.types import ROLLOUT, WeightVersion
from milescli.models import ModelFacts
from milescli.plan.on_cpu import context_length, longest_tokens
from milescli.plan.types import Plan
from milescli.recipe.distill import unscored, untaught
from milescli.recipe.schema import Recipe
from milescli.rollout.episode import Episodes, evaluation_episodes
from milescli.runtime.chat_forms import chat_form_of
from milescli.runtime.draft_model import without_speculation
from milescli.runtime.eval_records import SetResult
from milescli.runtime.eval_result import measured
from milescli.runtime.eval_sets import (
    EvalSet,
    EvalWish,
    LoadedSet,
    asking_reward_model,
    load_set,
    sets_of,
)
from milescli.runtime.failures import FirstFew
from milescli.runtime.reward_model import reward_facts
from milescli.runtime.role_policies import by_role, without_policies
from milescli.runtime.scorers import scorer_of
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.checkpoint.store import CheckpointStore, StoredCheckpoint
    from milescli.console.output import Output
    from milescli.runtime.engines import Engines
    from milescli.runtime.prestart import Prestarted

ALL = "all"
CHANGEABLE = ("machine", "eval", "data", "rollout", "run.seed")
"""What --set may change of a run's recipe."""
Models = Iterator[tuple[int, Path]]
"""(step, Hugging Face folder) of each model of one shape, made when it is asked for."""
Ask = Callable[..., Awaitable[Sequence[SetResult]]]
"""What is done with engines that serve: as `_all_sets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated by one start of engines."""

    name: str
    """As the user would type it."""
    first_step: int = 0
    """Of the model that the engines are started with."""
    others: Models = field(default_factory=lambda: iter(()))
    """Whose weights they are given after it."""


def evaluate_run(
    path: Path,
    *,
    steps: str | None,
    wish: EvalWish,
    environ: Mapping[str, str],
    output: Output,
    ask: Ask | None = None,
) -> list[SetResult]:
    """Evaluate checkpoints of a run that is not running: engines alone, no trainer. Samples and
    results go to `eval/` of the run.

    `steps`: 20, or 0,20,40, or all; None: the newest. `ask`: what else than to
    measure the sets. One result for each step and set, in this order. Raises MilesError.
    """
    from milescli.checkpoint.run_dir import open_run
    from milescli.cluster.nodes import find_nodes
    from milescli.conversion.watching import store_of
    from milescli.platform.torch_wheel import require_wheel
    from milescli.recipe.data import row_rules
    from milescli.recipe.load import override
    from milescli.recipe.resolved import load_resolved
    from milescli.recipe.section import refuse
    from milescli.runtime.inputs import (
        planned_facts,
        prepare,
        with_policies,
        with_reward_model,
    )
    from milescli.runtime.left_behind import taken_over
    from milescli.runtime.planning import plan_without_plugins
    from milescli.runtime.prestart import prestart_engines, prestart_ray

    run = open_run(path)
    kept = load_resolved(run.recipe_file)
    loaded = override(kept, sets=wish.sets, flags=wish.flags, only=CHANGEABLE, environ=environ)
    sets = sets_of(untaught(loaded.recipe), wish)
    recipe = without_speculation(asking_reward_model(sets))
    reward_facts(recipe)
    store = store_of(run.checkpoints, output=output)
    checkpoints = chosen_checkpoints(store, steps)
    facts = planned_facts(recipe)
    nodes = find_nodes(loaded, output=output)
    plan = Plan.from_json(run.plan_file.read_text())
    if not plan.engines.num:  # nothing was sampled in the run
        refuse(row_rules(recipe))
        asking = replace(loaded, recipe=recipe)
        plan = plan_without_plugins(asking, nodes.machine, facts=facts, serves_merged=True)
    plan = with_room(engines_only(plan, num_policies=_roles_served(plan, recipe)), sets, facts)
    require_wheel(plan.device_kind)
    with (
        taken_over(run, output=output),
        prestart_engines(recipe, plan, facts, address=nodes.address) as engines_begun,
        prestart_ray(recipe, plan, nodes, engines_begun) as prestarted,
        TemporaryDirectory(prefix=".eval-", dir=run.path) as temporary,
    ):
        # torch is imported from here on, beside the warm process
        inputs = prepare(_trained_on(kept.recipe), run, output=output)
        inputs = with_reward_model(inputs, recipe, run, output=output)
        inputs = with_policies(inputs, recipe, run, output=output)
        asked = [load_set(one, run, inputs, output=output) for one in sets]
        nodes.require_shared(run.path)
        models = unpacked(checkpoints, Path(temporary), inputs.model_dir, output=output)
        step, folder = next(models)
        spec = RunSpec(
            run=run,
            recipe=recipe,
            plan=plan,
            nodes=nodes,
            inputs=replace(inputs, model_dir=folder),
        )
        subject = Subject(name=run.shown, first_step=step, others=models)
        return serve_and_evaluate(spec, asked, subject, prestarted, output=output, ask=ask)


def _roles_served(plan: Plan, recipe: Recipe) -> int:
    """Engines for roles that other models play. Raises FitError where the run's plan has too
    few."""
    count = len(recipe.rollout.policies)
    if count >= plan.engines.num:
        raise FitError(
            f"{count} model{'s'[: count > 1]} for roles and the checkpoint need more engines",
            why=f"the run's plan has {plan.engines.num}",
            fix="write `endpoint` in the place of `policy` in `rollout.roles`",
        )
    return count


def _trained_on(recipe: Recipe) -> Recipe:
    """What is read of the run beside the sets; nobody is taught or scored by it here, and who did
    may be gone."""
    recipe = without_speculation(without_policies(unscored(untaught(recipe))))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"eval": None})})


def chosen_checkpoints(store: CheckpointStore, steps: str | None) -> list[StoredCheckpoint]:
    """By step. Raises CheckpointError where one is not there, or `steps` is no list of steps."""
    if steps is None or (steps == ALL and not store.steps()):
        return [store.find(None)]
    if steps == ALL:
        return [store.find(step) for step in store.steps()]
    try:
        return [store.find(step) for step in sorted({int(part) for part in steps.split(",")})]
    except ValueError:
        raise CheckpointError(
            f"`{steps}` names no checkpoints",
            why=f"complete: {', '.join(map(str, store.steps())) or 'none'}",
            fix=["--steps all", f"--steps {','.join(map(str, store.steps()[-2:])) or 0}"],
        ) from None


def unpacked(
    checkpoints: Sequence[StoredCheckpoint], into: Path, model_dir: Path, *, output: Output
) -> Models:
    """Each as a folder below `into`. The first stays, which engines are started with; any other is
    removed when the next is asked for."""
    from milescli.conversion.unpack import unpack

    for checkpoint in checkpoints:
        folder = into / checkpoint.path.name
        output.note(f"reading checkpoint step {checkpoint.step}")
        unpack(checkpoint.path, folder, model_dir=model_dir, read_back=False, output=output)
        yield checkpoint.step, folder
        if checkpoint is not checkpoints[0]:
            shutil.rmtree(folder)


def serve_and_evaluate(
    spec: RunSpec,
    asked: Sequence[LoadedSet],
    subject: Subject,
    prestarted: Prestarted,
    *,
    output: Output,
    ask: Ask | None = None,
) -> list[SetResult]:
    """Start engines on the spec's model folder, ask all sets, then the same with the weights of
    each further model, and stop them. `ask`: what is done instead."""
    from milescli.core.events import EventBus
    from milescli.runtime.engines import Engines
    from milescli.runtime.healing import keep_frozen, keep_scorer, lost_told
    from milescli.runtime.restarts import Repairs, Restarts, until_started
    from milescli.runtime.session import open_session
    from milescli.runtime.start_watch import StartWatch
    from milescli.runtime.supervise import StopSignals, run_watched

    results = list[SetResult]()
    output.note("starting engines")
    with open_session(spec, prestarted=prestarted, log_dir=spec.run.eval_log_dir()) as session:
        engines, probes = Engines(), [session.ray.check]

        async def work() -> None:
            await session.resources.take(timeout_s=spec.recipe.machine.start_timeout_s)
            probes.append(session.cluster.check_nodes)
            bus = EventBus([lost_told(output.warn)])
            repairs = Repairs(bus=bus, restarts=Restarts(limits=spec.recipe.fault))
            again = partial(until_started, repairs=repairs)
            probes.append(
                StartWatch(
                    session.resources.token,
                    silence_s=spec.recipe.machine.silence_s,
                    bus=bus,
                    is_over=lambda: engines.fleet is not None,
                ).probe
            )
            fleet = await session.builder.start_engines(engines, until_started=again)
            for name, served in {ROLLOUT: fleet, **engines.policies}.items():
                keep_frozen(served, name, engines, session.builder, repairs=repairs)
            keep_scorer(engines, session.builder, repairs=repairs)
            probes.append(engines.probe)
            asking = partial(ask or _all_sets, spec, asked, engines, name=subject.name)
            results.extend(await asking(step=subject.first_step, output=output))
            while (model := await in_thread(lambda: next(subject.others, None))) is not None:
                step, folder = model
                await fleet.load(folder, WeightVersion(len(results)))
                results.extend(await asking(step=step, output=output))

        async def main() -> None:
            try:
                again = f"miles eval {subject.name}"
                signals = StopSignals(on_stop=lambda: False, again=again)
                await run_watched(work(), probes, signals, cause_grace_s=session.cause_grace_s)
            finally:
                await engines.stop()
                await session.resources.release()

        asyncio.run(main())
    return results


async def _all_sets(
    spec: RunSpec,
    asked: Sequence[LoadedSet],
    engines: Engines,
    *,
    name: str,
    step: int,
    output: Output,
) -> list[SetResult]:
    """One after the other, by the weights that the engines hold."""
    results = []
    for one in asked:
        recipe = one.set.recipe
        output.note(f"step {step}: {one.set.name}, {len(one.prompts)} prompts")
        episodes = episodes_of(spec, recipe, engines, output=output)
        results.append(
            await measured(one, episodes, run=spec.run, model=name, step=step, output=output)
        )
    return results


def episodes_of(spec: RunSpec, recipe: Recipe, engines: Engines, *, output: Output) -> Episodes:
    """Of the recipe's agent, sampled as its `eval` says."""
    assert engines.fleet is not None, "engines serve"
    return evaluation_episodes(
        recipe,
        engine=engines.fleet,
        scorer=scorer_of(recipe, engines.scores),
        decode=spec.inputs.tokenizer.decode,
        vocab_size=spec.inputs.facts.vocab_size,
        chat_form=chat_form_of(recipe, spec.inputs.tokenizer),
        policies=by_role(recipe, engines.policies),
        tell=FirstFew(output.warn),
    )


def engines_only(plan: Plan, *, num_policies: int = 0) -> Plan:
    """The same engines, the last `num_policies` for roles that other models play, with the
    trainer's slots left out; nodes and devices are counted from 0 again."""
    kept = [replace(slot, trainer_rank=None) for slot in plan.slots if slot.engine is not None]
    nodes = sorted({slot.node for slot in kept})
    first = {node: min(slot.device for slot in kept if slot.node == node) for node in nodes}
    slots = [
        replace(slot, node=nodes.index(slot.node), device=slot.device - first[slot.node])
        for slot in kept
    ]
    return replace(plan, slots=slots, engines_apart=num_policies)


def with_room(plan: Plan, sets: Sequence[EvalSet], facts: ModelFacts) -> Plan:
    """The same engines, which hold the longest prompt and response of any set. Raises FitError
    where the model has no positions for them."""
    largest = max(sets, key=lambda one: longest_tokens(one.recipe))
    longest, positions = longest_tokens(largest.recipe), facts.max_position_embeddings
    if positions and longest > positions:
        prompt = largest.recipe.data.max_prompt_tokens
        raise FitError(
            f"prompts and responses of `{largest.name}` do not fit into the model's positions",
            why=f"data.max_prompt_tokens {prompt} + {longest - prompt} of a response = {longest}; "
            f"the model has {positions}",
            fix=f"--set eval.max_response_tokens={max(1, positions - prompt)}",
        )
    layout, length = plan.engines, context_length(largest.recipe, facts)
    cache = layout.max_total_tokens
    roomy = replace(
        layout,
        context_length=max(layout.context_length, length),
        max_total_tokens=cache and max(cache, length),
    )
    return replace(plan, engines=roomy)
