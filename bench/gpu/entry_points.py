"""Writes what makes Python take miles-cli for installed, its name, version, requirements and entry
points, into a folder: `python bench/gpu/entry_points.py FOLDER`. Read from pyproject.toml. The code
is not in it: it comes from the repository, by PYTHONPATH. Called by pack.sh.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path) -> Path:
    """Makes `FOLDER/miles_cli-VERSION.dist-info` and returns it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = (ROOT / "milescli/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    info = folder / f"{project['name'].replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = [
        "Metadata-Version: 2.3",
        f"Name: {project['name']}",
        f"Version: {version}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"]),
    ]
    (info / "METADATA").write_text("\n".join(metadata) + "\n", encoding="utf-8")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    rows = [
        row
        for group, entries in groups.items()
        for row in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), "")
    ]
    (info / "entry_points.txt").write_text("\n".join(rows), encoding="utf-8")
    write_scripts(folder / "bin", project["scripts"])
    return info


def write_scripts(folder: Path, scripts: dict[str, str]) -> None:
    """One program for each console script, run by the first `python3` of PATH."""
    folder.mkdir(exist_ok=True)
    for name, target in scripts.items():
        module, function = target.split(":")
        program = folder / name
        program.write_text(
            f"#!/usr/bin/env python3\nimport sys\n\nfrom {module} import {function}\n\n"
            f"sys.exit({function}())\n",
            encoding="utf-8",
        )
        program.chmod(0o755)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
