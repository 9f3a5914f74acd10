"""Reading boxes from what torch's own writer wrote, in any chunks; and keys that cover their
tensors exactly once."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from milescli.checkpoint.torch_dist.keys import Box, can_stack, find_gap, items_of
from milescli.checkpoint.torch_dist.metadata import make_metadata
from milescli.checkpoint.torch_dist.reader import TorchDistReader
from milescli.checkpoint.torch_dist.weights import CheckpointWeights
from milescli.core.errors import CheckpointError
from milescli.models import WeightTable, parse_facts, table
from tests.conversion.making import make, to_megatron
from tests.damage import cut, flip
from tests.families.cases import ALL

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """As torch saves it, without a process group."""
    state = {
        "a": torch.arange(60.0).view(3, 4, 5),
        "b.weight": torch.randn(7, 3).bfloat16(),
        "c": torch.tensor(2.5),
    }
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved", state


def _boxes(model: WeightTable) -> list[Box]:
    """Every place in a checkpoint of the model."""
    stacked = can_stack(model)
    return [
        box
        for entry in model.entries
        for item in items_of(entry, model, stacked=stacked)
        for box in item.boxes
    ]


def test_boxes_of_any_size_are_read(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    with TorchDistReader(folder) as reader:
        assert sorted(reader.names()) == sorted(state)
        assert torch.equal(reader.read("a", (0, 0, 0), (3, 4, 5)), state["a"])
        assert torch.equal(reader.read("a", (1, 1, 2), (2, 3, 2)), state["a"][1:3, 1:4, 2:4])
        assert torch.equal(reader.read("b.weight", (2, 0), (3, 3)), state["b.weight"][2:5])
        assert torch.equal(reader.read("c", (), ()), state["c"])


def test_pieces_of_other_layouts_are_put_together(tmp_path: Path) -> None:
    model = table(parse_facts(ALL["qwen3-moe"].config))
    whole: dict[str, torch.Tensor] = {}
    for box in _boxes(model):
        whole.setdefault(box.key, torch.randn(box.whole))
    dcp.save(whole, checkpoint_id=tmp_path / "one", no_dist=True)
    with TorchDistReader(tmp_path / "one") as reader:
        weights = CheckpointWeights(reader, model)
        for name, entries in weights.units.items():
            rows = list(weights.rows(name))
            assert [tuple(row.shape) for row in rows] == [
                entries[0].shapes[entries[0].hf.index(name)]
            ]
        gate = next(
            entry for entry in model.entries if entry.expert == 4 and "linear_fc1" in entry.megatron
        )
        first, second = weights.disk(gate)
        stored = whole[f"decoder.layers.{gate.layer}.mlp.experts.experts.linear_fc1.weight"][4]
        assert torch.equal(torch.cat([first, second]), stored)


def test_what_is_missing_is_named(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = saved
    with TorchDistReader(folder) as reader, pytest.raises(CheckpointError, match=r"lacks `d`"):
        reader.read("d", (0,), (1,))
    data = next(folder.glob("*.distcp"))
    data.rename(folder / "elsewhere")
    with (
        TorchDistReader(folder) as reader,
        pytest.raises(CheckpointError, match="corrupt") as caught,
    ):
        reader.read("a", (0, 0, 0), (1, 1, 1))
    assert data.name in caught.value.why
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
    )
    with pytest.raises(CheckpointError, match="another format"):
        TorchDistReader(folder)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3", "nemotron-h-moe"])
def test_every_key_is_covered_exactly_once(name: str) -> None:
    boxes = _boxes(table(parse_facts(ALL[name].config)))
    assert find_gap(boxes) is None
    part = next(box for box in boxes if box.sizes != box.whole)
    assert find_gap([box for box in boxes if box is not part]) is not None
    assert "in one place" in str(find_gap([*boxes, boxes[5]]))
    moved = replace(boxes[0], offsets=(boxes[0].offsets[0] + 1, *boxes[0].offsets[1:]))
    assert find_gap([moved, *boxes[1:]]) is not None


def test_boxes_that_overlap_are_seen() -> None:
    first = Box(key="a", offsets=(0, 0), sizes=(2, 3), whole=(4, 3))
    assert find_gap([first, replace(first, offsets=(2, 0))]) is None
    assert find_gap([first, replace(first, offsets=(1, 0), sizes=(3, 3))]) is not None
    assert (
        find_gap(
            [
                first,
                replace(first, offsets=(2, 0), sizes=(2, 2)),
                replace(first, offsets=(2, 2), sizes=(2, 1)),
            ]
        )
        is None
    )
    assert find_gap([first]) is not None


def test_metadata_are_plain_data(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(make_metadata([], empty=("x", 0)))
    with TorchDistReader(tmp_path) as reader:
        assert reader.names() == []


class GetattrPickler(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do (Debian 12 has 3.11.2)."""

    def reducer_override(self, value: object) -> object:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_what_early_python_3_11_wrote_is_read(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / ".metadata").open("wb") as file:
        GetattrPickler(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    with TorchDistReader(folder) as reader:
        assert torch.equal(reader.read("a", (0, 0, 0), (3, 4, 5)), state["a"])


@pytest.mark.parametrize(
    "arguments",
    [
        (Metadata, "__init__"),
        (WriteItemType, "__class__"),
        (WriteItemType, 3),
        (Path, "home"),
    ],
)
def test_getattr_is_read_as_a_member_of_torchs_enums_alone(
    arguments: tuple[object, object], tmp_path: Path
) -> None:
    class Attribute:
        def __reduce__(self) -> tuple[object, ...]:
            return getattr, arguments

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(CheckpointError, match="not safe to read") as caught:
        TorchDistReader(tmp_path)
    assert "`builtins.getattr`" in caught.value.why


def test_damaged_bytes_are_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")
    folder = tmp_path / "megatron" / "release"
    whole = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    draw = random.Random(0)
    for number in range(200):
        file = folder / ".metadata" if number % 2 else draw.choice(list(whole))
        draw.choice((flip, flip, cut))(file, draw)
        with suppress(CheckpointError), TorchDistReader(folder) as reader:
            for key in reader.names():
                with suppress(CheckpointError):
                    reader.read(key, (0,) * len(reader.shape(key)), reader.shape(key))
        file.write_bytes(whole[file])


def test_a_damaged_byte_cannot_ask_for_gigabytes(tmp_path: Path) -> None:
    remember_far_away = b"\x80\x02}r" + struct.pack("<I", 2**26) + b"."
    (tmp_path / ".metadata").write_bytes(remember_far_away)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="corrupt") as raised:
        TorchDistReader(tmp_path)
    assert "a gap of 67,108,864" in raised.value.why
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


@pytest.mark.parametrize("name", ["common.pt", "metadata.json", "*.distcp"])
def test_a_fifo_in_place_of_a_file_is_refused_before_torch_waits_for_it(
    tmp_path: Path, name: str
) -> None:
    to_megatron(make(tmp_path / "hf"), tmp_path / "megatron")
    folder = tmp_path / "megatron" / "release"
    file = max(folder.glob(name))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="corrupt") as raised:
        TorchDistReader(folder)
    assert file.name in raised.value.why
