"""Begins what a run begins before its inputs are there, is refused, and prints what was there and
what is left. For `test_prestart`; on its own, since a process has one Ray session in its life."""

from __future__ import annotations

import json
import os

from milescli.cluster.nodes import RunNodes
from milescli.core.errors import DataError
from milescli.core.run_processes import processes_of
from milescli.platform.probe import probe
from milescli.runtime.prestart import prestart_engines, prestart_ray
from tests.plans import PLAN
from tests.runtime.test_prestart import FACTS, RECIPE


def main() -> None:
    """One line of JSON."""
    before, seen = dict(os.environ), {}
    nodes = RunNodes(machine=probe())
    try:
        with (
            prestart_engines(RECIPE, PLAN, FACTS, address=None) as begun,
            prestart_ray(RECIPE, PLAN, nodes, begun) as prestarted,
        ):
            assert prestarted.ray is not None
            seen["processes"] = len(list(processes_of(prestarted.token)))
            seen["scratch"] = prestarted.ray.temp_dir.exists()
            raise DataError("no such file", why="", fix="")
    except DataError:
        seen["left"] = len(list(processes_of(prestarted.token)))
        seen["scratch left"] = prestarted.ray.temp_dir.exists()
        seen["environment as before"] = dict(os.environ) == before
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
