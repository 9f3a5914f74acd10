"""Writes `templates/models.json`: what the models of the recipes are, from their published config.json, and where the planner finds room.

    python tests/recipe/measure_models.py FOLDER      # of files ORG--NAME.json

Run it again after a change of the planner, of a recipe, or with a config that was missing. Not a test.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from milescli.models import parse_facts, table
from milescli.recipe.load import load
from milescli.recipe.templates import MODELS_FILE, template_names, templates_dir
from milescli.runtime.recipe_list import NO_MACHINE, smallest_machine

MEASURED_FROM = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "google/gemma-4-26B-A4B-it": "google/gemma-4-26B-A4B",
}
"""The instruction-tuned release -> its base, which differs in tokens that end an answer alone."""
ABOUT = (
    "Written by tests/recipe/measure_models.py from published config.json files. models: parameters without multi-token-prediction layers "
    "and vision towers, counted from miles's own weight tables. smallest_machines: the planner's estimate, not measured; none: no room on "
    "64 x 8 H100, or the model cannot be trained."
)


def measure(folder: Path) -> dict[str, object]:
    """What the file says."""
    models: dict[str, dict[str, object]] = {}
    machines: dict[str, str] = {}
    for name in template_names():
        recipe = load(name, environ={}, cwd=folder, home=folder).recipe
        if recipe.model.path is None:
            continue
        source = MEASURED_FROM.get(recipe.model.path, recipe.model.path)
        facts = parse_facts(json.loads((folder / f"{source.replace('/', '--')}.json").read_text(encoding="utf-8")))
        counted = table(facts)
        models[recipe.model.path] = {
            "family": facts.family,
            "parameters": counted.num_parameters,
            "active": counted.num_active_parameters,
        }
        machines[name] = smallest_machine(recipe, facts) or NO_MACHINE
    return {"about": ABOUT, "models": dict(sorted(models.items())), "smallest_machines": machines}


if __name__ == "__main__":
    found = measure(Path(sys.argv[1]))
    (templates_dir() / MODELS_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found["smallest_machines"], indent=1))
