"""What a channel promises while engines are slow, refuse, or die: nothing that is still read is
written, and no rank is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch

from milescli.backends.sglang.client.http import EngineRefused
from milescli.backends.sglang.inside.quantised import LOADED_FORMAT
from milescli.backends.sglang.weights.channels import TensorChannel, readers
from milescli.core.types import EngineAddress
from milescli.platform.ports import free_ports
from tests.backends.sglang.launch.slow_engine import SlowEngine
from tests.backends.sglang.weights.two_ranks import NUM_BUCKETS, REFUSED

UPDATE = "/update_weights_from_tensor"


def publish_to(engine: SlowEngine, buckets) -> None:
    channel = TensorChannel(timeout_s=60)
    channel.open([EngineAddress(url=engine.url, tp=1, sharing_ranks=[0])])
    try:
        channel.send(buckets)
    finally:
        channel.close()
        engine.close()


def test_the_next_bucket_is_made_while_an_engine_reads_and_is_never_written_over_it():
    """The engine reads a bucket only after the next one was asked for: it waits in vain where
    buckets are sent one after the other."""
    number, asked_for = 6, [threading.Event() for _ in range(7)]

    def buckets():
        for index in range(number):
            asked_for[index].set()
            yield [("w", torch.full((5000,), index, dtype=torch.uint8).view(torch.float32))]
        asked_for[number].set()

    in_vain: list[int] = []

    def wait_for_the_next(index: int) -> None:
        if not asked_for[index + 1].wait(60):
            in_vain.append(index)

    engine = SlowEngine(wait_for_the_next)
    publish_to(engine, buckets())
    assert in_vain == []
    assert [sorted(set(flat.tolist())) for (flat,) in engine.read] == [
        [index] for index in range(number)
    ]


def test_after_a_refusal_the_rest_is_made_and_not_sent():
    made: list[int] = []

    def buckets():
        for index in range(5):
            made.append(index)
            yield [("w", torch.zeros(10))]

    engine = SlowEngine(lambda index: "no room" if index == 1 else None)
    with pytest.raises(EngineRefused, match="no room"):
        publish_to(engine, buckets())
    assert made == [0, 1, 2, 3, 4]
    assert engine.orders == [UPDATE, UPDATE]


@pytest.mark.parametrize(
    ("dtype", "refusal", "told"),
    [
        (torch.float32, None, []),
        (torch.float8_e4m3fn, None, [LOADED_FORMAT]),
        (torch.int32, None, [LOADED_FORMAT]),
        (torch.uint8, "no room", []),
    ],
)
def test_engines_are_told_of_the_last_bucket_of_quantised_weights(dtype, refusal, told):
    """Once, when they have read it; not of plain weights, nor after a refusal."""
    engine = SlowEngine(lambda index: refusal if index == 1 else None)
    buckets = ([("norm", torch.ones(3)), ("w", torch.zeros(9).to(dtype))] for _ in range(3))
    with pytest.raises(EngineRefused, match=refusal) if refusal else nullcontext():
        publish_to(engine, buckets)
    assert engine.told == told
    assert len(engine.read) == (2 if refusal else 3)
    assert len(engine.orders) == len(engine.read) + len(told)


def test_each_trainer_rank_feeds_the_engine_ranks_that_share_its_memory():
    engines = [
        EngineAddress(url="a", tp=2, sharing_ranks=[1, 0]),
        EngineAddress(url="b", tp=1, sharing_ranks=[1]),
    ]
    assert readers(engines, num_ranks=3) == [[(0, 1)], [(0, 0), (1, 0)], []]
    with pytest.raises(AssertionError, match="2 ranks, shared by"):
        readers([EngineAddress(url="c", tp=2, sharing_ranks=[])], num_ranks=1)


def test_two_ranks_stay_together_and_raise_the_same(tmp_path):
    port = free_ports(1)[0]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.backends.sglang.weights.two_ranks", str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"{rank}.log").open("w"),
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=800)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], [
        (tmp_path / f"{rank}.log").read_text() for rank in (0, 1)
    ]
    first, second = (json.loads(text.splitlines()[-1]) for text in said)
    assert first["whole"]["read"] == [[[index], [10 + index]] for index in range(NUM_BUCKETS)]
    assert first["whole"]["failure"] is None and second["whole"]["failure"] is None
    assert first["whole"]["orders"] == [UPDATE] * NUM_BUCKETS
    assert first["cut_short"]["orders"] == [UPDATE] * (REFUSED + 1)
    assert first["cut_short"]["failure"] == second["cut_short"]["failure"] == "HTTP 400: no room"
    assert first["no_room"]["orders"] == [], "though rank 0 has room"
    for said_by in (first, second):
        assert "one bucket of weights needs" in said_by["no_room"]["failure"]
