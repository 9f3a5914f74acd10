"""Lists the packages of environments that are installed in a virtual environment of their own, and
the folders of these. Installs nothing (`install` does), starts nothing (`host` does)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milescli.core.errors import MachineError, RecipeError, nearest
from milescli.core.pins import pin

PLACE = "MILES_ENVIRONMENTS"
"""Environment variable that names the folder of all these virtual environments."""
PROGRAMS = Path(__file__).with_name("programs")
"""Programs that run there; they import the standard library and the package, nothing of miles."""
RECORD = "installed.json"
"""File that is written last: a folder without it is an incomplete installation."""
BEGUN = "miles-installs-here"
"""Empty file that is written first: a folder without it is not one that miles made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Describes one package that `miles env install` can install."""

    name: str
    """Name in the package registry and in the commands."""
    about: str
    use: str
    """Recipe setting that uses it."""
    python: tuple[int, int]
    """Oldest Python version that it runs on."""
    python_below: tuple[int, int]
    """First Python version that it does not run on, or was not tested with."""

    @property
    def requirements(self) -> list[str]:
        """Return the packages to install, each pinned in docker/pins.env."""
        return [f"{self.name}=={pin(self.name)}"]

    @property
    def folder(self) -> Path:
        """Return the path of its virtual environment, whether or not it exists."""
        return environments_dir() / self.name

    @property
    def interpreter(self) -> Path:
        """Return the path of the Python of its virtual environment."""
        return self.folder / "bin" / "python"

    @property
    def program(self) -> Path:
        """Return the path of the program that runs in its virtual environment."""
        return PROGRAMS / f"miles_{self.name}.py"

    @property
    def command(self) -> str:
        """Return the command that installs it."""
        return f"miles env install {self.name}"

    @property
    def record(self) -> dict[str, Any] | None:
        """Return the record of its installation; None if it is not installed completely."""
        try:
            record = json.loads((self.folder / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and self.interpreter.exists() else None

    @property
    def lack(self) -> str | None:
        """Return why the package cannot be used here; None if it can."""
        record = self.record
        if record is None:
            return f"{self.name} is not installed in {self.folder}"
        if record.get("requirements") != self.requirements:
            installed = ", ".join(record.get("requirements") or [])
            return (
                f"{self.folder} has {installed}, and this miles works with {self.requirements[0]}"
            )
        return None

    def require(self, *, needed_by: str) -> None:
        """Raise MachineError if the package is not installed, with the command that installs it."""
        if (lack := self.lack) is not None:
            raise MachineError(
                f"{needed_by} needs the package `{self.name}` in its own virtual environment",
                why=lack,
                fix=self.command,
            )


PACKAGES = (
    Package(
        name="verifiers",
        about="Environments of verifiers: tasks, tools and rewards; the agent `verifiers` plays",
        use="rollout.agent=verifiers",
        python=(3, 11),
        python_below=(3, 15),
    ),
    Package(
        name="openenv",
        about="Environments behind OpenEnv's reset and step over a WebSocket",
        use="rollout.environment.name=openenv",
        python=(3, 11),
        python_below=(3, 15),
    ),
    Package(
        name="harbor",
        about="Tasks of harbor: a program works at one in a container, its tests say the reward",
        use="rollout.agent=harbor",
        python=(3, 12),
        python_below=(3, 15),
    ),
)


def package_named(name: str) -> Package:
    """Return the package with this name. Raises RecipeError if there is none."""
    names = [package.name for package in PACKAGES]
    if name in names:
        return PACKAGES[names.index(name)]
    raise RecipeError(
        f"there is no package of environments `{name}`",
        why=f"`miles env install` supports {', '.join(names)}",
        fix=f"miles env install {nearest(name, names) or names[0]}",
    )


def environments_dir() -> Path:
    """Return the folder of all virtual environments: MILES_ENVIRONMENTS, or else a folder in the
    user's data directory."""
    if folder := os.environ.get(PLACE):
        return Path(folder).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "miles" / "environments"


def list_packages(packages: Sequence[Package] = PACKAGES) -> list[tuple[Package, str | None]]:
    """Return each package with the reason why it is not usable here, or None."""
    return [(package, package.lack) for package in packages]
