"""What miles imports it asks for by name, whatever other packages bring along."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from milescli.agents.foreign.packages import PROGRAMS
from milescli.backends.sglang.launch.command import CPU_PATH
from tests.test_layers import PACKAGE, imports_of, module_of

OF_EXTRAS = {"mooncake": ["mooncake-transfer-engine-non-cuda"]}
"""Packages that `make` does not install, and that are not called as what they bring."""


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *chain(*(extras[name] for name in extras if name != "dev"))]
    declared = {canonicalize_name(Requirement(line).name) for line in wanted}
    brought_by = OF_EXTRAS | packages_distributions()
    missing = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.is_relative_to(PROGRAMS):
            continue  # of the virtual environments of others, which have what they import
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for imported in imports_of(tree, module_of(file), file.name == "__init__.py"):
            top = imported.module.split(".")[0]
            if top in sys.stdlib_module_names or top == "milescli":
                continue
            if file.is_relative_to(CPU_PATH) and (CPU_PATH / f"{top}.py").exists():
                continue
            names = {canonicalize_name(name) for name in brought_by.get(top, [top])}
            if not names & declared:
                missing.append(f"{file.relative_to(PACKAGE.parent)}:{imported.line}: {top}")
    assert not missing, "\n" + "\n".join(missing)
