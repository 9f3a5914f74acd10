"""Implements `miles eval` with engines alone: evaluates checkpoints of a run that is not running, a
model that no run made, or a converted checkpoint. `miles env play --model` starts engines in the
same way to watch one episode."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING

from milescli.agents.environment import Game
from milescli.agents.replying import next_reply
from milescli.checkpoint.run_dir import RunDir, open_run
from milescli.checkpoint.run_lock import lock
from milescli.checkpoint.store import CheckpointStore, StoredCheckpoint
from milescli.cluster.nodes import find_nodes
from milescli.console.output import Output
from milescli.core.concurrency import in_thread
from milescli.core.errors import CheckpointError, FitError, MilesError, OutOfMemory
from milescli.core.events import EventBus
from milescli.core.types import ROLLOUT, Prompt, WeightVersion
from milescli.data.images import text_of
from milescli.models import ModelFacts
from milescli.plan.engines_alone import (
    REMOTE_SERVER_FIX,
    evaluation_recipe,
    plan_engines,
    with_smaller_caches,
)
from milescli.plan.on_cpu import context_length, longest_tokens
from milescli.plan.types import Plan
from milescli.recipe.agents import EnvironmentSettings
from milescli.recipe.data import row_rules
from milescli.recipe.distill import without_rewards, without_teachers
from milescli.recipe.load import BY_DEFAULT, QUERY_DEFAULTS, LoadedRecipe, override
from milescli.recipe.schema import Recipe
from milescli.recipe.section import refuse
from milescli.rollout.base import Outcome, Session
from milescli.rollout.environments import Step
from milescli.rollout.episode.episode import Episodes, evaluation_episodes
from milescli.runtime.evaluation.evaluator import measure_set
from milescli.runtime.evaluation.results import SetResult
from milescli.runtime.evaluation.sets import (
    EvalOptions,
    EvalSet,
    LoadedSet,
    load_set,
    reward_model_recipe,
    sets_of,
    sets_of_model,
)
from milescli.runtime.inputs.auxiliary_models import (
    reward_facts,
    without_policies,
    without_speculation,
)
from milescli.runtime.inputs.episode_parts import episode_parts
from milescli.runtime.inputs.model_facts import facts_of_recipe, planned_facts, require_positions
from milescli.runtime.inputs.run_inputs import (
    inputs_of_model,
    prepare_inputs,
    with_policies,
    with_reward_model,
)
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.runtime.prestart import Prestarted
    from milescli.runtime.recovery.engines import Engines


ALL = "all"
CHANGEABLE = ("machine", "eval", "data", "rollout", "run.seed")
"""Parts of a run's recipe that --set may change."""
Models = Iterator[tuple[int, Path]]
"""(step, Hugging Face folder) of each model of one shape; the folder is written on demand."""
EngineUse = Callable[..., Awaitable[Sequence[SetResult]]]
"""Uses engines that are ready; called like `_all_sets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModels:
    """Holds the weights that are evaluated with one start of the engines."""

    name: str
    """Name as the user would type it."""
    first_step: int = 0
    """Step of the model with which the engines start."""
    others: Models = field(default_factory=lambda: iter(()))
    """Models whose weights the engines get afterwards."""


def evaluate_run(
    path: Path,
    *,
    steps: str | None,
    eval_options: EvalOptions,
    environ: Mapping[str, str],
    output: Output,
    use_engines: EngineUse | None = None,
) -> list[SetResult]:
    """Evaluate checkpoints of a run that is not running, with engines and without a trainer; write
    samples and results to `eval/` of the run. Return one result for each step and set. `steps`: 20,
    or 0,20,40, or all; None: the newest. `use_engines` replaces the evaluation: then the run may be
    running, and nothing stays in its folder. Raises MilesError."""
    from milescli.conversion.base import store_of
    from milescli.platform.torch_wheel import require_wheel
    from milescli.recipe.resolved import load_resolved
    from milescli.runtime.planning import naming_memory_users, require_served_by
    from milescli.runtime.prestart import prestart_engines, prestart_ray
    from milescli.runtime.recovery.orphans import locked_without_orphans

    run = open_run(path)
    kept = load_resolved(run.recipe_file)
    loaded = override(
        kept, sets=eval_options.sets, flags=eval_options.flags, only=CHANGEABLE, environ=environ
    )
    sets = sets_of(without_teachers(loaded.recipe), eval_options)
    recipe = without_speculation(reward_model_recipe(sets))
    reward_facts(recipe)
    checkpoints = select_checkpoints(store_of(run.checkpoints, output=output), steps)
    facts = planned_facts(recipe)
    nodes = find_nodes(loaded, output=output)
    plan = Plan.read(run.plan_file)
    if not plan.engines.num:  # nothing was sampled in the run
        refuse(row_rules(recipe))
        try:
            with naming_memory_users(recipe, nodes.machine):
                plan = plan_engines(recipe, nodes.machine, facts, reward=reward_facts(recipe))
        except FitError as error:
            fixes = [_fix_for_run(fix, run.shown) for fix in error.fixes]
            raise type(error)(error.what, why=error.why, fix=fixes) from None
        require_served_by(plan, recipe, facts, has_adapter=False)
    plan = sized_for(engines_only(plan, num_policies=_roles_served(plan, recipe)), sets, facts)
    require_wheel(plan.device_kind)
    is_apart = use_engines is not None
    with (
        nullcontext() if is_apart else locked_without_orphans(run, output=output),
        prestart_engines(recipe, plan, facts, address=nodes.address) as engines_begun,
        prestart_ray(recipe, plan, nodes, engines_begun) as prestarted,
        _scratch_dir(run)
        if is_apart
        else TemporaryDirectory(prefix=".eval-", dir=run.path) as temporary,
    ):
        # torch is imported from here on, beside the warm process
        place = RunDir(Path(temporary)) if is_apart else run
        if is_apart:
            inputs = inputs_of_model(
                _with_model(kept.recipe, run.model_dir()), place, output=output
            )
        else:
            inputs = prepare_inputs(_trained_on(kept.recipe), run, output=output)
        inputs = with_reward_model(inputs, recipe, place, output=output)
        inputs = with_policies(inputs, recipe, place, output=output)
        loaded_sets = [load_set(one, place, inputs, output=output) for one in sets]
        nodes.require_shared(run.path)
        models = unpack_checkpoints(checkpoints, Path(temporary), inputs.model_dir, output=output)
        if plan.engine_format is not None:
            models = in_engine_format(models, plan, kept.recipe)
        step, folder = next(models)
        spec = RunSpec(
            run=place,
            recipe=recipe,
            plan=plan,
            nodes=nodes,
            inputs=replace(inputs, model_dir=folder),
            evaluated=[one.recipe for one in sets],
        )
        subject = EvaluatedModels(name=run.shown, first_step=step, others=models)
        return serve_and_evaluate(
            spec, loaded_sets, subject, prestarted, output=output, use_engines=use_engines
        )


@contextmanager
def _scratch_dir(run: RunDir) -> Iterator[str]:
    """Provide a locked folder within the run, for files that do not belong to it. It is removed at
    the end; after a failure its logs stay until the run is resumed or evaluated."""
    folder = Path(mkdtemp(prefix=".chat-", dir=run.path))
    with lock(RunDir(folder)):
        try:
            yield str(folder)
        except BaseException:
            for part in folder.iterdir():
                if part.is_dir() and part.name != "logs":
                    shutil.rmtree(part, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _with_model(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with the model of a Hugging Face folder, however it was made."""
    model = recipe.model.model_copy(update={"path": str(folder), "scratch": None})
    return recipe.model_copy(update={"model": model})


