"""Environments and tools on the screen and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
import yaml

from milescli.console.output import Output
from milescli.listings.environments import Listed
from milescli.rollout.environment_contract import MAX_STEPS, Checked

NEXT = {
    "environments": {
        "miles env play NAME": "be the player",
        "miles env check NAME": "does it do what an environment must?",
        "miles plugins new environment my_game": "one of yours",
    },
    "tools": {
        "miles launch --set rollout.agent=tools --set 'rollout.tools=[calculator]'": "use one",
        "miles plugins new tool my_tool": "one of yours",
    },
}


def show_listed(kind: str, rows: Sequence[Listed], *, output: Output) -> None:
    """One line each."""
    output.json(kind, {kind: [asdict(row) for row in rows]})
    columns = ["name", "what it is", "takes", "here"]
    table = [(row.name, row.about, row.takes, "no" if row.lacks else "yes") for row in rows]
    output.table(columns, table)
    output.blank()
    for row in rows:
        if row.lacks:
            output.note(f"{row.name}: {row.lacks}; {row.mend}")
    output.next_steps(NEXT[kind])


def show_checked(name: str, found: Checked, *, output: Output) -> None:
    """What was seen of an environment that does what one must."""
    output.json("environment", {"name": name, **asdict(found)})
    low, high = found.rewards
    output.kv(
        {
            "episodes": f"{found.num_episodes}, each twice with the same random actions: the same",
            "ended": f"{found.num_ended} of {found.num_episodes} within {MAX_STEPS} steps",
            "rewards": f"{low:g} to {high:g}",
            "steps": f"{found.num_steps:,}, {found.steps_per_s:,.0f} a second in one thread",
            "first": found.first,
        }
    )
    output.text(f"`{name}` does what an environment must")


def settings_of(text: str) -> dict[str, Any]:
    """Of --settings. Raises BadParameter for what is no mapping."""
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"--settings is no YAML: {error}") from None
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise typer.BadParameter(f"--settings is a mapping such as '{{id: X}}', not {text}")
    return settings
