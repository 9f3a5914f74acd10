"""Tests of the judge against a real HTTP server: what it is asked, how its replies are read, and
that it ends, within its bounds and its budget, whatever the server does."""

from __future__ import annotations

import asyncio
import logging
import pickle
from pathlib import Path

import pytest

from milescli.core.errors import RecipeError, RewardError
from milescli.core.types import Image, Prompt
from milescli.recipe.rewards import JudgeSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.rewards import load_rewards, needs_label, scorer_of
from milescli.rollout.rewards.scoring import Response
from milescli.rollout.rewards.served import judge as module
from tests.endpoint_server import Asked, Reply, quick_retries, said, serving

__all__ = ["quick_retries"]
PROMPT = Prompt(index=5, token_ids=[1], text="2 + 2?", label="4")
KEY = "sk-very-secret-42"


def _rollout(url: str, **settings: object) -> Rollout:
    judge = JudgeSettings(url=url, model="tiny-judge", **settings)  # type: ignore[arg-type]
    return Rollout(reward="judge", judge=judge)


def _scores(rollout: Rollout, texts: list[str], *, prompt: Prompt = PROMPT) -> list[float]:
    async def run() -> list[float]:
        scorer = scorer_of(rollout)
        async with asyncio.timeout(60):
            calls = [scorer.score_response(prompt, Response(text=text)) for text in texts]
            return [score.reward for score in await asyncio.gather(*calls)]

    return asyncio.run(run())


def test_it_is_asked_with_prompt_response_and_label_and_its_score_is_scaled() -> None:
    with serving(lambda asked, number: said("It is fine.\n**Score: 7.5**")) as server:
        assert _scores(_rollout(server.url, max_tokens=64), ["it is {label}"]) == [0.75]
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions" and asked.authorization is None
    assert asked.body["model"] == "tiny-judge" and asked.body["max_tokens"] == 64
    question = asked.body["messages"][0]["content"]
    assert "2 + 2?" in question and "[reference answer]\n4\n" in question
    assert "it is {label}" in question, "what a response says is not filled in"


@pytest.mark.parametrize("images", [True, False])
def test_it_sees_the_images_of_the_prompt_unless_it_reads_text_alone(images: bool) -> None:
    shown = tuple(
        Image(sha256=name, png=png, width=1, height=1, grid=(1, 1, 1), num_tokens=1)
        for name, png in (("a", b"one"), ("b", b"two"))
    )
    prompt = Prompt(index=0, token_ids=[1], text="Which?", label="4", images=shown)
    with serving(lambda asked, number: said("Score: 10")) as server:
        assert _scores(_rollout(server.url, images=images), ["hi"], prompt=prompt) == [1.0]
    content = server.asked[0].body["messages"][0]["content"]
    if not images:
        assert "Which?" in content
        return
    assert content[0]["type"] == "text" and "Which?" in content[0]["text"]
    urls = [part["image_url"]["url"] for part in content[1:]]
    assert urls == ["data:image/png;base64,b25l", "data:image/png;base64,dHdv"]


def test_without_a_label_there_is_no_reference_answer() -> None:
    prompt = Prompt(index=0, token_ids=[1], text="Hello?", label=None)
    with serving(lambda asked, number: said("Score: 10")) as server:
        assert _scores(_rollout(server.url), ["hi"], prompt=prompt) == [1.0]
        assert not needs_label(_rollout(server.url))
        assert needs_label(_rollout(server.url, prompt="{response} == {label}?"))
    assert "reference" not in server.asked[0].body["messages"][0]["content"]


def test_the_question_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text("P {prompt} R {response} L {label}")
    with serving(lambda asked, number: said("no: 1, no: 2")) as server:
        options = {"prompt": str(tmp_path / "judge.txt"), "parse": r"no: (-?\d)", "scale": 4.0}
        assert _scores(_rollout(server.url, **options), ["five"]) == [0.5]
    assert server.asked[0].body["messages"][0]["content"] == "P 2 + 2? R five L 4"


