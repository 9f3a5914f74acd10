"""The page `miles help recipe`: every key with type, default and meaning, read off the schema."""

from __future__ import annotations

from milescli.console.output import Mode, Output
from milescli.recipe.keys import RecipeKey, keys, sections

INTRO = """\
A recipe is YAML and holds only what differs from the defaults below.
On the command line: --set KEY=VALUE. Strongest first:
  --set and flags
  MILES_RUN__NAME=… and MILES_MACHINE__GPUS=…     (sections run and machine only)
  ./miles.yaml and ~/.config/miles/config.yaml    (sections run and machine only)
  the recipe
  the default
"""


def show_keys(output: Output) -> None:
    """All keys, section by section."""
    payload = [
        {"key": key.name, "wants": key.wants, "default": key.default, "doc": key.doc}
        for key in keys().values()
    ]
    output.json("recipe_keys", {"keys": payload})
    if output.mode is Mode.HUMAN:
        output.text(INTRO)
    for name in ["", *sections()]:
        inside = [key for key in keys().values() if key.name.rpartition(".")[0] == name]
        rows = [(key.name, _default(key), _meaning(key)) for key in inside]
        if rows:
            title = f"{name}: {sections()[name].doc}" if name else "recipe"
            output.table(["key", "default", "meaning"], rows, title=title)
            output.blank()


def _default(key: RecipeKey) -> str:
    if key.default is None:
        return "null"
    return str(key.default).lower() if isinstance(key.default, bool) else f"{key.default}"


def _meaning(key: RecipeKey) -> str:
    return f"{key.wants}. {key.doc}".replace("\n", " ") if key.doc else key.wants
