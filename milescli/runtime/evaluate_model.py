"""`miles eval MODEL`: a model that no run made, or a converted checkpoint, measured with engines
alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from milescli.plan.on_cpu import longest_tokens
from milescli.runtime.draft_model import without_speculation
from milescli.runtime.eval_records import SetResult
from milescli.runtime.eval_sets import EvalWish, asking_reward_model, load_set, sets_of_model
from milescli.runtime.evaluate import Ask, Subject, serve_and_evaluate, with_room

if TYPE_CHECKING:
    from milescli.console.output import Output


def evaluate_model(
    model: str,
    *,
    folder: Path,
    wish: EvalWish,
    environ: Mapping[str, str],
    output: Output,
    ask: Ask | None = None,
) -> list[SetResult]:
    """Evaluate a Hugging Face folder, a converted checkpoint or a name on the hub. `folder`: where
    `eval/`, logs and fetched data go; `ask`: what else than to measure the sets.
    One result for each set. Raises MilesError."""
    from milescli.checkpoint.run_dir import RunDir
    from milescli.checkpoint.run_lock import lock
    from milescli.cluster.nodes import find_nodes
    from milescli.plan.engines_alone import plan_engines
    from milescli.platform.torch_wheel import require_wheel
    from milescli.runtime.inputs import (
        facts_of_recipe,
        inputs_of_model,
        with_policies,
        with_reward_model,
    )
    from milescli.runtime.planning import require_served_by
    from milescli.runtime.prestart import prestart_engines, prestart_ray
    from milescli.runtime.reward_model import reward_facts
    from milescli.runtime.spec import RunSpec

    loaded, sets = sets_of_model(model, wish, environ=environ)
    recipe = without_speculation(max((one.recipe for one in sets), key=longest_tokens))
    facts = facts_of_recipe(recipe.model)
    nodes = find_nodes(loaded, output=output)
    reward = reward_facts(asking_reward_model(sets))
    plan = plan_engines(recipe, nodes.machine, facts, reward=reward)
    plan = with_room(plan, sets, facts)
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
        inputs = with_reward_model(inputs, asking_reward_model(sets), run, output=output)
        inputs = with_policies(inputs, recipe, run, output=output)
        asked = [load_set(one, run, inputs, output=output) for one in sets]
        nodes.require_shared(run.path, inputs.model_dir)
        spec = RunSpec(run=run, recipe=recipe, plan=plan, nodes=nodes, inputs=inputs)
        return serve_and_evaluate(
            spec, asked, Subject(name=model), prestarted, output=output, ask=ask
        )
