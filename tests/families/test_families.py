"""Every family: names and counts against transformers' own, weights bit for bit through Megatron
under several layouts, and logits."""

from __future__ import annotations

import pytest
import torch

from milescli.checkpoint.hf_folder import HfReader
from milescli.models import load_facts, table
from tests.families.cases import ALL
from tests.families.conftest import Families, wanted

LARGEST = 1e-4
"""Difference of logits, relative to the largest."""


@pytest.mark.parametrize("name", wanted())
def test_the_table_names_every_tensor_of_the_folder_once(families: Families, name: str) -> None:
    weights = table(load_facts(families.folder(name)))
    with HfReader(families.folder(name)) as reader:
        on_disk = weights.as_on_disk(reader.names(), reader.shape)
        there = {
            key: reader.shape(key)
            for key in reader.names()
            if not weights.is_passthrough(key) and not weights.is_ignored(key)
        }
    assert on_disk.hf_shapes() == there


@pytest.mark.parametrize("name", [name for name in wanted() if ALL[name].made_by_transformers])
def test_parameters_are_counted_as_transformers_counts_them(families: Families, name: str) -> None:
    assert (
        table(load_facts(families.folder(name))).num_parameters
        == families.counted[name]["num_parameters"]
    )


@pytest.mark.parametrize("name", [name for name in wanted() if ALL[name].logits])
def test_logits_equal_those_of_transformers(families: Families, name: str) -> None:
    ours, theirs = families.logits_of_megatron(name), families.logits_of_transformers(name)
    assert ours.keys() == theirs.keys()
    largest = max(float(row.abs().max()) for row in theirs.values())
    difference = max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)
    print(f"{name}: {difference / largest:.1e} relative to the largest logit, {largest:.2f}")
    families.notes[name]["logits"] = difference / largest
    assert largest > 0.1, "logits that are nearly 0 prove nothing"
    assert difference <= LARGEST * largest


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name in wanted() for number in range(len(ALL[name].layouts))],
)
def test_weights_come_out_of_megatron_bit_for_bit(
    families: Families, name: str, number: int
) -> None:
    assert families.came_back(name, number) == []
    families.notes[name].setdefault("layouts", []).append(ALL[name].layouts[number])


@pytest.mark.parametrize("name", wanted())
def test_a_folder_is_converted_and_comes_back_byte_for_byte(families: Families, name: str) -> None:
    folder, back = families.folder(name), families.converted_back(name)
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    assert weights == sorted(path.name for path in back.glob("*.safetensors"))
    assert [
        file for file in weights if (folder / file).read_bytes() != (back / file).read_bytes()
    ] == []
    assert (folder / "config.json").read_bytes() == (back / "config.json").read_bytes()
    families.notes[name]["converted"] = True


@pytest.mark.parametrize("name", [name for name in wanted() if ALL[name].logits])
def test_stock_loading_of_the_converted_checkpoint_gives_the_same_logits(
    families: Families, name: str
) -> None:
    loaded, direct = families.logits_of_converted(name), families.logits_of_megatron(name)
    assert all(torch.equal(loaded[key], direct[key]) for key in direct)
