"""`miles eval`: a checkpoint of a run that is not running, measured with engines alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from milescli.core.errors import DataError
from milescli.core.events import EvalDone
from milescli.plan.types import Plan
from milescli.recipe.schema import Recipe
from milescli.recipe.section import Section
from milescli.recipe.train import Distill
from milescli.rollout.episode import evaluation_episodes
from milescli.runtime.evaluator import Evaluator
from milescli.runtime.scorers import scorer_of
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.console.output import Output
    from milescli.runtime.prestart import Prestarted


def evaluate_run(
    path: Path,
    *,
    step: int | None,
    num_prompts: int | None,
    data: Path | None,
    address: str | None,
    environ: Mapping[str, str],
    output: Output,
) -> EvalDone:
    """Evaluate a checkpoint of a run that is not running: engines alone, no trainer. Samples go
    to `eval/` of the run. `address`: of the Ray cluster, where it is another than the run's."""
    from milescli.checkpoint.run_dir import lock, open_run
    from milescli.checkpoint.store import CheckpointStore
    from milescli.cluster.nodes import find_nodes
    from milescli.platform.torch_wheel import require_wheel
    from milescli.recipe.check_rows import check_rows
    from milescli.recipe.load import override
    from milescli.recipe.resolved import load_resolved
    from milescli.runtime.inputs import planned_facts, prepare
    from milescli.runtime.planning import plan_without_plugins
    from milescli.runtime.prestart import prestart_engines, prestart_ray

    run = open_run(path)
    flags = {"machine.address": f"--address {address}"} if address else {}
    loaded = override(
        load_resolved(run.recipe_file), sets=[], flags=flags, only=("machine",), environ=environ
    )
    recipe = _with_data(loaded.recipe, data, num_prompts)
    checkpoint = CheckpointStore(run.checkpoints).find(step)
    facts = planned_facts(recipe)
    nodes = find_nodes(loaded, output=output)
    plan = Plan.from_json(run.plan_file.read_text())
    if not plan.engines.num:  # nothing was sampled in the run
        check_rows(recipe)
        plan = plan_without_plugins(replace(loaded, recipe=recipe), nodes.machine, facts=facts)
    plan = engines_only(plan)
    require_wheel(plan.device_kind)
    with (
        lock(run),
        prestart_engines(recipe, plan, facts, address=nodes.address) as engines_begun,
        prestart_ray(recipe, plan, nodes, engines_begun) as prestarted,
        TemporaryDirectory(prefix=".eval-", dir=run.path) as temporary,
    ):
        # torch is imported from here on, beside the warm process
        from milescli.conversion.unpack import unpack

        inputs = prepare(recipe, run, output=output)
        nodes.require_shared(run.path)
        model_dir = Path(temporary) / "model"
        output.note(f"reading checkpoint step {checkpoint.step}")
        unpack(checkpoint.path, model_dir, model_dir=inputs.model_dir, read_back=False)
        output.note("starting engines")
        return _serve_and_evaluate(
            RunSpec(
                run=run,
                recipe=recipe,
                plan=plan,
                nodes=nodes,
                inputs=replace(inputs, model_dir=model_dir),
                checkpoint=checkpoint,
            ),
            prestarted,
        )


def _serve_and_evaluate(spec: RunSpec, prestarted: Prestarted) -> EvalDone:
    """Start engines on the spec's model folder, evaluate, stop them."""
    from milescli.runtime.build import Engines
    from milescli.runtime.session import open_session
    from milescli.runtime.supervise import StopSignals, run_watched

    recipe, inputs, done = spec.recipe, spec.inputs, list[EvalDone]()
    with open_session(spec, prestarted=prestarted, log_dir=spec.run.eval_log_dir()) as session:
        engines, probes = Engines(), []

        async def work() -> None:
            await session.resources.take(timeout_s=recipe.machine.start_timeout_s)
            probes.append(session.cluster.check_nodes)
            fleet = await session.builder.start_engines(engines)
            probes.extend(engines.probes)
            episodes = evaluation_episodes(
                recipe,
                engine=fleet,
                scorer=scorer_of(recipe, engines.scores),
                decode=inputs.tokenizer.decode,
                vocab_size=inputs.facts.vocab_size,
            )
            evaluator = Evaluator(
                recipe=recipe,
                prompts=inputs.heldout,
                episodes=episodes,
                folder=spec.run.eval_dir,
            )
            done.append(await evaluator.run(spec.first_step))

        async def main() -> None:
            try:
                command = f"miles eval {spec.run.shown}"
                signals = StopSignals(on_stop=lambda: False, again=command)
                await run_watched(work(), probes, signals, cause_grace_s=session.cause_grace_s)
            finally:
                await engines.stop()
                await session.resources.release()

        asyncio.run(main())
    return done[0]


def engines_only(plan: Plan) -> Plan:
    """The same engines, with the trainer's slots left out; nodes and devices are counted from 0
    again."""
    kept = [replace(slot, trainer_rank=None) for slot in plan.slots if slot.engine is not None]
    nodes = sorted({slot.node for slot in kept})
    first = {node: min(slot.device for slot in kept if slot.node == node) for node in nodes}
    slots = [
        replace(slot, node=nodes.index(slot.node), device=slot.device - first[slot.node])
        for slot in kept
    ]
    return replace(plan, slots=slots)


def _with_data(recipe: Recipe, data: Path | None, num_prompts: int | None) -> Recipe:
    changes: dict[str, Section] = (
        {"data": recipe.data.model_copy(update={"eval": str(data.absolute())})} if data else {}
    )
    if num_prompts is not None:
        changes["eval"] = recipe.eval.model_copy(update={"num_prompts": num_prompts})
    # nobody is taught here, and a teacher may be gone
    changes["train"] = recipe.train.model_copy(update={"distill": Distill()})
    recipe = recipe.model_copy(update=changes)
    if recipe.data.eval is None:
        raise DataError(
            "this run has no held-out prompts",
            why="its recipe leaves `data.eval` out",
            fix="--data FILE.jsonl",
        )
    return recipe
