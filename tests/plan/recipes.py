"""A recipe of usual size for a machine that is only named, for the tests of this room."""

from __future__ import annotations

from milescli.platform.machine import parse_machine
from milescli.recipe.schema import Recipe


def make_recipe(machine: str, **sections: dict[str, object]) -> Recipe:
    """64 prompts with 8 responses of up to 8192 tokens."""
    base: dict[str, object] = {
        "name": "golden",
        "model": {"path": "x"},
        "data": {"prompts": "x.jsonl", "max_prompt_tokens": 1024},
        "rollout": {"prompts_per_step": 64, "max_response_tokens": 8192},
        "machine": {"nodes": len(parse_machine(machine).nodes)},
    }
    return Recipe.model_validate(base | sections)
