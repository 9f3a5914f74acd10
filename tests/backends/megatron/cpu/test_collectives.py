"""A group of one rank needs no collective."""

import torch

from milescli.backends.megatron.cpu.collectives import skip_alone


class Group:
    """As many ranks as it is told."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def refuse(*args: object, **options: object) -> None:
    raise AssertionError("a group of one called a collective")


def test_alone_the_input_is_copied() -> None:
    output = torch.zeros(3)
    assert skip_alone(refuse)(output, torch.arange(3.0), group=Group(1)) is None
    assert output.tolist() == [0, 1, 2]


def test_among_others_and_asynchronously_the_collective_is_called() -> None:
    calls = []

    def note(output, input, **options):
        calls.append(options)
        return "work"

    group = Group(2)
    assert skip_alone(note)(torch.zeros(1), torch.zeros(1), group=group, op="sum") == "work"
    alone = Group(1)
    skip_alone(note)(torch.zeros(1), torch.zeros(1), group=alone, async_op=True)
    assert calls == [
        {"group": group, "async_op": False, "op": "sum"},
        {"group": alone, "async_op": True},
    ]
