"""The turns of trainer and engines on shared devices: who gives memory back before whom."""

from __future__ import annotations

import asyncio

from milescli.core.types import WeightVersion
from milescli.runtime.devices import Devices
from tests.runtime.recorder import Recorder


def _step(*, colocated: bool) -> list[str]:
    told: list[str] = []
    devices = Devices(
        taking_turns=colocated, trainer=Recorder("trainer", told), engines=Recorder("engines", told)
    )

    async def work() -> None:
        async with devices.training():
            told.append("step")
        await devices.publish(WeightVersion(1))

    asyncio.run(work())
    return told


def test_on_shared_devices_the_trainer_keeps_only_weights_while_it_publishes() -> None:
    assert _step(colocated=True) == [
        "engines.sleep",
        "trainer.wake",
        "step",
        "engines.pause",
        "trainer.shed",
        "engines.wake_weights",
        "trainer.publish",
        "trainer.sleep",
        "engines.wake_cache",
        "engines.resume",
    ]


def test_weights_are_verified_before_the_trainer_sleeps_and_anyone_asks_the_engines() -> None:
    told: list[str] = []
    devices = Devices(
        taking_turns=True,
        trainer=Recorder("trainer", told),
        engines=Recorder("engines", told),
        engines_asleep=True,
    )
    asyncio.run(devices.publish(WeightVersion(1), verify=True))
    assert told[told.index("trainer.publish") :][:3] == [
        "trainer.publish",
        "trainer.verify",
        "trainer.sleep",
    ]
    assert told[-1] == "engines.resume"


def test_on_devices_of_their_own_nobody_sleeps() -> None:
    assert _step(colocated=False) == [
        "step",
        "engines.pause",
        "trainer.publish",
        "engines.resume",
    ]
