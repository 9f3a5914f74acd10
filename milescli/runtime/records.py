"""What a run says of itself on disk before it starts: recipe.yaml, plan.json, manifest.json."""

from __future__ import annotations

import os
import platform as python_platform
from importlib.metadata import version

from milescli import __version__
from milescli.checkpoint.run_dir import utc_now, write_json
from milescli.recipe.load import LoadedRecipe
from milescli.recipe.resolved import resolved_yaml
from milescli.runtime.spec import RunSpec

RECORDED_PACKAGES = ("torch", "sglang", "sglang-router", "megatron-core", "ray", "transformers")


def write_records(spec: RunSpec, loaded: LoadedRecipe) -> None:
    """`loaded`: the recipe with the origin of each value."""
    run, model_dir = spec.run, spec.inputs.model_dir
    run.recipe_file.write_text(resolved_yaml(loaded), encoding="utf-8")
    run.plan_file.write_text(spec.plan.to_json(), encoding="utf-8")
    write_json(
        run.manifest_file,
        {
            "created": utc_now(),
            "miles": __version__,
            "packages": {name: version(name) for name in RECORDED_PACKAGES},
            "python": python_platform.python_version(),
            "seed": spec.recipe.run.seed,
            "recipe_sha256": run.recipe_sha256,
            "plan_fingerprint": spec.plan.fingerprint,
            "data": spec.inputs.as_manifest(),
            "model_dir": os.path.relpath(model_dir, run.path)
            if run.path in model_dir.parents
            else str(model_dir),
        },
    )
