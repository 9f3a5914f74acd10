"""Environments and tools on the screen and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
import yaml

from milescli.agents.foreign.install import Installed
from milescli.agents.foreign.packages import Package
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


def show_listed(
    kind: str,
    rows: Sequence[Listed],
    *,
    packages: Sequence[tuple[Package, str | None]] = (),
    output: Output,
) -> None:
    """One line each. `packages`: with virtual environments of their own, and why one cannot be
    used here."""
    listed: dict[str, Any] = {kind: [asdict(row) for row in rows]}
    if packages:
        listed["packages"] = [_as_json(package, lack) for package, lack in packages]
    output.json(kind, listed)
    columns = ["name", "what it is", "takes", "here"]
    table = [(row.name, row.about, row.takes, "no" if row.lacks else "yes") for row in rows]
    output.table(columns, table)
    output.blank()
    for row in rows:
        if row.lacks:
            output.note(f"{row.name}: {row.lacks}; {row.mend}")
    if packages:
        output.blank()
        columns = ["package", "what it is", "used by", "installed"]
        output.table(
            columns,
            [
                (package.name, package.about, package.use, "no" if lack else "yes")
                for package, lack in packages
            ],
        )
        output.blank()
        for package, lack in packages:
            if lack:
                output.note(f"{package.name}: {lack}; {package.command}")
    output.next_steps(NEXT[kind])


def show_installed(done: Installed, *, output: Output) -> None:
    """Where it is, and how it is used."""
    package = done.package
    output.json("package", {**_as_json(package, None), "python": done.python})
    if done.was_there:
        output.text(f"{package.name} was installed already")
    output.kv(
        {
            "package": ", ".join(package.requirements),
            "python": done.python,
            "folder": str(package.folder),
            "use": package.use,
        }
    )
    output.next_steps(
        {
            f"{package.interpreter} -m pip install ...": "further packages beside it",
            f"miles launch --recipe RECIPE --set {package.use} ...": "docs/agents.md",
        }
    )


def _as_json(package: Package, lack: str | None) -> dict[str, Any]:
    return {
        "name": package.name,
        "about": package.about,
        "use": package.use,
        "folder": str(package.folder),
        "lacks": lack,
        "mend": package.command if lack else None,
    }


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
