"""How an attempt ends where the user asks for it. The run itself is tested in end_to_end; here,
what a CPU cannot show: whose turn it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from milescli.checkpoint.run_dir import RunDir
from milescli.core.errors import MachineError, NodesJoined, Stopped
from milescli.core.events import EventBus, Notice
from milescli.core.units import GIB
from milescli.platform.machine import Machine, Node
from milescli.recipe.load import load
from milescli.runtime import attempt
from milescli.runtime.attempt import Attempt, JoiningNodes
from milescli.runtime.devices import Devices
from milescli.runtime.recovery.supervise import StopFlag
from milescli.runtime.saving import Progress
from milescli.runtime.spec import RunSpec
from tests.plans import PLAN
from tests.runtime.recording.recorder import Recorder


class _Saver:
    """Notes what is saved; `newest_step` is complete."""

    def __init__(self, told: list[str], newest_step: int | None) -> None:
        self.told, self.newest_step = told, newest_step

    async def save(self, trainer: object, *, step: int, progress: Progress) -> None:
        of_warm_up = progress.warmup_steps is not None
        self.told.append(f"save {step}" + f" of warm-up {progress.warmup_steps}" * of_warm_up)

    async def settle(self) -> None:
        self.told.append("settle")

    def require_saved(self, step: int) -> None:
        pass


def _stop(tmp_path, *, step: int, newest_step: int) -> list[str]:
    """What happens at a stop after a publish: engines answer, the trainer sleeps."""
    told: list[str] = []
    recipe = load("quickstart", environ={}, cwd=tmp_path, home=tmp_path).recipe
    (tmp_path / "recipe.yaml").touch()
    spec = RunSpec(run=RunDir(tmp_path), recipe=recipe, plan=PLAN, nodes=None, inputs=None)  # type: ignore[arg-type]
    attempt = Attempt(spec, session=None, bus=EventBus())  # type: ignore[arg-type]
    (training,) = attempt.trainings
    devices = Devices(
        shares_memory=True, trainer=Recorder("trainer", told), engines=Recorder("engines", told)
    )
    training.run = SimpleNamespace(  # type: ignore[assignment]
        step=step,
        devices=devices,
        trainer=None,
        source=SimpleNamespace(progress=Progress),
        objective=None,
    )
    training.saver = _Saver(told, newest_step)  # type: ignore[assignment]

    with pytest.raises(Stopped, match=f"stopped after step {step}, and saved"):
        asyncio.run(attempt.save_and_stop(Stopped("stopped", why="asked", fix="none")))
    return told


def test_a_stop_after_a_publish_wakes_the_trainer_before_it_saves(tmp_path) -> None:
    assert _stop(tmp_path, step=3, newest_step=2) == [
        "settle",
        "engines.sleep",
        "trainer.wake",
        "save 3",
        "settle",
    ]


def test_a_stop_with_nothing_new_disturbs_nobody(tmp_path) -> None:
    assert _stop(tmp_path, step=3, newest_step=3) == ["settle"]


def test_a_stop_in_the_warm_up_saves_it_as_step_0(tmp_path) -> None:
    told: list[str] = []
    recipe = load("quickstart", environ={}, cwd=tmp_path, home=tmp_path).recipe
    (tmp_path / "recipe.yaml").touch()
    spec = RunSpec(run=RunDir(tmp_path), recipe=recipe, plan=PLAN, nodes=None, inputs=None)  # type: ignore[arg-type]
    attempt = Attempt(spec, session=None, bus=EventBus())  # type: ignore[arg-type]
    (training,) = attempt.trainings
    training.saver = _Saver(told, newest_step=None)  # type: ignore[assignment]
    assert not attempt._on_stop(), "nothing was learned yet: it ends at once"
    training.warm_up = SimpleNamespace(step=7, trainer=None)  # type: ignore[assignment]
    assert attempt._on_stop()
    with pytest.raises(Stopped, match="stopped after step 7 of the warm-up, and saved"):
        asyncio.run(attempt.save_and_stop(Stopped("stopped", why="asked", fix="none")))
    assert told == ["settle", "save 0 of warm-up 7", "settle"]


@pytest.mark.parametrize("warmup_steps", [None, 7])
def test_what_is_saved_of_a_warm_up_is_no_checkpoint_of_a_step(warmup_steps: int | None) -> None:
    manifest = SimpleNamespace(step=0, warmup_steps=warmup_steps)
    past = SimpleNamespace(step=0, manifest=manifest)
    spec = RunSpec(run=None, recipe=None, plan=None, nodes=None, inputs=None, past=past)  # type: ignore[arg-type]
    expected = (past, None) if warmup_steps is None else (None, past)
    assert (spec.checkpoint, spec.saved_in_warm_up) == expected


def _node(name: str) -> SimpleNamespace:
    return SimpleNamespace(node_id=name)


class _Cluster:
    """Nodes by name; those whose name begins with `bad` cannot be used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there = ["a"]
        self.num_asked = 0
        monkeypatch.setattr(attempt, "LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(attempt, "living_nodes", lambda: list(map(_node, self.there)))
        monkeypatch.setattr(attempt, "choose_nodes", self._choose)
        self.planned_for = list[Machine]()
        monkeypatch.setattr(
            attempt,
            "plan_without_plugins",
            lambda _, machine, **__: self.planned_for.append(machine),
        )

    def _choose(self, settings: object) -> SimpleNamespace:
        self.num_asked += 1
        taken = self.there[: settings.nodes]  # type: ignore[attr-defined]
        if any(name.startswith("bad") for name in taken):
            raise MachineError("it runs different software", why="planted", fix="none")
        return self.nodes(taken)

    @staticmethod
    def nodes(names: list[str]) -> SimpleNamespace:
        chosen = [SimpleNamespace(node=_node(name)) for name in names]
        node = Node(cpu_cores=2, memory_bytes=8 * GIB, available_bytes=GIB, shm_bytes=GIB)
        machine = Machine(kind="cpu", nodes=[node] * len(names))
        return SimpleNamespace(chosen=chosen, machine=machine, require_shared=lambda *_: None)

    def looks(self, num: int, *, then: list[str]) -> tuple[StopFlag, list[Notice], JoiningNodes]:
        """After `num` looks at a cluster that `then` has these nodes."""
        sets = ["machine.nodes=2", "machine.address=10.0.0.1:6379"]
        nowhere = Path("/nowhere")
        spec = SimpleNamespace(
            run=SimpleNamespace(path=nowhere, typed="runs/one"),
            nodes=self.nodes(["a"]),
            inputs=SimpleNamespace(model_dir=nowhere, teacher_dirs=[], facts=None),
            full_recipe=load("quickstart", sets=sets, environ={}, cwd=nowhere, home=nowhere),
        )
        stop, told = StopFlag(), list[Notice]()
        watch = JoiningNodes(spec, stop=stop, bus=EventBus([told.append]))  # type: ignore[arg-type]
        self.there = then
        for _ in range(num):
            asyncio.run(watch.probe())
        return stop, told, watch


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> _Cluster:
    return _Cluster(monkeypatch)


def test_what_the_run_itself_holds_of_memory_is_there_for_its_next_beginning(
    cluster: _Cluster,
) -> None:
    cluster.looks(2, then=["a", "b"])
    (machine,) = cluster.planned_for
    assert [node.available_bytes for node in machine.nodes] == [None, None]
    assert [node.memory_bytes for node in machine.nodes] == [8 * GIB, 8 * GIB]


def test_a_node_that_stays_lets_the_run_begin_again(cluster: _Cluster) -> None:
    stop, told, _ = cluster.looks(2, then=["a", "b"])
    with pytest.raises(NodesJoined, match="1 of its requested nodes and can now get 2"):
        stop.check()
    assert not told


def test_one_that_was_seen_once_is_not_asked_yet(cluster: _Cluster) -> None:
    stop, _, _ = cluster.looks(1, then=["a", "b"])
    stop.check()
    assert cluster.num_asked == 0


def test_one_that_cannot_be_used_is_told_of_once_and_left_alone(cluster: _Cluster) -> None:
    stop, told, watch = cluster.looks(5, then=["a", "bad"])
    stop.check()
    assert cluster.num_asked == 1
    assert [notice.text for notice in told] == [
        "the cluster has other nodes, which the run does not use: it runs different software: "
        "planted"
    ]
    cluster.there = ["a", "b", "bad"]  # another comes
    for _ in range(2):
        asyncio.run(watch.probe())
    with pytest.raises(NodesJoined):
        stop.check()
