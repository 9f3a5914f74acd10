"""A real sweep: its driver is killed while a trial learns, and it goes on; the winner's recipe can
be launched."""

from __future__ import annotations

import json
import signal

from milescli.checkpoint.run_control import driver_of
from milescli.checkpoint.run_dir import RunDir
from milescli.sweep.folder import LEDGER
from tests.end_to_end.runs import Workplace, processes_of_run, step_done, wait_until_gone

SWEEP = """\
recipe: tiny.yaml
searcher: grid
set: {eval.every: 2, checkpoint.every: 2}
search:
  train.optimizer.lr: {grid: [1e-3, 1e-5]}
  train.algorithm: {grid: [grpo, nonsense]}
"""


def test_a_sweep_that_was_killed_goes_on_and_writes_the_best_recipe(workplace: Workplace) -> None:
    (workplace.folder / "sums.yaml").write_text(SWEEP)
    sweep = workplace.start("sweep", "sums.yaml")
    workplace.wait_for("sums-2", step_done(3), sweep)
    driver = driver_of(RunDir(workplace.run("sums-2")))
    assert driver is not None
    left = processes_of_run(driver.pid)
    sweep.send_signal(signal.SIGKILL)
    assert workplace.finish(sweep).code == -signal.SIGKILL
    assert not wait_until_gone(left), "a trial outlived its sweep"

    again = workplace.miles("sweep", "sums.yaml", "--json")
    assert again.code == 3 and "miles resume runs/sums" in again.err
    resumed = workplace.miles("resume", "sums", "--json")
    assert resumed.code == 0, resumed
    told = json.loads(resumed.out.splitlines()[-1])
    states = {one["run"]: one["state"] for one in told["trials"]}
    assert states == {"sums-1": "done", "sums-2": "done", "sums-3": "refused", "sums-4": "refused"}
    for one in told["trials"][:2]:
        assert one["step"] == 6 and one["interval"]["low"] <= one["accuracy"]
        events = [event["event"] for event in workplace.events(one["run"])]
        assert events.count("RunEnded") == (1 if one["run"] == "sums-1" else 2)
    assert len((workplace.run("sums") / LEDGER).read_text().splitlines()) >= 4

    plan = workplace.miles("launch", told["winner_recipe"], "--dry-run", "--json")
    assert plan.code == 0, plan
    report = workplace.miles("report", "sums", "--to", "sums.md")
    assert report.code == 0 and "nonsense" in (workplace.folder / "sums.md").read_text()