def _roles_served(plan: Plan, recipe: Recipe) -> int:
    """Return the number of engines for roles that other models play. Raises FitError if the run's
    plan has too few."""
    count = len(recipe.rollout.policies)
    if count >= plan.engines.num:
        raise FitError(
            f"{count} model{'s'[: count > 1]} for roles and the checkpoint need more engines",
            why=f"the run's plan has {plan.engines.num}",
            fix="write `endpoint` instead of `policy` in `rollout.roles`",
        )
    return count


def _trained_on(recipe: Recipe) -> Recipe:
    """Return the recipe that reads the run's training data, without teachers and reward model: an
    evaluation does not use them, and those of the run may no longer exist."""
    recipe = without_speculation(without_policies(without_rewards(without_teachers(recipe))))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"eval": None})})


def select_checkpoints(store: CheckpointStore, steps: str | None) -> list[StoredCheckpoint]:
    """Return the checkpoints that `steps` names, by step. Raises CheckpointError if one does not
    exist, or `steps` is not a list of steps."""
    if steps is None or (steps == ALL and not store.steps()):
        return [store.find(None)]
    if steps == ALL:
        return [store.find(step) for step in store.steps()]
    try:
        return [store.find(step) for step in sorted({int(part) for part in steps.split(",")})]
    except ValueError:
        raise CheckpointError(
            f"`{steps}` does not name checkpoints",
            why=f"complete checkpoints: {', '.join(map(str, store.steps())) or 'none'}",
            fix=["--steps all", f"--steps {','.join(map(str, store.steps()[-2:])) or 0}"],
        ) from None


