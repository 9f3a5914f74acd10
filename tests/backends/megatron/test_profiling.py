"""A rank that is looked into: what it writes, and that nothing of it is left behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from milescli.backends.megatron.profiling import ProfilingMixin, largest_tensors
from milescli.profiling.traces import read_trace


class Rank(ProfilingMixin):
    """One without a model."""

    def __init__(self, device: str) -> None:
        self.rank, self.device = 0, torch.device(device)
        model = SimpleNamespace(module=torch.nn.Linear(64, 64))
        self.policy = SimpleNamespace(model=model, optimizer=SimpleNamespace())


class BrokenProfiler:
    """Ends with an error."""

    def __init__(self, **options: object) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        raise RuntimeError("CUPTI is gone")


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a GPU would be told of its history of allocations."""
    told: list[object] = []
    record = lambda enabled="all", **options: told.append(enabled)  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.profiler, "profile", BrokenProfiler)
    return told


def test_a_trace_is_the_owners_alone_and_says_what_is_in_memory(tmp_path: Path) -> None:
    rank = Rank("cpu")
    assert rank.start_profile(str(tmp_path), True) is None
    torch.ones(8, 8) @ torch.ones(8, 8)
    told = rank.stop_profile()
    file = tmp_path / told["file"]
    assert file.stat().st_mode & 0o077 == 0
    assert any("aten::mm" in event["name"] for event in read_trace(file))
    weights = [kind for kind in told["memory"]["tensors"] if kind["what"] == "weights"]
    assert {kind["shape"] for kind in weights} <= {"64x64", "64"}
    assert "error" in rank.stop_profile(), "it has ended"


def test_a_storage_that_several_tensors_share_counts_once() -> None:
    whole = torch.zeros(1234, 567)
    views = [whole[:3], whole.t()]
    own = [kind for kind in largest_tensors({whole.data_ptr(): "mine"}) if kind["what"] == "mine"]
    assert [(kind["count"], kind["size_bytes"]) for kind in own] == [(1, 1234 * 567 * 4)]
    assert len(views) == 2


@pytest.mark.parametrize("ends", ["stop_profile", "drop_profile"])
def test_a_gpu_remembers_no_allocations_after_a_trace_that_goes_wrong(
    ends: str, history: list[object], tmp_path: Path
) -> None:
    rank = Rank("cuda")
    assert rank.start_profile(str(tmp_path), True) is None
    told = getattr(rank, ends)()
    assert told is None or "CUPTI is gone" in told["error"]
    assert history == ["all", None]


def test_a_gpu_remembers_no_allocations_where_a_trace_cannot_begin(
    history: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BrokenProfiler, "start", BrokenProfiler.stop)
    assert "CUPTI is gone" in str(Rank("cuda").start_profile(str(tmp_path), True))
    assert history == ["all", None]
