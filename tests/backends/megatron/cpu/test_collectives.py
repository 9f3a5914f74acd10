"""A group of one rank needs no collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from milescli.backends.megatron.cpu.collectives import COPIES, skip_for_single_rank

ALONE, AMONG_OTHERS = object(), object()


@pytest.fixture(autouse=True)
def _two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {None: 1, ALONE: 1, AMONG_OTHERS: 2}
    monkeypatch.setattr(dist, "get_world_size", lambda group: sizes[group])


def refuse(first, second=None, op=None, group=None, async_op=False) -> None:
    raise AssertionError("a group of one called a collective")


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor"])
@pytest.mark.parametrize("options", [{}, {"group": ALONE}, {"group": ALONE, "async_op": False}])
def test_alone_the_input_is_copied(name: str, options: dict[str, object]) -> None:
    output = torch.zeros(3)
    assert skip_for_single_rank(refuse, COPIES[name])(output, torch.arange(3.0), **options) is None
    assert output.tolist() == [0, 1, 2]


def test_alone_the_input_is_the_first_of_what_is_gathered() -> None:
    outputs = [torch.zeros(3)]
    skip_for_single_rank(refuse, COPIES["all_gather"])(outputs, torch.arange(3.0), group=ALONE)
    assert outputs[0].tolist() == [0, 1, 2]


def test_names_and_places_of_arguments_do_not_matter() -> None:
    output = torch.zeros(3)
    collect = skip_for_single_rank(refuse, COPIES["reduce_scatter_tensor"])
    collect(output, torch.ones(3), None, ALONE)
    collect(first=output[:1], second=torch.zeros(1), group=ALONE)
    assert output.tolist() == [0, 1, 1]


def test_alone_objects_are_gathered_and_scattered_as_tensors() -> None:
    outputs, output = [torch.zeros(3)], torch.zeros(3)
    skip_for_single_rank(refuse, COPIES["gather"])(torch.arange(3.0), second=outputs, group=ALONE)
    skip_for_single_rank(refuse, COPIES["scatter"])(output, second=[torch.ones(3)], group=ALONE)
    assert (outputs[0].tolist(), output.tolist()) == ([0, 1, 2], [1, 1, 1])


def test_alone_what_is_summed_or_sent_stays_as_it_is() -> None:
    tensor = torch.arange(3.0)
    skip_for_single_rank(refuse, COPIES["all_reduce"])(tensor, op=dist.ReduceOp.MAX)
    skip_for_single_rank(refuse, COPIES["broadcast"])(tensor, 0, group=ALONE)
    assert tensor.tolist() == [0, 1, 2]


def test_memory_that_is_the_output_already_is_not_copied() -> None:
    whole = torch.arange(4.0)
    skip_for_single_rank(refuse, COPIES["reduce_scatter_tensor"])(whole[:4], whole, group=ALONE)
    assert whole.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((1, 2), {"group": AMONG_OTHERS, "op": "sum"}),
        ((1, 2, "sum", AMONG_OTHERS), {}),
        ((1, 2), {"group": ALONE, "async_op": True}),
        ((), {"first": 1, "second": 2, "group": AMONG_OTHERS}),
    ],
)
def test_others_are_called_as_they_were(arguments: tuple, options: dict[str, object]) -> None:
    def note(first, second, op=None, group=None, async_op=False) -> object:
        return first, second, op, group, async_op

    collect = skip_for_single_rank(note, COPIES["reduce_scatter_tensor"])
    assert collect(*arguments, **options) == note(*arguments, **options)


def test_torch_has_every_one_of_them() -> None:
    assert all(callable(getattr(dist, name)) for name in COPIES)