@pytest.mark.parametrize(
    ("prompt", "what"), [("missing.txt", "cannot be read"), ("how good?", "not see the response")]
)
def test_a_question_that_cannot_be_asked_is_refused_before_the_run(prompt: str, what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        load_rewards(_rollout("http://127.0.0.1:1/v1", prompt=prompt))


def test_the_key_comes_from_the_environment_and_is_told_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(asked: Asked, number: int) -> Reply:
        return Reply(f"bad key {asked.authorization}", status=401)

    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(refusing) as server, caplog.at_level(logging.DEBUG):
        rollout = _rollout(server.url, api_key_env="JUDGE_KEY")
        with pytest.raises(RewardError, match="HTTP 401") as refused:
            _scores(rollout, ["4"])
    assert [asked.authorization for asked in server.asked] == [f"Bearer {KEY}"]
    said_of_it = f"{refused.value} {pickle.dumps(refused.value)!r} {rollout!r} {caplog.text}"
    assert KEY not in said_of_it and "bad key Bearer ***" in str(refused.value)
    assert KEY not in repr(vars(load_rewards(rollout)["judge"]))


@pytest.mark.parametrize("value", [None, "", "two words"])
def test_a_key_that_is_not_there_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(RecipeError, match="key"):
        load_rewards(_rollout("http://127.0.0.1:1/v1", api_key_env="JUDGE_KEY"))


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_fails_for_a_while_is_tried_again(status: int) -> None:
    def flaky(asked: Asked, number: int) -> Reply:
        busy = Reply("busy", status=status, headers={"Retry-After": "3600"})
        return busy if number < 2 else said("Score: 5")

    with serving(flaky) as server:
        assert _scores(_rollout(server.url, retries=2), ["4"]) == [0.5]
    assert len(server.asked) == 3


@pytest.mark.usefixtures("quick_retries")
def test_what_fails_for_ever_is_given_up_and_says_how() -> None:
    with serving(lambda asked, number: Reply("overloaded", status=503)) as server:
        with pytest.raises(RewardError) as refused:
            _scores(_rollout(server.url, retries=2), ["4"])
        assert server.url in refused.value.what and len(server.asked) == 3
    assert "HTTP 503: overloaded (attempt 3 of 3)" in refused.value.why


@pytest.mark.usefixtures("quick_retries")
def test_a_server_that_is_silent_or_gone_costs_its_bound() -> None:
    with serving(lambda asked, number: Reply(silent=True)) as server:
        with pytest.raises(RewardError, match=r"no reply within 0\.2 s \(attempt 2 of 2\)"):
            _scores(_rollout(server.url, timeout_s=0.2, retries=1), ["4"])
        url = server.url
    with pytest.raises(RewardError, match="no connection"):
        _scores(_rollout(url, timeout_s=120.0, retries=1), ["4"])


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply("no", status=400), "HTTP 400: no"),
        (Reply("", status=302, headers={"Location": "http://127.0.0.1:1/"}), "HTTP 302"),
        (Reply("<html>"), "its reply is no JSON: '<html>'"),
        (Reply({"error": "no model"}), "none of a chat completion: {'error': 'no model'}"),
        (Reply("x" * (5 * 1024**2)), "longer than"),
    ],
)
def test_a_refusal_or_nonsense_is_not_tried_again(reply: Reply, why: str) -> None:
    with serving(lambda asked, number: reply) as server:
        with pytest.raises(RewardError) as refused:
            _scores(_rollout(server.url), ["4"])
        assert why in refused.value.why and len(server.asked) == 1


@pytest.mark.usefixtures("quick_retries")
def test_the_budget_counts_retries_and_stops_the_run() -> None:
    with serving(lambda asked, number: Reply("busy", status=503)) as server:
        with pytest.raises(RewardError, match="its budget of 3 requests is spent") as refused:
            _scores(_rollout(server.url, max_requests=3, retries=5), ["4"])
        assert len(server.asked) == 3
    assert "--set rollout.judge.max_requests=6" in refused.value.fixes


@pytest.mark.parametrize(
    "text",
    ["no idea", "Score: 95", "Score: -11", "<think>Score: 7</think>well", "", "Score: seven"],
)
def test_two_replies_without_a_score_are_an_error_or_zero(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run(url: str) -> tuple[float, int]:
        judge = module.Judge(_rollout(url, unparsed="zero").judge)
        return await judge(prompt="", response="4", label=None), judge.num_unparsed

    with serving(lambda asked, number: said(text)) as server:
        assert asyncio.run(run(server.url)) == (0.0, 1)
        assert "no score from -10 to 10 in" in caplog.text
        with pytest.raises(RewardError, match="no score from -10 to 10"):
            _scores(_rollout(server.url), ["4"])
        assert len(server.asked) == 4


def test_a_judge_that_forgets_its_score_once_is_asked_again() -> None:
    with serving(lambda asked, number: said("hm" if number == 1 else "Score: 5")) as server:
        assert _scores(_rollout(server.url), ["4"]) == [0.5]


def test_where_no_reply_at_all_has_a_score_the_run_stops() -> None:
    with (
        serving(lambda asked, number: said("I cannot judge.")) as server,
        pytest.raises(RewardError, match=f"so it is with all of {module.MAX_UNPARSED} replies"),
    ):
        _scores(_rollout(server.url, unparsed="zero"), ["4"] * module.MAX_UNPARSED)


def test_many_are_asked_at_once_and_no_more_than_told() -> None:
    def replies(asked: Asked, number: int) -> Reply:
        server.ended.wait(0.05)
        text = asked.body["messages"][0]["content"]
        return said(f"Score: {text.partition('is ')[2]}")

    with serving(replies) as server:
        rollout = _rollout(server.url, concurrency=4, prompt="is {response}")
        scores = _scores(rollout, [str(number % 10) for number in range(24)])
    assert scores == [number % 10 / 10 for number in range(24)]
    assert 1 < server.most_at_once <= 4
