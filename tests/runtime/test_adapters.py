"""Several adapters in one attempt: their turns with the trainer, their ends, what all saved."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from milescli.core.errors import Stopped, WorkerDied
from milescli.core.types import WeightVersion
from milescli.runtime.adapters import AdapterDevices, run_together
from milescli.runtime.attempt import Attempt
from tests.waiting import settled


class _Engines:
    """Takes what it is told."""

    engines = ("one",)

    async def pause(self) -> object:
        return SimpleNamespace()

    async def resume(self, version: int) -> None:
        pass


class _Trainer:
    """Writes down what it is asked, of each adapter."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self._name, self._asked = name, asked

    async def connect_engines(self, engines: object, fleet: str) -> None:
        pass

    async def step(self) -> None:
        self._asked.append(f"step of {self._name}")
        await settled()  # the others ask meanwhile

    async def publish(self, version: int, fleet: str) -> None:
        self._asked.append(f"publish of {self._name}")


def test_what_one_learned_is_published_before_another_is_trained() -> None:
    asked: list[str] = []

    async def steps(name: str, changing: asyncio.Lock, turn: asyncio.Lock) -> None:
        trainer = _Trainer(name, asked)
        devices = AdapterDevices(
            shares_memory=False, trainer=trainer, engines=_Engines(), changing=changing, turn=turn
        )  # type: ignore[call-arg]
        for number in range(3):
            async with devices.training():
                await trainer.step()
            await devices.publish(WeightVersion(number))

    async def work() -> None:
        locks = asyncio.Lock(), asyncio.Lock()
        await asyncio.gather(*(steps(name, *locks) for name in "abc"))

    asyncio.run(work())
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    assert [one.split()[-1] for one, _ in pairs] == list("abcabcabc")
    assert all(one.replace("step", "publish") == other for one, other in pairs)


def test_a_step_that_fails_gives_the_turn_back() -> None:
    async def work() -> None:
        turn = asyncio.Lock()
        devices = AdapterDevices(shares_memory=False, trainer=None, engines=None, turn=turn)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="planted"):
            async with devices.training():
                raise ValueError("planted")
        assert not turn.locked()
        async with devices.scoring():  # as a save at the end does: nothing is published after it
            assert not turn.locked()

    asyncio.run(work())


def test_one_that_is_stopped_lets_the_others_come_to_their_own_stops() -> None:
    ended: list[str] = []

    async def stops(name: str, turns: int) -> None:
        for _ in range(turns):
            await settled()
        ended.append(name)
        raise Stopped("stopped", why=name, fix="none")

    with pytest.raises(Stopped):
        asyncio.run(run_together([stops("a", 0), stops("b", 1)]))
    assert ended == ["a", "b"]


def test_an_error_of_one_ends_all() -> None:
    ended: list[str] = []

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("a")

    async def dies() -> None:
        await settled()
        raise WorkerDied("engine 0 died", why="planted", fix="none")

    with pytest.raises(WorkerDied):
        asyncio.run(run_together([goes_on(), dies()]))
    assert ended == ["a"]


@pytest.mark.parametrize(
    ("saved", "wanted", "told"),
    [
        ((4, 2), (12, 12), 2),
        ((3, 7), (3, 12), 7),
        ((3, None), (3, 12), None),
        ((3, 12), (3, 12), 3),
    ],
)
def test_a_resumed_run_goes_on_from_what_the_last_of_them_has_saved(
    saved: tuple, wanted: tuple, told: int | None
) -> None:
    trainings = [
        SimpleNamespace(
            saver=SimpleNamespace(newest_step=step), spec=SimpleNamespace(num_steps=steps)
        )
        for step, steps in zip(saved, wanted, strict=True)
    ]
    attempt = SimpleNamespace(trainings=trainings)
    assert Attempt.saved_step.fget(attempt) == told  # type: ignore[attr-defined]
