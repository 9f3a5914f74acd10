"""An engine starts while other processes take memory: the plan has counted both. In a process as
SGLang's is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from milescli.backends.sglang.inside.cpu.serving import mark, unfilled
from milescli.backends.sglang.launch.command import CPU_PATH

ROOT = Path(__file__).resolve().parents[5]
# a machine where a trainer rank took all but 4 GB of 16, while the engine loaded weights
PROGRAM = """\
import json
from types import SimpleNamespace
from sglang.srt.mem_cache import kv_cache_configurator as stock
from milescli.backends.sglang.inside.cpu import serving

answers = {
    "get_available_gpu_memory": 4.0,
    "get_world_group": SimpleNamespace(world_size=1, cpu_group=None),
    "get_schedule": SimpleNamespace(mem_fraction_static=0.7),
    "get_mm": SimpleNamespace(mm_feature_transport=None),
    "mm_runtime_reservation_gb": 0.0,
}
for name, answer in answers.items():
    setattr(stock, name, lambda *_, answer=answer, **__: answer)

def found(has_states):
    engine = SimpleNamespace(
        device="cpu",
        gpu_id=0,
        mambaish_config=object() if has_states else None,
        post_capture_kv_active=False,
        model_config=SimpleNamespace(is_multimodal=False),
        _handle_max_mamba_cache=lambda rest: rest - 1.0,
    )
    try:
        return stock.KVCacheConfigurator._profile_available_bytes(engine, 16.0)
    except ValueError:
        return "refused"

before = found(False)
serving.install_cache_size()
print(json.dumps([before, found(False), found(True)]))
"""


def test_what_others_took_meanwhile_is_not_counted_as_weights() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(CPU_PATH), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    total, states = psutil.virtual_memory().total, int((16.0 * 0.7 - 1.0) * (1 << 30))
    assert json.loads(done.stdout.splitlines()[-1]) == ["refused", total, states]


def test_what_was_not_loaded_whole_is_named():
    model = torch.nn.ModuleDict(
        {
            "loaded": torch.nn.Linear(3, 4),
            "part": torch.nn.Linear(3, 4),
            "left": torch.nn.Linear(3, 4),
        }
    )
    packed = {name: torch.zeros(2, 2, dtype=torch.uint8) for name in ("sent", "kept", "g_idx")}
    model["packed"] = torch.nn.Module()
    for name, tensor in packed.items():
        model["packed"].register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    mark(model)
    with torch.no_grad():
        model["packed"].sent[0] = 255
        model["packed"].sent[1] = 7
        for parameter in model["loaded"].parameters():
            parameter.zero_()
        model["part"].weight[:3] = 1.0
        model["part"].bias.zero_()
    assert unfilled(model) == [
        "part.weight",
        "left.weight",
        "left.bias",
        "packed.kept",
    ]
