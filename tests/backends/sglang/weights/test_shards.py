"""Two real trainer ranks send a real engine of two ranks their weights in pieces: each engine rank
fetches its own cut, and holds afterwards what it would hold of whole tensors.

Two families here; `MILES_SHARDED=llama,gpt-oss pytest ...` tries the tiny models of tests/families
whose names begin so, `MILES_SHARDED=` every one that a CPU serves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from milescli.backends.sglang.launch.servable import servable_on_cpu
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.models import parse_facts
from milescli.platform.ports import free_ports
from tests.backends.megatron.world import run_world
from tests.backends.sglang.test_families import CASES, _python, other_weights

pytestmark = [pytest.mark.engine, pytest.mark.trainer]
LAYOUTS = {
    "glm4-moe": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "deepseek-v3-yarn": {"pp": 2},
}


def wanted() -> list[str]:
    if "MILES_SHARDED" not in os.environ:
        return list(LAYOUTS)
    chosen = os.environ["MILES_SHARDED"].split(",")
    named = [
        name
        for name, case in CASES.items()
        if case.logits and any(name.startswith(start) for start in chosen)
    ]
    return [name for name in named if servable_on_cpu(parse_facts(CASES[name].config))[0]]


@pytest.mark.parametrize("name", wanted())
def test_an_engine_of_two_ranks_holds_what_it_would_of_whole_tensors(
    tmp_path: Path, name: str
) -> None:
    _python("tests.families.making", str(tmp_path / "models"), name)
    folder, other = tmp_path / "models" / name, tmp_path / "other"
    other_weights(folder, other)
    spec = EngineSpec(
        model_dir=folder,
        tokenizer_dir=None,
        device_kind="cpu",
        precision="fp32",
        port=free_ports(1)[0],
        log_path=tmp_path / "engine.log",
        tp=2,
        max_total_tokens=2048,
        context_length=256,
    )
    engine = EngineServer(spec)
    engine.start()
    try:
        engine.wait_ready(400)
        case = {
            "name": name,
            "call": "published_in_shards",
            "model": str(other),
            "layout": LAYOUTS.get(name, {"pp": 2}),
            "engine": {"url": spec.url, "tp": 2, "sharing_ranks": [0, 0]},
        }
        said = run_world(2, [case], tmp_path / "world")[name]
    finally:
        engine.stop()
        shutil.rmtree(tmp_path / "models")
    # what both ranks hold is fetched by each; of the rest, SGLang's padding leaves the first more
    assert len(said["fetched"]) == 2
    assert said["whole"] <= sum(said["fetched"]) < 1.5 * said["whole"]
    assert min(said["fetched"]) > 0