def unpack_checkpoints(
    checkpoints: Sequence[StoredCheckpoint], into: Path, model_dir: Path, *, output: Output
) -> Models:
    """Yield each checkpoint as a Hugging Face folder below `into`. The first one stays, because the
    engines start with it; any other is removed when the next is requested."""
    from milescli.conversion.unpack import unpack

    for checkpoint in checkpoints:
        folder = into / checkpoint.path.name
        output.note(f"reading checkpoint step {checkpoint.step}")
        unpack(checkpoint.path, folder, model_dir=model_dir, read_back=False, output=output)
        yield checkpoint.step, folder
        if checkpoint is not checkpoints[0]:
            shutil.rmtree(folder)


def in_engine_format(models: Models, plan: Plan, recipe: Recipe) -> Models:
    """Yield each model in the number format in which the run's engines hold it."""
    from milescli.runtime.engine_folder import quantise_folder

    is_first = True
    for step, folder in models:
        converted = folder.with_name(f"{folder.name}-{plan.engine_format}")
        quantise_folder(folder, converted, plan=plan, recipe=recipe)
        yield step, converted
        if not is_first:
            shutil.rmtree(converted)
        is_first = False


def serve_and_evaluate(
    spec: RunSpec,
    loaded_sets: Sequence[LoadedSet],
    subject: EvaluatedModels,
    prestarted: Prestarted,
    *,
    output: Output,
    use_engines: EngineUse | None = None,
) -> list[SetResult]:
    """Start engines on the spec's model folder, evaluate all sets, repeat that with the weights of
    each further model, and stop the engines. `use_engines` replaces the evaluation."""
    from milescli.runtime.recovery.engine_keepers import keep_frozen, keep_scorer, warn_of_losses
    from milescli.runtime.recovery.engines import Engines
    from milescli.runtime.recovery.restarts import Repairs, Restarts, retry_start
    from milescli.runtime.recovery.supervise import StartWatch, StopSignals, run_watched
    from milescli.runtime.session import open_session

    results = list[SetResult]()
    output.note("starting engines")
    with open_session(spec, prestarted=prestarted, log_dir=spec.run.eval_log_dir()) as session:
        engines, probes = Engines(), [session.ray.check]

        async def work() -> None:
            await session.resources.take(timeout_s=spec.recipe.machine.start_timeout_s)
            probes.append(session.cluster.check_nodes)
            bus = EventBus([warn_of_losses(output.warn)])
            restarts = Restarts(limits=spec.recipe.fault, unit="response")
            repairs = Repairs(bus=bus, restarts=restarts, step=lambda: engines.num_answers)
            again = partial(retry_start, repairs=repairs)
            probes.append(
                StartWatch(
                    session.resources.token,
                    silence_s=spec.recipe.machine.silence_s,
                    bus=bus,
                    is_over=lambda: engines.fleet is not None,
                ).probe
            )
            fleet = await session.builder.start_engines(engines, retry_start=again)
            for name, served in {ROLLOUT: fleet, **engines.policies}.items():
                keep_frozen(served, name, engines, session.builder, repairs=repairs)
            keep_scorer(engines, session.builder, repairs=repairs)
            probes.append(engines.probe)
            use = partial(use_engines or _all_sets, spec, loaded_sets, engines, name=subject.name)
            results.extend(await use(step=subject.first_step, output=output))
            while (model := await in_thread(lambda: next(subject.others, None))) is not None:
                step, folder = model
                await fleet.load(folder, WeightVersion(len(results)))
                results.extend(await use(step=step, output=output))

        async def main() -> None:
            try:
                again = f"miles eval {shlex.quote(subject.name)}"
                signals = StopSignals(on_stop=lambda: False, resume_command=lambda: again)
                await run_watched(work(), probes, signals, cause_grace_s=session.cause_grace_s)
            finally:
                await engines.stop()
                await session.resources.release()

        try:
            asyncio.run(main())
        except OutOfMemory as error:  # its fixes are of a launch
            fixes = smaller_engines(spec, subject.name)
            raise OutOfMemory(error.what, why=error.why, fix=fixes) from None
    return results


