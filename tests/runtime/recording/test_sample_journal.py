"""A run that is killed and goes on trains on what its journal has, samples none of it again, and
mixes no two pasts. The engine is in memory: what it says depends on the seed and on the weights,
and the weights on all that was trained on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.checkpoint.journal import intact_records, retain_records
from milescli.checkpoint.run_dir import RunDir
from milescli.platform.machine import read_machine
from milescli.recipe.schema import Recipe
from milescli.rollout.collect.journal import BatchRecord
from milescli.runtime.recording.sample_journal import Identity, identity_of
from milescli.runtime.saving import version_of
from milescli.runtime.spec import RunSpec
from tests.plans import PLAN
from tests.runtime.recording.journal_rig import (
    STEPS,
    WRITTEN_S,
    Done,
    Engine,
    Rig,
    Saved,
    said,
    seeds_of,
)
from tests.samples import rewarded


def _require_one_past(done: Done, *, max_staleness: int) -> None:
    """What was trained on is what the weights of this very past say."""
    for step, groups in done.trained.items():
        for _, samples in groups:
            for seed, (token,), logprob, (version,) in samples:
                assert (token, logprob) == said(seed, done.weights[version]), "of another past"
                assert 0 <= version_of(step - 1) - version <= max_staleness


_ways = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(0, 3),
        "filter": st.sampled_from(["none", "zero_variance"]),
        "over_sampling": st.sampled_from([1.0, 1.5]),
    }
)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32).map(random.Random), _ways, st.lists(st.integers(1, 110), max_size=3))
def test_a_killed_run_goes_on_as_the_run_that_it_was(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random, way: dict, kills: list[int]
) -> None:
    rig = Rig(tmp_path_factory.mktemp("journal") / "journal", rng, {"max_filter_rounds": 99, **way})
    rig.bound_bytes = rng.choice([1e9, 9_000])
    before = rig.attempt(dies_at=kills[0] if kills else None, is_new=True)
    for dies_at in [*kills[1:], None]:
        if rng.random() < 0.5:
            rig.tear()
            before.trained.clear()  # what is torn off is sampled again, by whatever weights
        if rng.random() < 0.3:
            rig.saved = rig.saved[:1]  # the newer checkpoint is damaged
        held, position, first = rig.held(), rig.saved[-1].position, rig.saved[-1].step
        after = rig.attempt(dies_at=dies_at)
        _require_one_past(after, max_staleness=way["max_staleness"])
        for place, version in held.items():
            # what these weights sampled they would sample again
            same = before.weights.get(version) == after.weights.get(version, "never")
            is_past = version <= version_of(first)
            if same and place >= position and (is_past or not rig.warned):
                assert not after.seeds & seeds_of(place), f"prompt {place} is sampled again"
        if not rig.warned:
            again = after.trained.keys() & before.trained.keys()
            assert {n: after.trained[n] for n in again} == {n: before.trained[n] for n in again}
        before = Done(
            trained=before.trained | after.trained, weights=before.weights | after.weights
        )


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**32).map(random.Random),
    _ways,
    st.integers(50, 110),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from("AB")), min_size=2, max_size=5),
)
def test_a_run_of_changing_layouts_trains_on_what_its_own_weights_sampled(
    tmp_path_factory: pytest.TempPathFactory,
    rng: random.Random,
    way: dict,
    dies_at: int,
    others: list[tuple[int, str]],
) -> None:
    rig = Rig(tmp_path_factory.mktemp("journal") / "journal", rng, {"max_filter_rounds": 99, **way})
    rig.attempt(dies_at=dies_at, is_new=True)
    for later, line in others:
        if rng.random() < 0.5:
            rig.saved = rig.saved[:1]  # the newer checkpoint is damaged
        rig.identity = Identity(past="p", line=line)
        _require_one_past(rig.attempt(dies_at=later), max_staleness=way["max_staleness"])
    _require_one_past(rig.attempt(), max_staleness=way["max_staleness"])


def _resume(
    folder: Path, line: str, *, after: int, records: Mapping[int, int] = MappingProxyType({})
) -> tuple[list[int], set[int]]:
    """Continue from the checkpoint of step `after` under this line. Return the steps that the
    journal has, and the positions of all its groups. Then record a step of one group, at position
    step - 1, for each step of `records`, sampled by this version of the weights."""
    identity = Identity(past="p", line=line)
    rig = Rig(folder, random.Random(0), {"max_staleness": 1}, identity=identity)
    journal = rig.journal()
    journal.load(step=after, version=version_of(after), position=after)
    steps = [step for step in range(after + 1, 20) if journal.batch(step, start=step - 1)]
    held = set(rig.held())
    for step, version in records.items():
        journal.record_group(step - 1, rewarded([0.0, 1.0], version=version))
        own: dict[str, list[int]] = {"draws": [1], "kept": [step - 1], "refused": []}
        journal.record_batch(BatchRecord(step=step, start=step - 1, end=step, **own))
    journal.close(WRITTEN_S)
    return steps, held


def test_after_two_resumes_groups_of_another_layout_are_not_those_of_reproduced_weights(
    tmp_path: Path,
) -> None:
    assert _resume(tmp_path, "A", after=10, records={11: 11, 12: 12, 13: 13})[0] == []
    assert _resume(tmp_path, "B", after=12, records={14: 14})[0] == [13]
    # the checkpoint of step 12 is damaged
    assert _resume(tmp_path, "B", after=10) == ([11], {10})


def test_after_two_resumes_groups_of_the_same_layout_are_taken(tmp_path: Path) -> None:
    _resume(tmp_path, "A", after=10, records={11: 11})
    assert _resume(tmp_path, "B", after=10, records={12: 12, 13: 13})[0] == [11]
    assert _resume(tmp_path, "B", after=11, records={14: 14})[0] == [12, 13]
    assert _resume(tmp_path, "B", after=10)[0] == [11, 12, 13, 14]


def test_groups_of_weights_that_another_layout_trained_are_not_taken_from_before_that(
    tmp_path: Path,
) -> None:
    _resume(tmp_path, "B", after=10, records={11: 11, 12: 11})
    assert _resume(tmp_path, "A", after=10, records={13: 12})[0] == [11, 12]
    assert _resume(tmp_path, "B", after=12, records={14: 13})[0] == [13]
    assert _resume(tmp_path, "B", after=10) == ([11, 12], {10, 11})


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**32).map(random.Random),
    st.integers(1, 3),
    st.sampled_from(["none", "zero_variance"]),
    st.sampled_from(["retry", "drop", "wait"]),
    st.lists(st.integers(1, 150), max_size=3),
)
def test_a_killed_run_that_takes_what_is_done_first_takes_no_prompt_twice(
    tmp_path_factory: pytest.TempPathFactory,
    rng: random.Random,
    max_staleness: int,
    kind: str,
    stale_groups: str,
    kills: list[int],
) -> None:
    """Its steps are those that it had done, group for group; what was done of the next is taken."""
    way = {"max_staleness": max_staleness, "filter": kind, "stale_groups": stale_groups}
    rig = Rig(
        tmp_path_factory.mktemp("journal") / "journal",
        rng,
        {"order": "done", "max_filter_rounds": 99, **way},
    )
    before = rig.attempt(dies_at=kills[0] if kills else None, is_new=True)
    trained = dict(before.trained)
    for dies_at in [*kills[1:], None]:
        if is_torn := rng.random() < 0.3:
            rig.tear()
        start, held = rig.saved[-1], rig.held()
        after = rig.attempt(dies_at=dies_at)
        _require_one_past(after, max_staleness=max_staleness)
        if not is_torn:
            again = after.trained.keys() & trained.keys()
            assert {n: after.trained[n] for n in again} == {n: trained[n] for n in again}
            newest = version_of(max([start.step, *trained]))
            young = {at for at, v in held.items() if at >= start.position and v > newest - 1}
            sampled = {at for at in young - set(start.taken) if after.seeds & seeds_of(at)}
            assert not sampled, f"prompts {sampled} are sampled again"
        trained = {n: trained[n] for n in trained if n <= start.step} | after.trained
    seeds = [seed for groups in trained.values() for _, samples in groups for seed, *_ in samples]
    assert sorted(trained) == list(range(1, STEPS + 1)) and len(seeds) == len(set(seeds))


def _killed(
    folder: Path, *, when: Callable[[Rig], object] = lambda rig: True, **changes: object
) -> Rig:
    """Ahead by two steps, and killed between checkpoints at a moment when `when` is true: which
    that is depends on threads that write. Asked for again, all is there."""
    for dies_at in range(70, 100):
        rig = Rig(folder / str(dies_at), random.Random(1), {"max_staleness": 2}, **changes)  # type: ignore[arg-type]
        rig.attempt(dies_at=dies_at, is_new=True)
        if rig.saved[-1].step >= 2 and when(rig):
            return rig
    raise AssertionError("there was no such moment")


def _held(rig: Rig) -> dict[int, int]:
    """Place -> version of the weights, of groups that the newest checkpoint does not have."""
    return {place: v for place, v in rig.held().items() if place >= rig.saved[-1].position}


def _older(rig: Rig) -> list[int]:
    """Places of those that weights of the newest checkpoint, or older ones, sampled."""
    last = version_of(rig.saved[-1].step)
    return [place for place, version in _held(rig).items() if version <= last]


def test_what_was_in_flight_is_taken_and_told_of(tmp_path: Path) -> None:
    rig = _killed(tmp_path, when=lambda rig: len(_held(rig)) >= 4)
    held = _held(rig)
    done = rig.attempt()
    assert done.note is not None and f"has {len(held)} groups" in done.note
    assert not done.seeds & set().union(*map(seeds_of, held))


def test_a_journal_of_another_past_is_set_aside(tmp_path: Path) -> None:
    rig = _killed(tmp_path / "journal")
    rig.identity = Identity(past="another", line="l")
    position = rig.saved[-1].position
    done = rig.attempt()
    assert "another history" in (done.note or "") and done.seeds >= seeds_of(position)


def _identity(tmp_path: Path, **sections: dict[str, object]) -> Identity:
    spec = RunSpec(
        run=RunDir(tmp_path),
        recipe=Recipe.model_validate(sections),
        plan=PLAN,
        nodes=SimpleNamespace(machine=read_machine("1xH100")),  # type: ignore[arg-type]
        inputs=SimpleNamespace(data_sha256="x"),  # type: ignore[arg-type]
    )
    return replace(identity_of(spec), started=0.0)


def test_engines_whose_log_probs_are_not_those_of_the_trainer_sampled_another_past(
    tmp_path: Path,
) -> None:
    before = _identity(tmp_path)
    assert _identity(tmp_path, train={"on_policy": "exact"}).past != before.past
    longer = _identity(tmp_path, train={"steps": 7})
    assert (longer.past, longer.line != before.line) == (before.past, True)
    assert _identity(tmp_path, checkpoint={"every": 7}) == before


def test_a_journal_that_is_discarded_is_gone_with_the_parts_of_other_processes(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path / "journal", random.Random(0), {})
    journal = rig.journal()
    part = Rig(journal.part("collector-0"), random.Random(0), {}).journal()
    for position, one in enumerate((journal, part)):
        one.record_group(position, rewarded([0.0, 1.0]))
        assert one.wait_written(WRITTEN_S)
    assert len(list(rig.folder.rglob("*.journal"))) == 2
    journal.discard()
    journal.close(WRITTEN_S)
    part.close(WRITTEN_S)
    assert not list(rig.folder.rglob("*.journal")) and not rig.warned
    assert rig.journal().load(step=0, version=version_of(0), position=0) is None


def test_another_layout_takes_what_the_checkpoints_past_sampled_alone(tmp_path: Path) -> None:
    rig = _killed(tmp_path, when=lambda rig: 0 < len(_older(rig)) < len(_held(rig)))
    held, older = _held(rig), _older(rig)
    rig.identity = Identity(past="p", line="another")
    done = rig.attempt()
    assert not done.seeds & set().union(*map(seeds_of, older))
    assert done.seeds >= set().union(*(seeds_of(place) for place in held if place not in older))


def test_where_a_step_lacks_a_group_what_the_weights_after_it_sampled_is_left(
    tmp_path: Path,
) -> None:
    def newer_than_the_first(rig: Rig) -> list[int]:
        first, older = rig.saved[-1].position, _older(rig)
        return [place for place in _held(rig) if place > first and place not in older]

    rig = _killed(tmp_path, when=newer_than_the_first)
    newer, first = newer_than_the_first(rig), rig.saved[-1].position
    for file in rig.folder.iterdir():
        records = list(intact_records(file))
        lost = [place for place, head in records if head.get("position") == first]
        retain_records(file, [place for place, _ in records if place not in lost])
    done = rig.attempt()
    assert f"{len(newer)} of later weights are not used" in (done.note or "")
    assert done.seeds >= set().union(*map(seeds_of, newer))
    _require_one_past(done, max_staleness=2)


def test_what_no_checkpoint_needs_is_removed(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "journal", random.Random(0), {"max_staleness": 2})
    rig.attempt(is_new=True)
    oldest = rig.saved[0]

    def is_needed(file: Path) -> bool:
        heads = [head for _, head in intact_records(file)]
        steps = [head["batch"]["step"] for head in heads if head["kind"] == "batch"]
        positions = [head["position"] for head in heads if head["kind"] == "group"]
        return max(positions, default=-1) >= oldest.position or max(steps, default=0) > oldest.step

    files = sorted(rig.folder.iterdir())
    assert files and all(map(is_needed, files)), [file.name for file in files]


@pytest.mark.parametrize("is_saved", [False, True])
def test_beyond_the_bound_none_are_kept_until_the_next_checkpoint(
    tmp_path: Path, is_saved: bool
) -> None:
    rig = Rig(tmp_path / "journal", random.Random(0), {}, bound_bytes=3000)
    rig.saved = [Saved(1, "", position=10)]
    journal = rig.journal()
    for position in range(10):
        journal.record_group(position, rewarded([0.0, 1.0]))
    if is_saved:
        journal.checkpoint()
    journal.record_group(10, rewarded([0.0, 1.0]))
    journal.close(WRITTEN_S)
    assert len(rig.warned) == 1 and "fault.journal_gib" in rig.warned[0]
    held = set(rig.held())
    assert held == {10} if is_saved else 0 < len(held) < 10 and 10 not in held
    assert sum(path.stat().st_size for path in rig.folder.iterdir()) < 6000


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file stands where the folder should")
    rig = Rig(tmp_path / "journal", random.Random(0), {"max_staleness": 1})
    assert len(rig.attempt(is_new=True).trained) == STEPS
    assert len(rig.warned) == 1 and "continues" in rig.warned[0]


def test_a_record_that_is_damaged_while_the_run_works_is_sampled_anew(tmp_path: Path) -> None:
    rig = _killed(tmp_path / "journal")
    start = rig.saved[-1]

    async def run() -> Done:
        journal, done, engine = rig.journal(), Done(), Engine(rig.rng, None)
        journal.load(step=start.step, version=version_of(start.step), position=start.position)
        for path in rig.folder.iterdir():
            path.write_bytes(bytes(path.stat().st_size))
        await rig.run(done, start, journal, engine)
        journal.close(WRITTEN_S)
        return done

    assert sorted(asyncio.run(run()).trained) == list(range(start.step + 1, STEPS + 1))
    assert "cannot be read any more" in rig.warned[0]
    assert rig.held(), "not begun anew"
