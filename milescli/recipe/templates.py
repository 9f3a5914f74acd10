"""Finds the built-in recipes by name, in the wheel or in the source tree. Lists and finds; does not
read them as recipes."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from milescli.core.errors import RecipeError, nearest
from milescli.core.files import read_json

SUFFIXES = (".yaml", ".yml")
ALIASES = {
    "deepseek-v4": "deepseek-v4-flash",
    "qwen3-0.6b-gsm8k": "qwen3-0.6b",
    "qwen3-next": "qwen3-next-80b-a3b",
    "qwen3.5": "qwen3.5-35b-a3b",
    "qwen3.6": "qwen3.6-35b-a3b",
}
"""Other names that `--recipe` accepts -> the name of the recipe."""
MODELS_FILE = "models.json"
"""File next to the recipes with the sizes of their models, computed from their published
config.json."""
SHAPES_FILE = "shapes.json"
"""File next to the recipes: name on the hub -> the ModelFacts, from its published config.json."""


def templates_dir() -> Path:
    """Return the folder of templates: inside the package in a wheel, beside it in the source
    tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def template_names() -> list[str]:
    """Return the names that `--recipe` accepts."""
    return sorted(path.stem for path in templates_dir().glob("*.yaml"))


def shipped_shape(model: str) -> dict[str, object] | None:
    """Return the fields of a published config.json from which ModelFacts are made, for a name on
    the hub; None for a model that no recipe names."""
    shapes = read_json(templates_dir() / SHAPES_FILE)
    return shapes["models"].get(model)


def find_recipe(recipe: str, *, cwd: Path) -> Path:
    """Return the file of a template, or of a path (with a slash or ending in .yaml). Raises
    RecipeError with the nearest name."""
    if "/" in recipe or recipe.endswith(SUFFIXES):
        path = Path(recipe).expanduser()
        path = path if path.is_absolute() else cwd / path
        if path.is_file():
            return path
        raise _no_file(recipe, path)
    path = templates_dir() / f"{ALIASES.get(recipe, recipe)}.yaml"
    if recipe and path.is_file():
        return path
    neighbours = [
        cwd / f"{recipe}{suffix}"
        for suffix in SUFFIXES
        if recipe and (cwd / f"{recipe}{suffix}").is_file()
    ]
    guess = nearest(recipe, [*template_names(), *ALIASES])
    near = f"and the nearest is `{guess}`" if guess else "and none is near"
    fixes = [f"miles launch --recipe {neighbours[0].name}"] if neighbours else []
    fixes += [f"miles launch --recipe {guess}"] if guess else []
    raise RecipeError(
        f"there is no recipe `{recipe}`",
        why=f"there are {len(template_names())} built-in recipes, {near}; name your own recipe "
        "by its path, which ends in .yaml",
        fix=[*fixes, "miles recipes   # describes each recipe"],
    )


def _no_file(recipe: str, path: Path) -> RecipeError:
    why = "it is a directory" if path.is_dir() else "no file is there"
    siblings = [item.name for item in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    guess = nearest(path.name, siblings)
    fixes = [f"miles launch --recipe {shlex.quote(str(path.parent / guess))}"] if guess else []
    return RecipeError(
        f"recipe file `{recipe}` cannot be used",
        why=why,
        fix=[*fixes, "miles recipes   # lists the built-in recipes"],
    )


def nearest_template(family: str, num_parameters: int) -> str:
    """Return the recipe whose published model is most like one of this family and size."""
    measured = read_json(templates_dir() / MODELS_FILE)["models"]

    def distance(name: str) -> tuple[bool, float]:
        model = measured[paths[name]]
        return model["family"] != family, abs(math.log(model["parameters"] / num_parameters))

    paths = {name: path for name in template_names() if (path := _model_of(name)) in measured}
    return min(paths, key=distance)


def _model_of(name: str) -> str | None:
    """Return `model.path` of a template, without reading the whole recipe."""
    text = (templates_dir() / f"{name}.yaml").read_text(encoding="utf-8")
    found = re.search(r"^model:\n(?:  .*\n)*?  path: (\S+)", text, re.MULTILINE)
    return found[1] if found else None


def describe(name: str) -> str:
    """Return the `description:` of a template, without reading the whole recipe."""
    for line in (templates_dir() / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("description:"):
            return line.removeprefix("description:").strip().strip('"')
    return ""