def smaller_engines(spec: RunSpec, name: str) -> list[str]:
    """Return fixes that need less memory than the engines of an evaluation needed. `name`: what is
    evaluated, as the user would type it."""
    number = max(1, spec.plan.engines.max_running_requests // 4)
    fewer = f"--set engines.max_running_requests={number}   # fewer at once, slower"
    shown = "nvidia-smi" if spec.plan.device_kind == "cuda" else "ps aux --sort=-rss | head"
    return [
        _fix_for_run(fewer, name) if spec.run.plan_file.is_file() else fewer,
        f"{shown}   # what else holds memory there",
        REMOTE_SERVER_FIX,
    ]


def _fix_for_run(fix: str, name: str) -> str:
    """Return the fix in a form that works for a run: a run's engines are those of its plan, unless
    it is exported first."""
    key = fix.removeprefix("--set ").partition("=")[0]
    if not fix.startswith("--set ") or key.startswith(CHANGEABLE):
        return fix
    folder = shlex.quote(f"{Path(name).name}-hf")
    return f"miles export {shlex.quote(name)} --to {folder} && miles eval {folder} {fix}"


async def _all_sets(
    spec: RunSpec,
    loaded_sets: Sequence[LoadedSet],
    engines: Engines,
    *,
    name: str,
    step: int,
    output: Output,
) -> list[SetResult]:
    """Evaluate the sets one after the other, with the engines' current weights."""
    results = []
    for one in loaded_sets:
        recipe = one.set.recipe
        output.note(f"step {step}: {one.set.name}, {len(one.prompts)} prompts")
        episodes = episodes_of(spec, recipe, engines, output=output)
        results.append(
            await measure_set(one, episodes, run=spec.run, model=name, step=step, output=output)
        )
    return results


def episodes_of(spec: RunSpec, recipe: Recipe, engines: Engines, *, output: Output) -> Episodes:
    """Return episodes of the recipe's agent, sampled as its `eval` says."""
    assert engines.fleet is not None, "engines serve"
    parts = episode_parts(recipe, spec.inputs, engines, engine=engines.fleet, warn=output.warn)
    return evaluation_episodes(recipe, **parts)


@asynccontextmanager
async def parser_started(episodes: Episodes) -> AsyncIterator[None]:
    """Start the process that parses replies before the first reply, which would wait for its
    imports. Does not wait for it."""
    form = episodes.chat_form
    if form is None or form.parser is None:
        yield
        return
    started = asyncio.ensure_future(form.parser.parse("", ()))
    try:
        yield
    finally:
        started.cancel()
        with suppress(asyncio.CancelledError, MilesError):  # a reply says what is wrong with it
            await started


def engines_only(plan: Plan, *, num_policies: int = 0) -> Plan:
    """Return the plan with the same engines, the last `num_policies` for roles that other models
    play, and without the trainer's slots; nodes and devices are renumbered from 0."""
    kept = [replace(slot, trainer_rank=None) for slot in plan.slots if slot.engine is not None]
    nodes = sorted({slot.node for slot in kept})
    first = {node: min(slot.device for slot in kept if slot.node == node) for node in nodes}
    slots = [
        replace(slot, node=nodes.index(slot.node), device=slot.device - first[slot.node])
        for slot in kept
    ]
    return replace(plan, slots=slots, engines_apart=num_policies)


def sized_for(plan: Plan, sets: Sequence[EvalSet], facts: ModelFacts) -> Plan:
    """Return the plan with engines for the longest prompt and response of any set. Raises FitError
    if the model has too few positions for them."""
    largest = max((evaluation_recipe(one.recipe) for one in sets), key=longest_tokens)
    require_positions(largest, facts)
    layout, length = plan.engines, context_length(largest, facts)
    cache = layout.max_total_tokens
    roomy = replace(
        layout,
        context_length=max(layout.context_length, length),
        max_total_tokens=cache and max(cache, length),
    )
    return replace(plan, engines=roomy)


def within_positions(one: EvalSet, loaded: LoadedRecipe, facts: ModelFacts) -> EvalSet:
    """Return the set with lengths that fit the model's positions, unless the user set them."""
    recipe, positions = one.recipe, facts.max_position_embeddings
    prompt, response = recipe.data.max_prompt_tokens, recipe.eval.max_response_tokens
    given = {"data.max_prompt_tokens": prompt, "eval.max_response_tokens": response}
    ours = [
        loaded.origins[key].where == BY_DEFAULT and given[key] == value
        for key, value in QUERY_DEFAULTS.items()
    ]
    if not (0 < positions < longest_tokens(evaluation_recipe(recipe)) and all(ours)):
        return one
    data = recipe.data.model_copy(update={"max_prompt_tokens": positions // 2})
    evaluation = recipe.eval.model_copy(update={"max_response_tokens": positions // 2})
    recipe = recipe.model_copy(update={"data": data, "eval": evaluation})
    return replace(one, recipe=recipe)


def _num_answers(loaded: LoadedSet) -> int:
    return len(loaded.prompts) * loaded.set.recipe.eval.samples_per_prompt


def _longest(loaded: LoadedSet) -> int:
    """Return the number of tokens of the longest prompt and answer, if the agent does not change
    prompts; otherwise the recipe's limit."""
    recipe = evaluation_recipe(loaded.set.recipe)
    if recipe.rollout.agent != "single_turn":
        return longest_tokens(recipe)
    prompt = max((len(prompt.token_ids) for prompt in loaded.prompts), default=1)
    return prompt + recipe.rollout.max_response_tokens


def evaluate_model(
    model: str,
    *,
    folder: Path,
    eval_options: EvalOptions,
    environ: Mapping[str, str],
    output: Output,
    use_engines: EngineUse | None = None,
) -> list[SetResult]:
    """Evaluate a Hugging Face folder, a converted checkpoint or a name on the hub. `folder`: where
    `eval/`, logs and downloaded data go; `use_engines` replaces the evaluation.

    Returns one result for each set. Raises MilesError."""
    from milescli.platform.torch_wheel import require_wheel
    from milescli.runtime.planning import naming_memory_users, require_served_by
    from milescli.runtime.prestart import prestart_engines, prestart_ray

    loaded, sets = sets_of_model(model, eval_options, environ=environ)
    facts = facts_of_recipe(loaded.recipe.model)
    sets = [within_positions(one, loaded, facts) for one in sets]
    recipe = max(
        (one.recipe for one in sets), key=lambda one: longest_tokens(evaluation_recipe(one))
    )
    recipe = without_speculation(recipe)
    nodes = find_nodes(loaded, output=output)
    reward = reward_facts(reward_model_recipe(sets))
    with naming_memory_users(recipe, nodes.machine):
        plan = plan_engines(recipe, nodes.machine, facts, reward=reward)
    plan = sized_for(plan, sets, facts)
    require_served_by(plan, recipe, facts, has_adapter=False)
    require_wheel(plan.device_kind)
    folder.mkdir(parents=True, exist_ok=True)
    run = RunDir(folder.absolute())
    with (
        lock(run),
        prestart_engines(recipe, plan, facts, address=nodes.address) as engines_begun,
        prestart_ray(recipe, plan, nodes, engines_begun) as prestarted,
    ):
        # torch is imported from here on, beside the warm process
        inputs = inputs_of_model(recipe, run, output=output)
        inputs = with_reward_model(inputs, reward_model_recipe(sets), run, output=output)
        inputs = with_policies(inputs, recipe, run, output=output)
        loaded_sets = [load_set(one, run, inputs, output=output) for one in sets]
        nodes.require_shared(run.path, inputs.model_dir)
        if recipe.engines.max_total_tokens is None:
            answers, longest = max(map(_num_answers, loaded_sets)), max(map(_longest, loaded_sets))
            plan = with_smaller_caches(plan, answers=answers, longest=longest)
        spec = RunSpec(run=run, recipe=recipe, plan=plan, nodes=nodes, inputs=inputs)
        return serve_and_evaluate(
            spec,
            loaded_sets,
            EvaluatedModels(name=model),
            prestarted,
            output=output,
            use_engines=use_engines,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedEpisode:
    """Plays one episode of an environment with a model that engines serve (`miles env play --model
    RUN`): it is both the agent of the episode and an `EngineUse`. Nothing is measured, stored or
    learned."""

    settings: EnvironmentSettings
    prompt: Prompt
    """Prompt of the episode."""
    max_turns: int
    on_start: Callable[[str], None]
    """Called with what the model is shown first."""
    on_turn: Callable[[str, Step], None]
    """Called for each turn with the model's text and the environment's step."""

    async def __call__(self, prompt: Prompt, session: Session) -> Outcome:
        """Play as an Agent does. Raises AgentError if the environment fails."""
        game, step = Game(self.settings, prompt), Step()
        texts, total = list[str](), 0.0
        try:
            await game.begin()
            self.on_start(text_of(game.messages[-1]["content"]))
            while not step.ended and len(texts) < self.max_turns:
                if (reply := await next_reply(session, game.messages)) is None:
                    break
                texts.append(reply.message["content"])
                step = await game.act(texts[-1])
                total += step.reward
                self.on_turn(texts[-1], step)
        finally:
            await game.close()
        return Outcome(text="\n".join(texts), reward=total, is_cut=not step.ended)

    async def use_engines(
        self,
        spec: RunSpec,
        loaded_sets: Sequence[LoadedSet],
        engines: Engines,
        *,
        name: str,
        step: int,
        output: Output,
    ) -> list[SetResult]:
        """Play the episode once (an `EngineUse`). Raises AgentError, or what the engines raise."""
        recipe = loaded_sets[0].set.recipe
        episodes = episodes_of(spec, recipe, engines, output=output)
        output.note(f"{name}, step {step}, plays {self.settings.name}")
        episodes = replace(episodes, agent=self, agent_name="environment", retries=0)
        await episodes.play(self.prompt, sample_index=0, seed=recipe.run.seed)
        return []
