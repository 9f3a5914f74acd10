"""The turns of trainer and engines on shared devices: who gives memory back before whom."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from milescli.core.errors import WorkerDied
from milescli.core.events import PublishStats
from milescli.core.types import EVALUATION, JOINING, EngineAddress, WeightVersion
from milescli.runtime.devices import Devices
from tests.runtime.recording.recorder import Recorder
from tests.waiting import settled


def _step(*, colocated: bool) -> list[str]:
    told: list[str] = []
    devices = Devices(
        shares_memory=colocated,
        trainer=Recorder("trainer", told),
        engines=Recorder("engines", told),
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
        "trainer.offload_optimizer_state",
        "engines.wake_weights",
        "trainer.connect_engines",
        "trainer.publish",
        "trainer.sleep",
        "engines.wake_cache",
        "engines.resume",
    ]


def test_weights_are_verified_before_the_trainer_sleeps_and_anyone_asks_the_engines() -> None:
    told: list[str] = []
    devices = Devices(
        shares_memory=True,
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
        "trainer.connect_engines",
        "trainer.publish",
        "engines.resume",
    ]


def test_what_a_publish_did_to_running_requests_is_kept() -> None:
    class Busy(Recorder):
        """A fleet with requests."""

        async def pause(self) -> PublishStats:
            return PublishStats(num_running=3, wait_s=0.5, discarded_tokens=7)

    devices = Devices(
        shares_memory=False, trainer=Recorder("trainer", []), engines=Busy("engines", [])
    )
    asyncio.run(devices.publish(WeightVersion(1)))
    assert devices.interrupted == PublishStats(num_running=3, wait_s=0.5, discarded_tokens=7)


class Waves(Recorder):
    """A trainer or a fleet of which everything that concerns a wave is noted."""

    async def pause_some(self, urls: frozenset[str]) -> PublishStats:
        self.told.append(f"pause {sorted(url[-1] for url in urls)}")
        return PublishStats(num_running=1, wait_s=0.5, held_requests=len(self.told))

    async def resume_some(self, urls: frozenset[str], version: int) -> None:
        self.told.append(f"resume {sorted(url[-1] for url in urls)} with {version}")

    async def connect_engines(self, engines: list[EngineAddress], fleet: str) -> None:
        self.told.append(f"connect {[engine.url[-1] for engine in engines]}")

    async def publish(self, version: int, fleet: str) -> int:
        self.told.append(f"send {version} to {fleet}")
        return 10

    async def hold(self, version: int) -> None:
        self.told.append(f"hold {version}")


def _waves(share: float, num: int) -> tuple[Devices, list[str]]:
    told: list[str] = []
    engines = Waves("engines", told)
    engines.engines = [EngineAddress(url=f"http://127.0.0.1:{n}") for n in range(num)]
    trainer = Waves("trainer", told)
    return Devices(shares_memory=False, trainer=trainer, engines=engines, wave_share=share), told


def test_a_wave_has_as_many_engines_as_its_decimal_says() -> None:
    devices, told = _waves(0.58, 50)  # 0.58 * 50 is a little less than 29 in binary
    asyncio.run(devices.publish(WeightVersion(1)))
    assert [text[:4] for text in told].count("send") == 2
    assert told[0].count(",") == 28, told[0]


def test_engines_are_updated_in_waves_of_which_each_is_resumed_before_the_next_is_paused() -> None:
    devices, told = _waves(0.5, 5)
    asyncio.run(devices.publish(WeightVersion(1)))
    assert told == [
        "pause ['0', '1']", "connect ['0', '1']", "send 1 to rollout 0", "resume ['0', '1'] with 1",
        "pause ['2', '3']", "connect ['2', '3']", "send 1 to rollout 1", "resume ['2', '3'] with 1",
        "pause ['4']", "connect ['4']", "send 1 to rollout 2", "resume ['4'] with 1",
        "hold 1",
    ]  # fmt: skip
    assert devices.version == 1 and devices.sent_bytes == 30
    assert devices.interrupted == PublishStats(num_running=3, wait_s=1.5, held_requests=9)
    told.clear()
    asyncio.run(devices.publish(WeightVersion(2)))
    assert not any(said.startswith("connect") for said in told), "each wave keeps its channel"


@pytest.mark.parametrize(("share", "num"), [(1.0, 4), (0.1, 1)])
def test_one_wave_is_a_publish_to_all(share: float, num: int) -> None:
    devices, told = _waves(share, num)
    asyncio.run(devices.publish(WeightVersion(1)))
    assert told[0] == "engines.pause" and told[-1] == "engines.resume"


NEW = EngineAddress(url="http://127.0.0.1:2", name="engine 1")


class Dying(Recorder):
    """A fleet whose engine 0 dies at the first publish."""

    async def remove_dead(self) -> bool:
        self.told.append(f"{self.name}.remove_dead")
        died, self.engines = self.engines, []
        return bool(died)


class Refused(Recorder):
    """A trainer whose publishes fail until they go to nobody else than `NEW`."""

    async def publish(self, version: int, fleet: str) -> None:
        self.told.append(f"{self.name}.publish to {fleet}")
        if fleet != JOINING:
            raise WorkerDied("engine 0 is dead", why="planted", fix="none")


def _replaced(told: list[str], *, colocated: bool) -> list[str]:
    """What is done, in order, from the moment when a new engine is there."""
    devices = Devices(
        shares_memory=colocated,
        trainer=Recorder("trainer", told),
        engines=Recorder("engines", told),
    )

    async def start() -> EngineAddress:
        told.append("started")
        return NEW

    async def work() -> None:
        await devices.publish(WeightVersion(3))
        async with devices.training():
            replacing = asyncio.ensure_future(devices.replace(start))
            await settled()
            told.append("trained")
        await settled()
        await devices.publish(WeightVersion(4))
        told.append("published 4")
        await replacing

    asyncio.run(work())
    return told[told.index("trained") :]


def test_a_new_engine_joins_when_trainer_and_engines_hold_the_same_weights_again() -> None:
    """It starts beside the training step, and holds nothing until the step is published."""
    assert _replaced([], colocated=False) == [
        "trained",
        "engines.pause",
        "trainer.publish",
        "engines.resume",
        "published 4",
        "trainer.connect_engines",
        "trainer.publish",
        "trainer.verify",
        "trainer.connect_engines",
        "engines.admit",
    ]


def test_on_shared_devices_a_new_engine_takes_its_memory_while_the_trainer_sleeps() -> None:
    done = _replaced([], colocated=True)
    assert done[done.index("published 4") + 1 :] == [
        "started",
        "engines.pause",
        "engines.admit",
        "engines.sleep",
        "trainer.wake",
        "engines.pause",
        "trainer.offload_optimizer_state",
        "engines.wake_weights",
        "trainer.publish",
        "trainer.verify",
        "trainer.sleep",
        "engines.wake_cache",
        "engines.resume",
    ]


def test_an_engine_that_dies_of_a_publish_is_left_out_and_the_next_one_is_given_the_weights() -> (
    None
):
    told: list[str] = []
    engines = Dying("engines", told)
    devices = Devices(shares_memory=False, trainer=Refused("trainer", told), engines=engines)

    async def start() -> EngineAddress:
        return NEW

    async def work() -> None:
        await devices.publish(WeightVersion(1))
        await devices.replace(start)

    asyncio.run(work())
    assert told == [
        "engines.pause",
        "trainer.connect_engines",
        "trainer.publish to rollout",
        "engines.remove_dead",
        "engines.resume",
        "trainer.connect_engines",
        "trainer.publish to joining",
        "trainer.verify",
        "trainer.connect_engines",
        "engines.admit",
    ]


def test_an_engine_that_somebody_else_removed_meanwhile_is_no_error() -> None:
    told: list[str] = []
    engines = Dying("engines", told)

    class Slow(Refused):
        async def publish(self, version: int, fleet: str) -> None:
            engines.engines = []
            await super().publish(version, fleet)

    devices = Devices(shares_memory=False, trainer=Slow("trainer", told), engines=engines)
    asyncio.run(devices.publish(WeightVersion(1)))
    assert told[-2:] == ["trainer.publish to rollout", "engines.resume"]


def test_a_new_engine_for_evaluations_joins_with_the_next_weights_unless_it_has_died() -> None:
    """What its fleet held, the trainer has no more."""
    told: list[str] = []
    fleet = Recorder("engines", told)

    async def admit(engine: EngineAddress, version: int) -> None:
        told.append(f"admit {engine.name}")
        if engine is not NEW:
            raise WorkerDied("engine 9 is dead", why="planted", fix="none")

    fleet.admit = admit  # type: ignore[attr-defined]
    devices = Devices(
        shares_memory=False, trainer=Recorder("trainer", told), engines=fleet, fleet=EVALUATION
    )
    dead = EngineAddress(url="http://127.0.0.1:9", name="engine 9")

    async def work() -> None:
        for engine in (dead, NEW):

            async def start(engine: EngineAddress = engine) -> EngineAddress:
                return engine

            await devices.replace(start)
        await devices.publish(WeightVersion(2))

    asyncio.run(work())
    assert told[:3] == ["engines.pause", "admit engine 1", "admit engine 9"]
    assert told[-1] == "engines.resume"


def test_a_publish_that_fails_for_another_reason_is_an_error() -> None:
    told: list[str] = []
    engines = Dying("engines", told)
    devices = Devices(shares_memory=False, trainer=Refused("trainer", told), engines=engines)

    async def nobody() -> bool:
        return False

    engines.remove_dead = nobody  # type: ignore[method-assign]
    with pytest.raises(WorkerDied, match="engine 0"):
        asyncio.run(devices.publish(WeightVersion(1)))


def test_new_ranks_have_the_room_of_engines_that_took_back_their_weights() -> None:
    told = list[str]()
    engines = Recorder("engines", told)

    class Dies(Recorder):
        """Ranks that die of their first publish."""

        async def publish(self, *_: object) -> None:
            async with devices.lend_to_ranks():
                told.append("new ranks")

    devices = Devices(
        shares_memory=True, trainer=Dies("trainer", told), engines=engines, engines_asleep=True
    )
    asyncio.run(devices.publish(WeightVersion(3)))
    around = told.index("new ranks")
    assert told[around - 1 : around + 2] == [
        "engines.sleep_weights",
        "new ranks",
        "engines.wake_weights",
    ]
    assert told[-2:] == ["engines.wake_cache", "engines.resume"]


def test_new_ranks_that_die_too_leave_the_room_to_the_next() -> None:
    told = list[str]()

    class Dies(Recorder):
        """Ranks that die of their first publish, and others that die as they start."""

        async def publish(self, *_: object) -> None:
            with suppress(WorkerDied):
                async with devices.lend_to_ranks():
                    raise WorkerDied("trainer rank 0 died", why="planted", fix="none")
            async with devices.lend_to_ranks():
                told.append("new ranks")

    devices = Devices(
        shares_memory=True,
        trainer=Dies("trainer", told),
        engines=Recorder("engines", told),
        engines_asleep=True,
    )
    asyncio.run(devices.publish(WeightVersion(3)))
    assert told.count("engines.sleep_weights") == 1
    assert told.count("engines.wake_weights") == 2, "for the publish, and after the new ranks"


def test_engines_of_their_own_do_not_care_for_new_ranks() -> None:
    told = list[str]()
    devices = Devices(
        shares_memory=False, trainer=Recorder("trainer", told), engines=Recorder("engines", told)
    )

    async def work() -> None:
        async with devices.lend_to_ranks():
            told.append("new ranks")

    asyncio.run(work())
    assert told == ["new ranks"]
