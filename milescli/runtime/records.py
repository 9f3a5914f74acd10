"""What a run says of itself on disk before it starts: recipe.yaml, plan.json, manifest.json."""

from __future__ import annotations

import os
from dataclasses import asdict

from milescli.checkpoint.run_dir import utc_now, write_json
from milescli.checkpoint.store import write_atomically
from milescli.models import table
from milescli.models.costs import token_flops
from milescli.recipe.load import LoadedRecipe, values_of
from milescli.recipe.resolved import resolved_yaml
from milescli.runtime.drift import surroundings
from milescli.runtime.spec import RunSpec


def write_records(spec: RunSpec, loaded: LoadedRecipe) -> None:
    """`loaded`: the recipe with the origin of each value."""
    run, model_dir = spec.run, spec.inputs.model_dir
    write_atomically(run.recipe_file, resolved_yaml(loaded))
    write_atomically(run.plan_file, spec.plan.to_json())
    write_json(
        run.manifest_file,
        {
            "created": utc_now(),
            **surroundings(spec.nodes.machine),
            "seed": spec.recipe.run.seed,
            "recipe_sha256": run.recipe_sha256,
            "recipe": values_of(loaded.recipe),
            "plan_fingerprint": spec.plan.fingerprint,
            "token_flops": asdict(token_flops(table(spec.inputs.facts))),
            "data": spec.inputs.as_manifest(),
            "model_dir": os.path.relpath(model_dir, run.path)
            if run.path in model_dir.parents
            else str(model_dir),
        },
    )
