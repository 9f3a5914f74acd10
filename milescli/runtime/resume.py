"""`miles resume`: go on from the newest complete checkpoint, on this machine's layout, as if
nothing had happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.checkpoint.base_mark import require_base
from milescli.checkpoint.run_dir import RunDir, lock, open_run
from milescli.checkpoint.store import CheckpointStore
from milescli.cluster.node_loss import nodes_that_are_left
from milescli.core.driver_pipe import say
from milescli.core.errors import CheckpointError, RecipeError
from milescli.models.adapter import read_shape
from milescli.platform.torch_wheel import require_wheel
from milescli.recipe.load import override
from milescli.recipe.resolved import load_resolved
from milescli.runtime import drift
from milescli.runtime.environment_nodes import require_environments
from milescli.runtime.inputs import RunInputs, planned_facts, prepare
from milescli.runtime.planning import as_fetched, plan_without_plugins
from milescli.runtime.plugins import load_plugins
from milescli.runtime.prestart import prestart_engines, prestart_ray
from milescli.runtime.records import write_records
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
    from milescli.checkpoint.base import CheckpointManifest
    from milescli.checkpoint.store import StoredCheckpoint
    from milescli.console.output import Output
    from milescli.recipe.schema import Recipe
    from milescli.runtime.train import RunSummary


def resume(
    path: Path,
    *,
    steps: int | None,
    sets: list[str],
    address: str | None,
    environ: Mapping[str, str],
    output: Output,
) -> RunSummary:
    """Train on. `address`: of the Ray cluster, where it is another than before; `environ` may name
    it too. Raises CheckpointError where the run cannot be continued faithfully, RecipeError where
    nothing is left to do."""
    run = open_run(path)
    kept = load_resolved(run.recipe_file)
    flags = {"train.steps": f"--steps {steps}"} if steps is not None else {}
    if address is not None:
        flags["machine.address"] = f"--address {address}"
    loaded = override(kept, sets=sets, flags=flags, only=drift.MAY_CHANGE, environ=environ)
    with lock(run):
        say(run=run.path)
        for line in drift.edited_keys(run, kept, may_change=drift.MAY_CHANGE):
            output.warn(f"recipe.yaml was edited: {line}")
        checkpoint = _checkpoint_of(run, loaded.recipe, output=output)
        if checkpoint is not None:
            _refuse_if_done(checkpoint.step, loaded.recipe.train.steps, path)
        wished = loaded
        loaded, nodes = nodes_that_are_left(loaded, output=output)
        facts = planned_facts(loaded.recipe)
        plan = plan_without_plugins(loaded, nodes.machine, facts=facts)
        require_wheel(plan.device_kind)
        begun = prestart_engines(loaded.recipe, plan, facts, address=nodes.address)
        with (
            begun as engines_begun,
            prestart_ray(loaded.recipe, plan, nodes, engines_begun) as prestarted,
        ):
            # torch is imported from here on, beside the warm process
            from milescli.runtime.train import train

            load_plugins(loaded.recipe)
            inputs = prepare(loaded.recipe, run, output=output)
            plan = as_fetched(plan, loaded, nodes.machine, inputs.facts, output=output)
            nodes.require_shared(run.path, inputs.model_dir, *inputs.teacher_dirs)
            require_environments(loaded.recipe, inputs, nodes)
            spec = RunSpec(
                run=run,
                recipe=loaded.recipe,
                plan=plan,
                nodes=nodes,
                inputs=inputs,
                checkpoint=checkpoint,
                wished=None if loaded.recipe.machine == wished.recipe.machine else wished,
            )
            if checkpoint is not None:
                _refuse_other_prompts(checkpoint.manifest, inputs, path)
                if (adapter := read_shape(checkpoint.path)) is not None:
                    require_base(adapter[1], inputs.model_dir, checkpoint=checkpoint.path)
                _tell_drift(spec, output=output)
                output.note(f"going on from step {checkpoint.step}")
            write_records(spec, wished)
            return train(spec, prestarted=prestarted, output=output)


def _checkpoint_of(run: RunDir, recipe: Recipe, *, output: Output) -> StoredCheckpoint | None:
    """The newest one that is whole; None where none was ever complete. Raises CheckpointError where
    none is whole any more."""
    store = CheckpointStore(run.checkpoints)
    checkpoint, damages = store.newest_whole()
    if checkpoint is None:
        output.warn(f"run {run.name} has no complete checkpoint: it begins again from the start")
        return None
    for damage in damages:
        output.warn(f"{damage.what}: {damage.why}")
    if damages:
        output.warn(f"the run goes back to the checkpoint before, step {checkpoint.step}")
    if recipe.keeps_reference or recipe.caches_reference:
        store.find(recipe.reference_step(checkpoint.step))  # refused before a device is taken
    return checkpoint


def _refuse_if_done(step: int, num_steps: int, path: Path) -> None:
    if step >= num_steps:
        raise RecipeError(
            f"run {path.name} has done all its {num_steps} steps",
            why=f"its newest checkpoint is step {step}",
            fix=[f"miles resume {path} --steps {2 * num_steps}", f"miles export {path} --to DIR"],
        )


def _tell_drift(spec: RunSpec, *, output: Output) -> None:
    now = drift.surroundings(spec.nodes.machine)
    for line in drift.told(drift.read_record(spec.run), now, plan=spec.plan, run=spec.run):
        output.warn(f"since the last attempt: {line}")


def _refuse_other_prompts(manifest: CheckpointManifest, inputs: RunInputs, path: Path) -> None:
    if inputs.data_sha256 != manifest.data_sha256:
        raise CheckpointError(
            "the training prompts are not those of the checkpoint",
            why=f"{inputs.reports['prompts'].path} has SHA-256 {inputs.data_sha256[:12]}..., "
            f"the checkpoint saw {manifest.data_sha256[:12]}...",
            fix=[
                "put the file back as it was",
                f"miles launch --recipe {path}/recipe.yaml --name {path.name}-new   "
                "# a new run on the new prompts",
            ],
        )
