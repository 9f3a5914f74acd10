from __future__ import annotations

import pytest

from tests.chaos.faults import ALWAYS, FAULTS, Ending, chosen, trial
from tests.chaos.victims import ROLES


def test_every_row_has_a_name_of_its_own_and_a_victim_that_can_be_found() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        needs_victim = fault.times == 1 and (fault.harm.startswith("SIG") or fault.harm == "oom")
        assert needs_victim == bool(fault.victim), fault.name
        assert not fault.victim or fault.victim in {*ROLES, "driver", "parent", "watchdog"}
        assert fault.moments and fault.endings and fault.within_s > 0


def test_a_death_that_ends_a_run_must_be_named() -> None:
    for fault in FAULTS:
        if Ending.NAMED in {*fault.endings, *(fault.at_start or ())}:
            assert fault.said, fault.name


def test_equal_seeds_give_equal_trials_and_seeds_in_a_row_give_every_pair() -> None:
    faults = chosen(["engine", "rank-kill"])
    cells = [(fault.name, moment) for fault in faults for moment in fault.moments]
    trials = [trial(faults, seed) for seed in range(7, 7 + len(cells))]
    assert {(one.fault.name, one.moment) for one in trials} == set(cells)
    for one in trials:
        again = trial(faults, one.seed)
        assert again == one and again.chance().random() == one.chance().random()
    assert len({one.chance().random() for one in trials}) == len(trials)


def test_rows_are_chosen_by_name_or_group_and_an_unknown_one_is_refused() -> None:
    assert {fault.group for fault in chosen(["rank"])} == {"rank"}
    assert [fault.moments for fault in chosen(["rank-kill"])] == [ALWAYS]
    assert chosen([]) == list(FAULTS)
    with pytest.raises(ValueError, match="no fault is called rnk"):
        chosen(["rnk"])
