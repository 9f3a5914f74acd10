"""A model behind an endpoint is measured over real HTTP: what it is asked, what is kept, and that
nothing is asked twice."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from milescli.console.output import Output
from milescli.core.errors import EndpointError, MilesError
from milescli.runtime.evaluation.endpoint import evaluate_endpoint
from milescli.runtime.evaluation.results import SetResult
from milescli.runtime.evaluation.sets import EvalOptions
from tests.endpoint_server import Asked, Reply, quick_retries, serving

__all__ = ["quick_retries"]
KEY = "sk-very-secret-43"
ADD = {"type": "function", "function": {"name": "add"}}


def _adds(asked: Asked, number: int) -> Reply:
    """What is asked for, in every second answer by its seed; one in four is cut off."""
    words = asked.body["messages"][-1]["content"].split()
    seed = asked.body["seed"]
    said = f"#### {int(words[0]) + int(words[2]) + seed % 2}"
    ended = "length" if seed % 4 == 0 else "stop"
    choice = {"message": {"role": "assistant", "content": said}, "finish_reason": ended}
    return Reply({"choices": [choice], "usage": {"completion_tokens": 3}})


def _file(folder: Path, **more: object) -> Path:
    rows = [{"prompt": f"{n} + 2", "label": str(n + 2), **more} for n in range(6)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "sums.jsonl"


def _measure(
    url: str, file: Path, *sets: str, folder: Path | None = None, told: io.StringIO | None = None
) -> tuple[Path, list[SetResult]]:
    return evaluate_endpoint(
        url,
        folder=folder,
        runs=file.parent / "evaluations",
        eval_options=EvalOptions(data=[str(file)], sets=["rollout.reward=gsm8k", *sets]),
        environ={},
        output=Output(stderr=told or io.StringIO()),
    )


SAMPLED = ("eval.samples_per_prompt=4", "eval.temperature=0.7")


def test_each_prompt_is_asked_as_the_recipe_says_and_scored(tmp_path: Path) -> None:
    with serving(_adds) as server:
        more = (*SAMPLED, "eval.max_response_tokens=77", "data.system_prompt=Add.")
        folder, (result,) = _measure(server.url, _file(tmp_path, tools=[ADD]), *more)
    assert len(server.asked) == 24 and {one.path for one in server.asked} == {
        "/v1/chat/completions"
    }
    body = server.asked[0].body
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 77, 0.7)
    assert body["tools"] == [ADD]
    assert [turn["role"] for turn in body["messages"]] == ["system", "user"]
    seeds = [one.body["seed"] for one in server.asked]
    assert len(set(seeds)) == 24
    assert result.accuracy == sum(seed % 2 == 0 for seed in seeds) / 24
    assert result.truncated_fraction == sum(seed % 4 == 0 for seed in seeds) / 24
    assert (result.model, result.response_tokens_mean) == (f"tiny at {server.url}", 3.0)
    assert set(result.estimates) >= {"pass@4", "maj@4"}
    rows = pq.read_table((folder / result.path).with_suffix(".parquet")).to_pylist()
    assert len(rows) == 24 and all(row["response"].startswith("#### ") for row in rows)


@pytest.mark.parametrize(
    ("ids", "tool_ids", "sent", "sent_by_tools"),
    [
        ([None, None], [None, None], ["call_0", "call_1"], ["call_0", "call_1"]),
        (["a", None], [None, "b"], ["a", "b"], ["a", "b"]),
        (["a", "b"], ["b", None], ["a", "b"], ["b", "a"]),
        ([None, "b"], ["b", None], ["call_0", "b"], ["b", "call_0"]),
    ],
)
def test_calls_of_tools_are_sent_in_the_form_of_an_endpoint(
    tmp_path: Path,
    ids: list[str | None],
    tool_ids: list[str | None],
    sent: list[str],
    sent_by_tools: list[str],
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"of": ["é", 2]}}}
    forms = (call, call["function"])  # the second without a level, as some data has it
    calls = [{**form, **({"id": one} if one else {})} for form, one in zip(forms, ids, strict=True)]
    turns = [{"role": "tool", "content": "4"} for _ in ids]
    turns = [
        {**t, **({"tool_call_id": n} if n else {})} for t, n in zip(turns, tool_ids, strict=True)
    ]
    chat = [
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *turns,
        {"role": "user", "content": "4 + 2"},
    ]
    with serving(_adds) as server:
        _measure(server.url, _file(tmp_path, prompt=chat, label="6"))
    _, answer, *results, _ = server.asked[0].body["messages"]
    assert [one["id"] for one in answer["tool_calls"]] == sent
    assert {one["function"]["arguments"] for one in answer["tool_calls"]} == {'{"of": ["é", 2]}'}
    assert [one["tool_call_id"] for one in results] == sent_by_tools


def test_replies_are_kept_and_only_the_others_are_asked_for_again(
    tmp_path: Path, quick_retries: None
) -> None:
    file, one_by_one = _file(tmp_path), "eval.endpoint.concurrency=1"

    def fails(asked: Asked, number: int) -> Reply:
        return _adds(asked, number) if number < 10 else Reply("no more", status=400)

    folder = tmp_path / "here"
    kept = folder / "eval" / "sums" / "replies.jsonl"
    for attempt in (1, 2):
        with serving(fails) as server, pytest.raises(EndpointError, match="HTTP 400: no more"):
            _measure(server.url, file, *SAMPLED, one_by_one, folder=folder)
        assert len(kept.read_text().splitlines()) == 10 * attempt
        with kept.open("a") as cut_off:
            cut_off.write('{"request": "ab')
    with serving(_adds) as server:
        _, again = _measure(server.url, file, *SAMPLED, folder=folder)
        assert len(server.asked) == 4
        _, whole = _measure(server.url, file, *SAMPLED)
    assert again[0].rewards == whole[0].rewards
    assert not kept.exists(), "what is in the result is not kept twice"


def test_an_endpoint_without_a_list_is_asked_for_the_model_that_is_named(tmp_path: Path) -> None:
    file = _file(tmp_path)
    with serving(_adds, models=None) as server:
        with pytest.raises(EndpointError, match="no such page"):
            _measure(server.url, file)
        _, (result,) = _measure(server.url, file, "eval.endpoint.model=small")
    assert result.model == f"small at {server.url}"
    assert {one.body["model"] for one in server.asked} == {"small"}


def test_the_key_is_sent_and_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with serving(_adds) as server:
        _measure(server.url, _file(tmp_path), "eval.endpoint.api_key_env=MY_KEY")
    assert {one.authorization for one in server.asked} == {f"Bearer {KEY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in files)


def test_extra_fields_are_added_and_null_leaves_one_out(tmp_path: Path) -> None:
    extra = """eval.endpoint.extra=[max_tokens=null, max_completion_tokens=9, 'effort="low"']"""
    with serving(_adds) as server:
        _, (result,) = _measure(server.url, _file(tmp_path), extra)
        _, (plain,) = _measure(server.url, _file(tmp_path))
    body = server.asked[0].body
    assert "max_tokens" not in body
    assert (body["max_completion_tokens"], body["effort"]) == (9, "low")
    assert result.fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("address", "sets", "told"),
    [
        ("{}", ["eval.endpoint.extra=[a=b]"], "cannot be read: a=b"),
        ("{}", ["eval.endpoint.model=big"], "there is no model `big`"),
        ("{}", ["eval.endpoint.api_key_env=NO_SUCH_KEY"], "needs an API key"),
        ("{}", ["rollout.agent=mine:agent"], "evaluated in this way"),
        ("{}?key=1", [], "contains more"),
        ("http://me:secret@127.0.0.1:1/v1", [], "contains more"),
        ("http://", [], "not the address"),
        ("http://127.0.0.1:9/v1", [], "no connection"),
    ],
)
def test_what_cannot_be_asked_is_refused_and_nothing_is_left(
    tmp_path: Path, quick_retries: None, address: str, sets: list[str], told: str
) -> None:
    with serving(_adds) as server, pytest.raises(MilesError, match=told):
        _measure(address.format(server.url), _file(tmp_path), *sets)
    assert server.asked == [] and not (tmp_path / "evaluations").exists()


def test_one_of_several_models_is_to_be_named(tmp_path: Path) -> None:
    with serving(_adds, models=["big", "small/one"]) as server:
        with pytest.raises(MilesError, match="must be named") as refused:
            _measure(server.url, _file(tmp_path))
        assert "eval.endpoint.model=small/one" in refused.value.fixes[1]
        folder, _ = _measure(server.url, _file(tmp_path), "eval.endpoint.model=small/one")
    assert folder.name == "small-one"


@pytest.mark.parametrize(
    "prompt", [[1, 2], [{"role": "assistant", "content": "x"}]], ids=["tokens", "no question"]
)
def test_prompts_that_are_no_messages_are_refused(tmp_path: Path, prompt: object) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "label": "1"}))
    with serving(_adds) as server, pytest.raises(MilesError):
        _measure(server.url, tmp_path / "a.jsonl")
    assert server.asked == []


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"content": None, "reasoning_content": "#### 4"},
            "6 have their text in `reasoning_content`",
        ),
        ({"content": "", "refusal": "no"}, "6 have their text in `refusal`"),
        ({"content": None}, "6 say nothing at all"),
    ],
)
def test_replies_without_content_are_counted_and_it_is_said_where_their_text_went(
    tmp_path: Path, message: dict[str, object], says: str
) -> None:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": "stop"}
    told = io.StringIO()
    with serving(lambda *_: Reply({"choices": [choice]})) as server:
        _, (result,) = _measure(server.url, _file(tmp_path), told=told)
    said = " ".join(told.getvalue().split())
    assert result.accuracy == 0.0 and "6 of 6 replies have no content" in said and says in said


def test_an_endpoint_is_asked_through_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(_adds) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        _measure("http://model.invalid/v1", _file(tmp_path))
    assert {asked.path for asked in proxy.asked} == {"http://model.invalid/v1/chat/completions"}
