"""Where the time of a trace went: of one that torch writes here, and of kernels as a GPU has
them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.profiling.traces import (
    ATTENTION,
    COLLECTIVES,
    MATMUL,
    OPTIMIZER,
    OTHER,
    PYTHON,
    WAITING,
    WEIGHTS,
    kind_of,
    read_trace,
    split,
)

PAUSE_S = 0.3


def test_a_trace_of_torch_is_split_into_what_was_done(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.AdamW([weight])
    began = time.monotonic()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function("miles: an optimizer step"):
            (torch.randn(64, 64) @ weight).cos().sum().backward()
            optimizer.step()
        time.sleep(PAUSE_S)
    seconds = time.monotonic() - began
    file = tmp_path / "rank_0.json.gz"
    profiler.export_chrome_trace(str(file))
    traced = split(read_trace(file), seconds=seconds)
    assert not traced.is_device
    assert sum(kind.seconds for kind in traced.kinds.values()) == pytest.approx(seconds, rel=1e-3)
    assert traced.kinds[WAITING].seconds >= PAUSE_S
    assert "aten::mm" in traced.kinds[MATMUL].operations
    assert any("aten::cos" in name for name in traced.kinds[OTHER].operations)
    assert set(traced.kinds[OPTIMIZER].operations) >= {"Optimizer.step#AdamW.step"}
    assert traced.kinds[PYTHON].seconds > 0


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["miles: an optimizer step"], PYTHON),
        (["miles: an optimizer step", "aten::add"], OTHER),
        (["miles: an optimizer step", "ShortAttention", "aten::empty"], ATTENTION),
        (["autograd::engine::evaluate_function: ShortAttentionBackward"], ATTENTION),
        (["Optimizer.step#AdamW.step", "aten::mul_"], OPTIMIZER),
        (["miles: publishing weights 3", "aten::copy_"], WEIGHTS),
        (["miles: publishing weights 3", "c10d::broadcast_"], COLLECTIVES),
        (["_ReduceScatterToSequenceParallelRegionBackward"], COLLECTIVES),
        (["LinearWithGradAccumulationAndAsyncCommunicationBackward", "aten::mm"], MATMUL),
        (["sm90_xmma_gemm_bf16bf16_bf16f32"], MATMUL),
        (["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"], COLLECTIVES),
        (["void flash_fwd_kernel<...>"], ATTENTION),
    ],
)
def test_an_operation_is_of_a_kind_by_itself_or_by_what_it_is_within(
    names: list[str], kind: str
) -> None:
    assert kind_of(names) == kind


def test_kernels_of_a_gpu_count_and_what_no_kernel_fills_is_waiting() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0, "dur": 2e6, "tid": 7},
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 1e6, "dur": 2e6, "tid": 8},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 3e6, "dur": 1e6, "tid": 7},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9e6, "tid": 1},
    ]
    traced = split(events, seconds=10.0)
    assert traced.is_device
    assert {kind: own.seconds for kind, own in traced.kinds.items()} == {
        WAITING: 6.0,
        MATMUL: 2.0,
        COLLECTIVES: 2.0,
        "copies": 1.0,
    }


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_nothing_is_counted_twice_however_calls_nest(data: st.DataObject) -> None:
    events: list[dict[str, object]] = []

    def nest(start: int, end: int, depth: int) -> None:
        at = start
        while at < end and depth < 4 and data.draw(st.booleans()):
            begin = data.draw(st.integers(at, end))
            until = data.draw(st.integers(begin, end))
            name = data.draw(st.sampled_from(["aten::mm", "aten::add", "miles: scoring samples"]))
            event = {"cat": "cpu_op", "name": name, "ts": begin, "dur": until - begin, "tid": 1}
            events.append(event)
            nest(begin, until, depth + 1)
            at = until

    nest(0, 1000, 0)
    traced = split(events, seconds=1.0)
    assert sum(kind.seconds for kind in traced.kinds.values()) == pytest.approx(1.0)
