"""torch without its compiler, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import importlib.util, sys
from milescli.platform.no_compiler import disable_compiler
disable_compiler()
disable_compiler()

import torch

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight], lr=0.5)
torch.compile(torch.compile(mode="default")(lambda: weight.sum()))().backward()
optimizer.step()
assert torch.allclose(weight.detach(), torch.full((2,), 0.495)), weight

from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

@torch._dynamo.disable(recursive=False)
@torch._dynamo.allow_in_graph
def double(number):
    torch._dynamo.graph_break()
    return 2 * number

assert double(2) == 4
assert importlib.util.find_spec("torch._dynamo") is not None
assert "torch._dynamo.convert_frame" not in sys.modules, "the compiler was loaded"

assert torch._dynamo.optimize("eager")(lambda number: number + 1)(torch.ones(1)).item() == 2
assert "torch._dynamo.convert_frame" in sys.modules
assert sys.modules["torch._dynamo"] is torch._dynamo
optimizer.step()
"""


PARTS = """
import sys
from milescli.platform.no_compiler import disable_compiler
disable_compiler()
import torch
stand_in = sys.modules["torch._dynamo"]
from torch._dynamo.utils import counters
import torch._dynamo.trace_rules
whole = sys.modules["torch._dynamo"]
assert whole is not stand_in and torch._dynamo is whole
assert whole.utils is sys.modules["torch._dynamo.utils"] and whole.utils.counters is counters
assert whole.utils.__spec__.origin.endswith("utils.py")
assert whole.config is stand_in.config, "who held the stand-in gets what the compiler has"
with torch.profiler.profile() as profile:
    torch.ones(2) @ torch.ones(2)
"""


def test_who_imports_a_part_of_the_compiler_gets_the_whole() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARTS], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_compiler_is_loaded_only_for_who_wants_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
