"""`miles serve` of a run: what OpenAI's client gets from a checkpoint, and what is left behind."""

from __future__ import annotations

import json
import select
import signal
import subprocess
from typing import Any

import openai
import pytest

from tests.end_to_end.runs import Finished, Workplace, processes_of_run, wait_until_gone
from tests.waiting import until

USER: list[Any] = [{"role": "user", "content": "1 + 2 = ?"}]


def _address(process: subprocess.Popen[str]) -> dict[str, str]:
    """Where it serves: the first line on stdout, when it does."""
    out = process.stdout
    assert out is not None
    until(lambda: select.select([out], [], [], 0)[0], "a line of `miles serve`", within_s=480)
    line = out.readline()
    assert line, process.communicate(timeout=300)
    return json.loads(line)


@pytest.mark.thorough
def test_a_checkpoint_is_served_until_a_signal_and_leaves_nothing(
    workplace: Workplace, whole: Finished
) -> None:
    run = workplace.run("whole")
    before = sorted(run.rglob("*"))
    process = workplace.start("serve", "whole@3", "--port", "0", "--tokens", "16", "--json")
    try:
        told = _address(process)
        processes = processes_of_run(process.pid)
        assert told["base_url"].startswith("http://127.0.0.1:") and told["model"] == "whole@3"
        assert told["api_key"] not in " ".join(w for one in processes for w in one.cmdline())
        client = openai.OpenAI(
            base_url=told["base_url"], api_key=told["api_key"], max_retries=0, timeout=300
        )
        assert [model.id for model in client.models.list()] == ["whole@3"]
        _asks(client, told["model"])
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
    finally:
        process.send_signal(signal.SIGINT)
        ended = workplace.finish(process, timeout_s=300)
    assert ended.code == 0, ended
    assert not wait_until_gone(processes)
    assert sorted(run.rglob("*")) == before


def _asks(client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions
    greedy = chat.create(model=model, messages=USER, temperature=0, logprobs=True)
    choice = greedy.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content
    again = chat.create(model=model, messages=USER, temperature=0, stream=True)
    pieces = [part.choices[0].delta.content or "" for part in again]
    assert "".join(pieces) == choice.message.content, "a greedy response is the same each time"
    sampled = {
        chat.create(model=model, messages=USER, temperature=2).choices[0].message.content
        for _ in range(4)
    }
    assert len(sampled) > 1, "requests have their own temperature and seeds"
    seeded = [
        client.completions.create(model=model, prompt="12", seed=5, temperature=1, max_tokens=3)
        for _ in range(2)
    ]
    assert seeded[0].choices[0].text == seeded[1].choices[0].text
    assert seeded[0].usage is not None and seeded[0].usage.completion_tokens <= 3
    text = client.completions.create(model=model, prompt="12", temperature=0).choices[0].text
    cut = client.completions.create(model=model, prompt="12", temperature=0, stop=text[1])
    assert len(cut.choices[0].text) < len(text) and cut.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat.create(model=model, messages=USER, temperature=-1)
