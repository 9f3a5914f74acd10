"""What becomes of a run that has fewer nodes than before. The cluster is planted."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from milescli.cluster import node_loss
from milescli.cluster.node_loss import remaining_nodes
from milescli.cluster.nodes import RunNodes, TooFewNodes
from milescli.console.output import Mode, Output
from milescli.platform.machine import parse_machine
from milescli.recipe.load import LoadedRecipe, load


def _loaded(how: str, *, window_s: float = 60.0) -> LoadedRecipe:
    sets = [
        "machine.nodes=2",
        "machine.address=10.0.0.1:6379",
        f"machine.on_node_loss={how}",
        f"fault.window_s={window_s}",
    ]
    nowhere = Path("/nowhere")
    return load("quickstart", sets=sets, environ={}, cwd=nowhere, home=nowhere)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[looks] nodes that are there; the last stays."""
    numbers = list[int]()

    def find(loaded: LoadedRecipe, *, output: Output) -> RunNodes:
        num = numbers.pop(0) if len(numbers) > 1 else numbers[0]
        if num < loaded.recipe.machine.nodes:
            error = TooFewNodes("too few", why="planted", fix="none")
            error.num_usable = num
            raise error
        return RunNodes(machine=parse_machine(f"{loaded.recipe.machine.nodes}x1xH200"))

    monkeypatch.setattr(node_loss, "find_nodes", find)
    monkeypatch.setattr(node_loss, "CHECK_INTERVAL_S", 0.01)
    return numbers


def _left(loaded: LoadedRecipe) -> tuple[int, int, str]:
    """(nodes of the recipe, nodes of the machine, what the user was told)."""
    told = io.StringIO()
    output = Output(Mode.HUMAN, stdout=io.StringIO(), stderr=told)
    recipe, nodes = remaining_nodes(loaded, output=output)
    return recipe.recipe.machine.nodes, len(nodes.machine.nodes), told.getvalue()


@pytest.mark.parametrize("how", ["spare", "shrink", "wait"])
def test_where_another_stands_by_the_run_keeps_its_size(there: list[int], how: str) -> None:
    there[:] = [2]
    assert _left(_loaded(how)) == (2, 2, "")


def test_it_is_planned_for_those_that_are_left(there: list[int]) -> None:
    there[:] = [1]
    wanted, got, told = _left(_loaded("shrink"))
    assert (wanted, got) == (1, 1)
    assert "too few" in told and "machine.on_node_loss=shrink" in told


@pytest.mark.parametrize("how", ["spare", "shrink"])
def test_where_none_is_left_or_only_spare_ones_are_wanted_it_is_an_error(
    there: list[int], how: str
) -> None:
    there[:] = [1 if how == "spare" else 0]
    with pytest.raises(TooFewNodes):
        _left(_loaded(how))


def test_those_that_come_back_are_waited_for_within_a_bound(there: list[int]) -> None:
    there[:] = [1, 1, 2]
    wanted, got, told = _left(_loaded("wait"))
    assert (wanted, got) == (2, 2)
    assert told.count("waiting") == 1
    there[:] = [1]
    with pytest.raises(TooFewNodes) as caught:
        _left(_loaded("wait", window_s=0.05))
    assert "fault.window_s" in caught.value.why
