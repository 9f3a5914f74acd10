"""The agent that calls tools: what a model is told of what it called, and what ends an episode."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from PIL import Image as Pillow

from milescli.agents.tools import MAX_FAILURES, ToolAgent
from milescli.core.errors import AgentError, ContextFull
from milescli.core.types import Prompt, StopReason
from milescli.recipe.schema import Rollout
from milescli.rollout.base import Outcome, Reply, ToolCall, Turn
from milescli.rollout.episode.episode import load_agent
from tests.agents import user_tools

HERE = "tests.agents.user_tools"
PROMPT = Prompt(index=0, token_ids=[1], text="What is 6 * 7?", label="42")
Said = str | ToolCall | Exception
"""A last turn; a call; or what the session raises."""


class Session:
    """A policy that says what it is told to."""

    def __init__(self, says: Sequence[Said], *, malformed: str | None = None) -> None:
        self.says, self.malformed = list(says), malformed
        self.asked: list[list[dict[str, Any]]] = []
        self.turns: list[Turn] = []

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> Reply:
        """See milescli.rollout.base.Session."""
        self.asked.append([dict(message) for message in messages])
        said = self.says[min(len(self.turns), len(self.says) - 1)]
        if isinstance(said, Exception):
            raise said
        is_cut = said == "cut"
        turn = Turn(
            prompt_ids=[1],
            response_ids=[2],
            text=str(said),
            stop_reason=StopReason.LENGTH if is_cut else StopReason.STOP,
        )
        self.turns.append(turn)
        if isinstance(said, str):
            malformed = self.malformed if len(self.turns) == 1 else None
            message = {"role": "assistant", "content": said}
            return Reply(turn=turn, message=message, malformed=malformed)
        told = {"id": "call_0", "type": "function", "function": {"name": said.name}}
        message = {"role": "assistant", "content": "", "tool_calls": [told]}
        return Reply(turn=turn, message=message, calls=[said])

    @property
    def results(self) -> list[Any]:
        """What the tools told it."""
        return [message["content"] for message in self.asked[-1] if message["role"] == "tool"]


def call(name: str, **arguments: Any) -> ToolCall:
    """As a model writes it."""
    return ToolCall(name=name, arguments=json.dumps(arguments))


def play(session: Session, *tools: str, **settings: Any) -> Outcome:
    """One episode."""
    agent = ToolAgent(Rollout(agent="tools", tools=list(tools), **settings))
    return asyncio.run(agent(PROMPT, session))  # type: ignore[arg-type]


def test_a_result_comes_back_as_a_message_and_the_last_turn_is_scored() -> None:
    session = Session([call("calculator", expression="6*7"), "#### 42"])
    outcome = play(session, "calculator")
    assert outcome.text == "#### 42" and not outcome.is_cut
    tool = {"role": "tool", "tool_call_id": "call_0", "name": "calculator", "content": "42"}
    assert session.asked[1][-1] == tool
    assert outcome.figures["tool_errors"] == 0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("calculater", expression="1"), "error: there is no tool calculater"),
        (call("calculator", expr="1"), "error: calculator takes expression, not expr"),
        (call("calculator"), "error: calculator needs expression"),
        (call("calculator", expression=3), "error: expression of calculator must not be 3"),
        (call("calculator", expression="1/0"), "error: division by zero"),
        (ToolCall(name="calculator", arguments="{"), "error: Expecting"),
        (ToolCall(name="calculator", arguments="[1]"), "error: the arguments of calculator"),
    ],
)
def test_a_mistake_of_the_model_is_told_to_it_and_counted(said: ToolCall, told: str) -> None:
    session = Session([said, "well"])
    outcome = play(session, "calculator")
    assert session.results[0].startswith(told)
    assert outcome.figures["tool_errors"] == 1 and outcome.text == "well"


def test_a_call_that_cannot_be_read_is_told_to_the_model() -> None:
    session = Session(["<tool_call>{", "well"], malformed="it is no JSON")
    assert play(session, "calculator").text == "well"
    assert session.results == ["error: it is no JSON"]


@pytest.mark.parametrize(
    ("says", "num_turns"),
    [
        ([call("calculator", expression="1")], 3),
        ([call("calculator", expression="1"), "cut"], 2),
        ([call("calculator", expression="1"), ContextFull("full", why="", fix="")], 1),
    ],
)
def test_a_bound_ends_the_episode_and_it_counts_as_truncated(
    says: list[Said], num_turns: int
) -> None:
    session = Session(says)
    assert play(session, "calculator", max_turns=3).is_cut
    assert len(session.turns) == num_turns


def test_each_episode_has_its_own_of_a_class_which_is_closed_at_the_end() -> None:
    user_tools.closed.clear()
    for _ in range(2):
        session = Session([call("Counter"), call("Counter"), "done"])
        play(session, f"{HERE}:Counter")
        assert session.results == ["1", "2"]
    assert user_tools.closed == [2, 2]


def test_a_tool_that_cannot_be_closed_leaves_no_other_open() -> None:
    for calls in (["Unclosable", "Counter"], ["Counter", "Unclosable"]):
        user_tools.closed.clear()
        session = Session([*map(call, calls), "done"])
        with pytest.raises(RuntimeError, match="the connection is lost"):
            play(session, f"{HERE}:Counter", f"{HERE}:Unclosable")
        assert user_tools.closed == [1]


def test_an_async_tool_is_awaited() -> None:
    session = Session([call("echo", text="hé"), "done"])
    play(session, f"{HERE}:echo")
    assert session.results == ["hé"]


def test_a_slow_tool_is_given_up_and_the_model_is_told() -> None:
    session = Session([call("sleepy", seconds=5.0), "done"])
    play(session, f"{HERE}:sleepy", tool_timeout_s=0.05)
    assert session.results == ["error: sleepy did not end within 0.05 s"]


def test_what_a_tool_says_is_cut_at_its_bound() -> None:
    session = Session([call("huge"), "done"])
    play(session, f"{HERE}:huge", tool_output_characters=10)
    assert session.results == ["xxxxxxxxxx\n... (99,999,990 more characters)"]


def test_images_of_a_tool_are_parts_of_its_result() -> None:
    session = Session([call("picture", kind="file"), call("picture", kind="both"), "done"])
    outcome = play(session, f"{HERE}:picture", tool_output_characters=3)
    (alone,), (text, image) = session.results
    assert text == {"type": "text", "text": "a c\n... (2 more characters)"}
    for part in (alone, image):
        kind, _, data = part["image_url"]["url"].partition(",")
        assert kind == "data:image/png;base64"
        assert Pillow.open(io.BytesIO(base64.b64decode(data))).getpixel((0, 0)) == (255, 0, 0)
    assert outcome.figures["tool_errors"] == 0


def test_an_image_that_cannot_be_used_is_told_with_the_name_of_its_tool() -> None:
    session = Session([call("picture", kind="broken"), call("picture", kind="long"), "done"])
    outcome = play(session, f"{HERE}:picture")
    broken, long = session.results
    assert broken.startswith("error: picture returned an image: an image file cannot be read")
    assert long.startswith("error: picture returned an image: a picture of 201 x 1 pixels")
    assert outcome.figures["tool_errors"] == 2


def test_a_tool_whose_images_never_can_be_used_stops_the_run() -> None:
    agent = ToolAgent(Rollout(agent="tools", tools=[f"{HERE}:picture"], max_turns=MAX_FAILURES + 1))
    with pytest.raises(AgentError, match="`picture` failed 32 times") as caught:
        asyncio.run(agent(PROMPT, Session([call("picture", kind="broken")])))  # type: ignore[arg-type]
    assert "returned an image" in caught.value.why


def test_a_tool_that_never_works_stops_the_run_with_its_traceback() -> None:
    agent = ToolAgent(Rollout(agent="tools", tools=[f"{HERE}:broken"], max_turns=MAX_FAILURES + 1))
    with pytest.raises(AgentError, match="`broken` failed 32 times and never succeeded") as caught:
        asyncio.run(agent(PROMPT, Session([call("broken")])))  # type: ignore[arg-type]
    assert "out of order" in caught.value.why and "user_tools.py" in caught.value.why


def test_tools_of_a_user_run_in_a_process_of_their_own() -> None:
    session = Session([call("Counter"), call("where"), call("Counter"), "done"])
    tools = [f"{HERE}:Counter", f"{HERE}:where"]

    async def episode() -> Outcome:
        agent = load_agent(Rollout(agent="tools", tools=tools))
        try:
            return await agent(PROMPT, session)  # type: ignore[arg-type]
        finally:
            agent.close()  # type: ignore[attr-defined]

    assert asyncio.run(episode()).text == "done"
    first, process, second = session.results
    assert (first, second) == ("1", "2")
    assert int(process) != os.getpid()


def test_an_agent_of_which_no_turn_fits_says_so() -> None:
    session = Session([ContextFull("full", why="", fix="")])
    with pytest.raises(ContextFull):
        play(session, "calculator")
