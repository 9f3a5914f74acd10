"""The HTML report: the live page as one file that asks nothing of anybody, and tells nothing
private. What a browser draws of it is tested in `browser/test_saved.py`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milescli.checkpoint.run_dir import open_run
from milescli.core.history import Columns
from milescli.report.compare import compare
from milescli.report.make import run_figures
from milescli.report.subject import read_subject
from milescli.web import columns
from milescli.web.saved import MAX_IMAGE_BYTES, compare_page, run_page
from tests.insight.planted import Planted, line
from tests.report.run_folders import (
    make_planted,
    make_run,
    make_several,
    make_sick,
    row_events,
    write_evaluation,
    write_samples,
)

EVIL = "</script><!--<script>document.title='broken'</script><img src=x onerror=alert(1)>"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def page_of(folder: Path) -> str:
    """Of a run's directory."""
    return run_page(read_subject(open_run(folder)))


def saved_in(page: str) -> dict[str, Any]:
    """What the page holds in place of a server."""
    return json.loads(re.search(r'<script type="application/json" id="saved">(.*?)</', page)[1])


def answers_of(folder: Path) -> dict[str, Any]:
    """Of a run's own page."""
    return saved_in(page_of(folder))["answers"][folder.name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has everything, and whose model writes what no page should run."""
    folder = make_planted(tmp_path_factory.mktemp("runs") / "planted-1", lost=(12,))
    for step in (1, 40, 80):
        write_samples(folder, step, [0.0, 1.0, 0.0, 0.5], f"{EVIL} hf_{'a' * 20} at step {step}")
    write_evaluation(folder, 80, 0.7, seed=1)
    return folder


def test_the_page_holds_what_it_asks_a_server_for(whole: Path) -> None:
    subject = read_subject(open_run(whole))
    saved = saved_in(run_page(subject))
    assert [one["id"] for one in saved["runs"]] == ["planted-1"]
    answers = saved["answers"]["planted-1"]
    assert answers["summary"]["verdict"]["headline"] == subject.verdict.headline
    assert answers["columns"]["steps"] == list(range(1, 81))
    reward = subject.points("rollout/reward_mean")
    drawn = answers["columns"]["columns"]["rollout/reward_mean"]
    assert drawn == pytest.approx([value for _, value in reward], rel=1e-4)
    names = {one["name"] for one in answers["names"]["columns"]}
    assert names == set(answers["columns"]["columns"])
    assert {"engine 1", "rollout"} <= {one["actor"] for one in answers["timeline"]["intervals"]}
    assert answers["plan"]["decisions"][0]["reason"].startswith("no GPU is visible")
    keys = {one["key"]: one for one in answers["recipe"]["keys"]}
    assert keys["train.optimizer.lr"] == {
        "key": "train.optimizer.lr",
        "value": "1e-06",
        "origin": "--set",
    }
    assert answers["sample-steps"]["steps"] == [1, 40, 80]
    (group,) = answers["samples"]["40"]["groups"]
    assert group["rewards"] == [0.0, 1.0, 0.0, 0.5] and group["prompt_index"] == 7
    assert [one["reward"] for one in group["samples"]] == [1.0, 0.0]
    last = answers["evaluations"]["evaluations"][-1]
    assert last["step"] == 80 and "path" not in last


def test_an_evaluation_has_its_interval(tmp_path: Path) -> None:
    folder = make_planted(tmp_path / "one")
    accuracy = read_subject(open_run(folder)).history.evaluations[-1].accuracy
    rows = [{"index": n, "prompt": str(n), "reward": accuracy} for n in range(4)]
    (folder / "eval").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file = folder / read_subject(open_run(folder)).history.evaluations[-1].path
    file.write_text(text)
    interval = answers_of(folder)["evaluations"]["evaluations"][-1]["interval"]
    assert 0 < interval["low"] < accuracy < interval["high"] < 1


def test_what_a_model_wrote_is_data_and_never_markup(whole: Path) -> None:
    page = page_of(whole)
    tags = _Tags()
    tags.feed(page)
    assert "img" not in {tag for tag, _ in tags.seen} and "<!--" not in page
    kinds = [told.get("type") for tag, told in tags.seen if tag == "script"]
    assert kinds == ["application/json", None]
    attributes = {name for _, told in tags.seen for name in told}
    assert not {name for name in attributes if name.startswith("on")} | (attributes & {"style"})
    (group,) = saved_in(page)["answers"]["planted-1"]["samples"]["80"]["groups"]
    assert group["samples"][0]["response"].startswith(EVIL)


def test_the_policy_allows_its_own_script_and_style_alone_and_nothing_is_loaded(
    whole: Path,
) -> None:
    page = page_of(whole)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    for name in ("script", "style"):
        body = re.findall(rf"<{name}>(.*?)</{name}>", page, re.S)
        assert len(body) == 1
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    tags = _Tags()
    tags.feed(page)
    loads = {"src", "srcset", "action"}
    assert not [told for _, told in tags.seen if loads & set(told)]
    assert [told["href"] for _, told in tags.seen if "href" in told] == ["#main"]


def test_no_secret_and_no_place_of_the_machine_is_told(whole: Path) -> None:
    page = page_of(whole)
    for word in ("s3cret", "hf_a", "/data/alice", str(whole), "alice"):
        assert word not in page, word
    assert "…/Qwen3" in page and "[removed]" in page
    data = answers_of(whole)["manifest"]["data"]["prompts"]
    assert (data["path"], data["num_rows"]) == ("…/sums.jsonl", 8192)


def test_a_long_run_is_still_a_small_file(tmp_path: Path) -> None:
    page = page_of(make_planted(tmp_path / "long", steps=3000, eval_every=100))
    assert len(page.encode()) < 900_000
    answers = saved_in(page)["answers"]["long"]
    drawn = answers["columns"]
    assert drawn["num_steps"] == 3000 and 500 < len(drawn["steps"]) <= 1200
    assert (drawn["steps"][0], drawn["steps"][-1]) == (1, 3000)
    timed = {one["step"] for one in answers["timeline"]["intervals"] if one["actor"] == "trainer"}
    assert min(timed) == 2801


@settings(max_examples=20, deadline=None)
@given(spikes=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5000), max_size=8))
def test_no_spike_of_any_figure_is_lost(spikes: dict[str, int]) -> None:
    table = Columns()
    for step in range(1, 5001):
        table.add(step, {name: 9.0 if spikes.get(name) == step else 0.5 for name in "abcdefgh"})
    drawn = columns.chart_columns(table, list(table), points=1000)
    assert len(drawn["steps"]) <= 1000
    for name, step in spikes.items():
        assert drawn["columns"][name][drawn["steps"].index(step)] == 9.0


def test_runs_that_failed_go_on_or_never_began_have_a_page(tmp_path: Path) -> None:
    error = {"error": "engine 0 died of <b>", "why": "SIGKILL at /srv/a/b.log", "fix": ["less x"]}
    planted = Planted(steps=20, error=error)
    failed = answers_of(make_run(tmp_path / "failed", planted.events()))["summary"]
    assert failed["error"] == {**error, "why": "SIGKILL at …/b.log"}
    going_on = answers_of(make_run(tmp_path / "going", Planted(steps=20, ends=False).events()))
    assert (going_on["summary"]["step"], going_on["summary"]["error"]) == (20, None)
    empty = answers_of(make_run(tmp_path / "empty"))
    assert empty["summary"]["state"] == "not started" and empty["columns"]["steps"] == []
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "recipe.yaml").write_text("")
    assert answers_of(bare)["summary"]["state"] == "not started"


def test_findings_memory_and_results_of_miles_eval_are_told(tmp_path: Path) -> None:
    answers = answers_of(make_sick(tmp_path / "sick"))
    findings = {one["name"]: one for one in answers["summary"]["verdict"]["findings"]}
    found = findings["entropy-explosion"]
    assert found["advice"] and found["source"] and "nats per token" in found["evidence"]
    assert found["steps"] == [65, 80]
    (result,) = answers["evaluations"]["sets"]
    assert result["set"] == "hard <sums>"
    assert result["estimates"]["pass@4"] == {"value": 0.75, "low": 0.25, "high": 1.0}
    held = {one["worker"]: one["peak_bytes"] for one in answers["summary"]["memory"]}
    assert held == {"engine-0": 2 * 2**30, "others": 2**30}
    assert answers["memory"]["whole"] == {"most_bytes": 3 * 2**30, "oom_kills": 2}


def test_of_several_adapters_each_has_its_part(tmp_path: Path) -> None:
    folder = make_several(tmp_path / "several", names=("sums", "words"))
    saved = saved_in(page_of(folder))
    assert saved["runs"][0]["adapters"] == ["several:sums", "several:words"]
    for name in saved["runs"][0]["adapters"]:
        assert saved["answers"][name]["summary"]["step"] == 12
        assert len(saved["answers"][name]["columns"]["steps"]) == 12
    figures = run_figures(read_subject(open_run(folder)))
    states = [one["summary"]["state"] for one in figures["adapters"].values()]
    assert states == [figures["state"]] * 2 == ["killed"] * 2


def test_a_run_over_rows_tells_of_its_loss(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "rows", row_events(line(2.0, 0.5), line(2.1, 0.7)))
    answers = answers_of(folder)
    assert answers["summary"]["learns_from_rows"] and answers["summary"]["reward"] is None
    assert answers["evaluations"]["validations"] and answers["sample-steps"]["steps"] == []


def test_two_runs_are_one_page_with_their_comparison(tmp_path: Path) -> None:
    folders = [
        make_planted(tmp_path / name, seed=len(name), lr=lr)
        for name, lr in (("a", 1e-6), ("bb", 5e-6))
    ]
    told = compare(*(read_subject(open_run(folder)) for folder in folders))
    saved = saved_in(compare_page(told))
    assert [one["id"] for one in saved["runs"]] == ["a", "bb"] == [*saved["answers"]]
    comparison = saved["comparison"]
    assert comparison["headline"] == told.headline and comparison["sentences"] == told.sentences
    assert "EWC" in comparison["sentences"][0]
    (differing,) = comparison["differing"]
    assert (differing["name"], differing["b"]) == ("train.optimizer.lr", "5e-06")
    assert ["step", "80 of 80", "80 of 80"] in comparison["figures"]


def test_pictures_of_samples_stand_in_the_file(tmp_path: Path) -> None:
    """By their hashes; a file whose content is another is none, and one too large is left out."""
    folder = make_planted(tmp_path / "seeing")
    pngs = [b"\x89PNG\r\n\x1a\n" + bytes(size) for size in (40, MAX_IMAGE_BYTES, 50)]
    *names, returned = (hashlib.sha256(png).hexdigest() for png in pngs)
    write_samples(folder, 5, [0.0, 1.0], "3")
    file = folder / "rollouts" / "step_5.jsonl"
    rows = [
        json.loads(row) | {"images": [*names, "f" * 64, EVIL], "returned_images": [returned]}
        for row in file.open()
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "images").mkdir()
    for name, png in zip((*names, returned, "f" * 64), (*pngs, pngs[0]), strict=True):
        (folder / "images" / f"{name}.png").write_bytes(png)
    page = page_of(folder)
    held = saved_in(page)
    [group] = held["answers"]["seeing"]["samples"]["5"]["groups"]
    assert group["images"] == [*names, "f" * 64]
    assert group["samples"][0]["returned_images"] == [returned]
    urls = [f"data:image/png;base64,{base64.b64encode(pngs[n]).decode()}" for n in (0, 2)]
    assert held["images"] == {names[0]: urls[0], returned: urls[1]}
    assert "img-src data:;" in page
