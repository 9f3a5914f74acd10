"""Two real trainer ranks send real engines of two ranks their weights in pieces: each engine rank
fetches its own cut, and holds afterwards what it would hold of whole tensors.

Two families here; `MILES_SHARDED=llama,gpt-oss pytest ...` tries the tiny models of tests/families
whose names begin so, `MILES_SHARDED=` every one that a CPU serves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

import pytest

from milescli.backends.sglang.launch.servable import servable_on_cpu
from milescli.backends.sglang.launch.server import EngineServer
from milescli.backends.sglang.launch.spec import EngineSpec
from milescli.models import parse_facts
from milescli.platform.ports import free_ports
from tests.backends.megatron.world import run_world
from tests.backends.sglang.test_families import CASES, other_weights
from tests.backends.sglang.warm_engines import engine_of
from tests.forked import run_module
from tests.loopback_services import BUCKET, S3, needs_s3, s3_server
from tests.shared_memory import entries

pytestmark = [pytest.mark.engine, pytest.mark.trainer]
LAYOUTS = {
    "glm4-moe": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "deepseek-v3-yarn": {"pp": 2},
}


HAS_MOONCAKE = find_spec("mooncake") is not None and find_library("ibverbs") is not None
"""Its channel is tried over TCP (conftest.py)."""


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


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """One for all tests, as trainer ranks serve several of them."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@needs_s3
@pytest.mark.parametrize("name", wanted())
def test_engines_of_two_ranks_hold_what_they_would_of_whole_tensors(
    tmp_path: Path, name: str, s3: S3
) -> None:
    """Through shared memory, files, and Mooncake where it is there; and through an object store,
    and through a group, where the second engine is sent nothing by the trainer, and receives all
    from the first; then what changed. An engine that dies is named on all ranks."""
    run_module("tests.families.making", str(tmp_path / "models"), name)
    folder, other = tmp_path / "models" / name, tmp_path / "other"
    other_weights(folder, other)
    servers = [_engine(folder, tmp_path / f"engine-{number}.log") for number in range(2)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(400)
        queues = {str(pid) for server in servers for pid in server._computing_pids()}
        assert [name for name in entries() if queues & {*name.split("_")}]
        addresses = [
            {"url": server.spec.url, "name": f"engine {number}", "tp": 2, "sharing_ranks": [0, 0]}
            for number, server in enumerate(servers)
        ]
        case = {
            "call": "published_in_shards",
            "model": str(other),
            "layout": LAYOUTS.get(name, {"pp": 2}),
            "engines": addresses,
            "has_biases": name == "gpt-oss",
            "folder": str(tmp_path / "files"),
        }
        ways = ["TensorChannel", "DiskChannel", *["RdmaChannel"] * HAS_MOONCAKE]
        pushes = ["StoreChannel", "DistributedChannel"]
        ways += pushes
        cases = [{"name": way, "way": way, **case} for way in ways]
        cases[-2] |= {"folder": f"s3://{BUCKET}/weights", "environment": s3.environment}
        cases[-1]["victim"] = os.getpgid(servers[1].pid)
        said = run_world(2, cases, tmp_path / "world")
        for way in ways:
            # what both ranks hold is sent to each; of the rest, SGLang's padding leaves the first
            # more
            for fetched in said[way]["fetched"].values():
                assert said[way]["whole"] <= sum(fetched) < 1.5 * said[way]["whole"]
                assert min(fetched) > 0
            assert len(said[way]["fetched"]) == 2
            assert said[way]["left"] == []
        for way in pushes:
            everything, nothing, changes = said[way]["sent"]
            assert said[way]["whole"] <= everything
            assert nothing < changes < 0.03 * everything
        assert "engine 1" in said["DistributedChannel"]["failure"]
    finally:
        for server in servers:
            server.stop()
        shutil.rmtree(tmp_path / "models")
    assert not [name for name in entries() if queues & {*name.split("_")}]


def _engine(folder: Path, log: Path) -> EngineServer:
    return engine_of(
        EngineSpec(
            model_dir=folder,
            tokenizer_dir=None,
            device_kind="cpu",
            precision="fp32",
            port=free_ports(1)[0],
            log_path=log,
            tp=2,
            max_total_tokens=2048,
            context_length=256,
        )
    )
