"""Implements `miles resume`: continues a run from its newest complete checkpoint, on this machine's
layout, as if it had not been interrupted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.backends.stores.store import StoreError
from milescli.checkpoint.base import CheckpointManifest
from milescli.checkpoint.run_dir import RunDir, open_run
from milescli.checkpoint.store import StoredCheckpoint
from milescli.checkpoint.weight_files import require_base
from milescli.cluster.node_loss import remaining_nodes
from milescli.console.output import Output
from milescli.conversion.base import store_of
from milescli.core.driver_pipe import report_to_parent
from milescli.core.errors import CheckpointError, RecipeError
from milescli.models.adapter import read_shape
from milescli.platform.torch_wheel import require_wheel
from milescli.recipe.load import override
from milescli.recipe.resolved import load_resolved
from milescli.recipe.schema import Recipe
from milescli.recipe.several import with_common_steps
from milescli.runtime.inputs.auxiliary_models import require_weight_store
from milescli.runtime.inputs.model_facts import planned_facts
from milescli.runtime.inputs.plugins import check_plugins_quickly
from milescli.runtime.inputs.quick_checks import require_alerts
from milescli.runtime.inputs.run_inputs import RunInputs
from milescli.runtime.planning import plan_without_plugins
from milescli.runtime.preparing import ITSELF, Recipes, adapter_runs, prepare_all
from milescli.runtime.prestart import prestart_engines, prestart_ray
from milescli.runtime.recording import run_records
from milescli.runtime.recording.run_records import write_records
from milescli.runtime.recording.tracking import require_tracking
from milescli.runtime.recovery.mirror import require_mirror
from milescli.runtime.recovery.orphans import locked_without_orphans
from milescli.runtime.recovery.stops import recording_stop
from milescli.runtime.spec import RunSpec

if TYPE_CHECKING:
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
    """Continue to train. `address`: of the Ray cluster, if it has changed; `environ` may name it
    too. Raises CheckpointError if the run cannot be continued faithfully, RecipeError if all steps
    are done."""
    run = open_run(path)
    recorded = load_resolved(run.recipe_file)
    flags = {"train.steps": f"--steps {steps}"} if steps is not None else {}
    if address is not None:
        flags["machine.address"] = f"--address {address}"
    loaded = override(
        recorded, sets=sets, flags=flags, only=run_records.MAY_CHANGE, environ=environ
    )
    if steps is not None:
        loaded = with_common_steps(loaded)
    with (
        locked_without_orphans(run, output=output),
        recording_stop(run, num_steps=loaded.recipe.train.steps),
    ):
        report_to_parent(run=run.path)
        for line in run_records.edited_keys(run, recorded, may_change=run_records.MAY_CHANGE):
            output.warn(f"recipe.yaml was edited: {line}")
        full, recipes = loaded, Recipes.of(loaded)
        with adapter_runs(run, recipes) as runs, ExitStack() as stack:
            pasts, are_done = _start_checkpoints(run, runs, recipes, output=output)
            require_tracking(loaded.recipe.run)
            _look_at_mirror(loaded.recipe, run, output=output)
            require_weight_store(loaded.recipe, run)
            for doubt in require_alerts(loaded.recipe.run):
                output.warn(doubt)
            loaded, nodes = remaining_nodes(loaded, output=output)
            recipes = Recipes.of(loaded).without(are_done)
            facts = planned_facts(loaded.recipe)
            for one in recipes.learned:
                check_plugins_quickly(one.recipe)
            plan = plan_without_plugins(recipes.planned, nodes.machine, facts=facts)
            require_wheel(plan.device_kind)
            prestart = prestart_engines(loaded.recipe, plan, facts, address=nodes.address)
            engines_begun = stack.enter_context(prestart)
            # torch is imported from here on, beside the warm process
            recipes = recipes.checked(facts, output=output)
            ray_begun = prestart_ray(loaded.recipe, plan, nodes, engines_begun)
            prestarted = stack.enter_context(ray_begun)
            from milescli.runtime.train import train

            made = prepare_all(
                recipes, runs, run=run, plan=plan, nodes=nodes, checkpoints=pasts, output=output
            )
            spec = RunSpec(
                run=run,
                recipe=loaded.recipe,
                plan=made.plan,
                nodes=nodes,
                inputs=made.inputs,
                past=pasts.get(ITSELF),
                full_recipe=None if loaded.recipe.machine == full.recipe.machine else full,
                adapters=made.adapters,
            )
            for name, one in (spec.adapters or {ITSELF: spec}).items():
                _require_same(one, path, name=name, output=output)
            if any(pasts.values()):
                _warn_of_changes(spec, output=output)
            write_records(spec, full)
            return train(spec, prestarted=prestarted, output=output)


def _start_checkpoints(
    run: RunDir, runs: Mapping[str, RunDir], recipes: Recipes, *, output: Output
) -> tuple[dict[str, StoredCheckpoint | None], list[str]]:
    """Return the checkpoint from which the run, or each of its adapters, continues; and the
    adapters that have done all their steps. Raises as `_checkpoint_of`, and RecipeError if all
    adapters have."""
    learned = recipes.each or {ITSELF: recipes.loaded}
    pasts = {
        name: _checkpoint_of(runs.get(name, run), one.recipe, output=output)
        for name, one in learned.items()
    }
    ahead = {
        name: (past.step if past is not None else 0, learned[name].recipe.train.steps)
        for name, past in pasts.items()
    }
    are_done = [name for name, (done, steps) in ahead.items() if done >= steps]
    if len(are_done) == len(ahead):
        _refuse_as_done(*max(ahead.values()), run)
    for name in are_done:
        output.note(f"{name} has completed all {ahead[name][1]} steps")
    return pasts, are_done


def _look_at_mirror(recipe: Recipe, run: RunDir, *, output: Output) -> None:
    """Warn if the store cannot be written now: nobody may be watching when the run resumes. Raises
    RecipeError if it holds another run, StoreError if its package is not installed."""
    try:
        require_mirror(recipe, run)
    except StoreError as error:
        if isinstance(error.__cause__, ImportError):
            raise
        output.warn(f"checkpoints cannot be copied now: {error.what}: {error.why}")


def _require_same(spec: RunSpec, path: Path, *, name: str, output: Output) -> None:
    """Raise CheckpointError if the inputs differ from those that the run has learned from. `name`:
    of the adapter, if the run has several."""
    if (checkpoint := spec.past) is None:
        return
    _refuse_other_prompts(checkpoint.manifest, spec.inputs, path)
    if (adapter := read_shape(checkpoint.path)) is not None:
        require_base(adapter[1], spec.inputs.model_dir, checkpoint=checkpoint.path)
    who = f"{name}: " if name else ""
    done = checkpoint.manifest.warmup_steps
    where = f"step {checkpoint.step}" if done is None else f"step {done} of the warm-up"
    output.note(f"{who}continuing from {where}")


def _checkpoint_of(run: RunDir, recipe: Recipe, *, output: Output) -> StoredCheckpoint | None:
    """Return the newest intact checkpoint; None if none was ever complete. Raises CheckpointError
    if none is intact any more."""
    store = store_of(run.checkpoints, output=output)
    store.put_back()
    checkpoint, damages = store.newest_intact()
    if checkpoint is None:
        output.warn(f"run {run.name} has no complete checkpoint, so it starts from the beginning")
        return None
    for damage in damages:
        output.warn(f"{damage.what}: {damage.why}")
    if damages:
        output.warn(f"the run continues from the previous checkpoint, step {checkpoint.step}")
    if recipe.keeps_reference or recipe.caches_reference:
        store.find(recipe.reference_step(checkpoint.step))  # refused before a device is taken
    return checkpoint


def _refuse_as_done(step: int, num_steps: int, run: RunDir) -> None:
    raise RecipeError(
        f"run {run.name} has completed all {num_steps} steps",
        why=f"its newest checkpoint is step {step}",
        fix=[
            f"miles resume {run.typed} --steps {2 * num_steps}",
            f"miles export {run.typed} --to DIR",
        ],
    )


def _warn_of_changes(spec: RunSpec, *, output: Output) -> None:
    now = run_records.run_conditions(spec.nodes.machine)
    for line in run_records.changes_since(
        run_records.read_record(spec.run), now, plan=spec.plan, run=spec.run
    ):
        output.warn(f"since the last attempt: {line}")


def _refuse_other_prompts(manifest: CheckpointManifest, inputs: RunInputs, path: Path) -> None:
    if inputs.data_sha256 != manifest.data_sha256:
        raise CheckpointError(
            "the training prompts differ from those of the checkpoint",
            why=f"{inputs.reports['prompts'].path} has SHA-256 {inputs.data_sha256[:12]}..., but "
            f"the checkpoint recorded {manifest.data_sha256[:12]}...",
            fix=[
                "restore the file",
                f"miles launch --recipe {shlex.quote(str(path / 'recipe.yaml'))} --name "
                f"{shlex.quote(f'{path.name}-new')}   # a new run with the new prompts",
            ],
        )
