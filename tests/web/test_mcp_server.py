"""`miles mcp` as an assistant uses it: a process of its own, and the protocol's own client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_run import SAMPLE, WrittenRun

pytest.importorskip("mcp", reason="the package mcp is not installed")

READS = {
    *("runs", "status", "why", "recipe", "notices", "evaluations"),
    *("metric_names", "metrics", "samples", "search_samples", "logs", "log"),
}
CHANGES = {"launch", "resume", "stop", "note", "jobs"}
Call = tuple[str, dict[str, Any]]


def _replies(folder: Path, *calls: Call, options: Sequence[str] = ()) -> dict[str, Any]:
    """Of tools called one after the other; that of `tools` are their names."""
    from mcp import Client, StdioServerParameters, stdio_client

    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "milescli", "mcp", *options],
        env=dict(os.environ),
        cwd=folder.parent,
    )

    async def talk() -> dict[str, Any]:
        async with Client(stdio_client(server)) as client:
            replies: dict[str, Any] = {
                "tools": {tool.name: tool for tool in (await client.list_tools()).tools}
            }
            for name, arguments in calls:
                reply = await client.call_tool(name, arguments)
                text = reply.content[0].text  # type: ignore[union-attr]
                replies[name] = text if reply.is_error else json.loads(text)
            return replies

    return asyncio.run(talk())


def test_an_assistant_reads_a_run(folder: Path, run: WrittenRun) -> None:
    run.steps(1, 30)
    run.keep(3, {"response": "x" * 10_000}, {"reward": 0.0}, {"prompt_index": 9})
    run.attempt(trainer_rank_0="first\nlast\n")
    of_run = {"run": "tiny-1"}
    replies = _replies(
        folder,
        ("runs", {}),
        ("status", of_run),
        ("why", of_run),
        ("metrics", {**of_run, "names": ["rollout/reward_mean"], "points": 5}),
        ("samples", {**of_run, "prompts": 1}),
        ("search_samples", {**of_run, "text": SAMPLE["response"][:8]}),
        ("log", {**of_run, "attempt": "attempt_1", "file": "trainer-rank-0.log", "lines": 1}),
        ("launch", {"arguments": "quickstart"}),
    )
    assert replies["tools"].keys() == READS
    assert all(tool.annotations.read_only_hint for tool in replies["tools"].values())
    assert [one["id"] for one in replies["runs"]["runs"]] == ["tiny-1"]
    assert replies["status"]["step"] == 30 and "state" in replies["why"]
    assert replies["metrics"]["num_steps"] == 30 and len(replies["metrics"]["steps"]) <= 5
    [group] = replies["samples"]["groups"]
    assert replies["samples"]["num_prompts"] == 2 and replies["samples"]["steps"] == [3]
    assert "[... 8000 characters ...]" in group["samples"][0]["response"]
    assert replies["search_samples"]["found"]
    assert [line["text"] for line in replies["log"]["lines"]] == ["last"]
    assert "Unknown tool" in replies["launch"]


def test_a_refusal_names_a_way_out(folder: Path, run: WrittenRun) -> None:
    run.steps(1, 2)
    replies = _replies(folder, ("status", {"run": "tiny-2"}), ("samples", {"run": "tiny-1"}))
    assert "ask for `tiny-1`" in replies["status"]
    assert "kept no samples" in replies["samples"]


def test_with_control_an_assistant_starts_commands(folder: Path, run: WrittenRun) -> None:
    run.steps(1, 2)
    replies = _replies(
        folder,
        ("note", {"run": "tiny-1", "text": "try a lower rate"}),
        ("launch", {"arguments": "no-such-recipe --dry-run"}),
        ("jobs", {}),
        options=["--control"],
    )
    assert replies["tools"].keys() == READS | CHANGES
    assert "try a lower rate" in run.run.note_file.read_text()
    assert replies["launch"]["command"] == "miles launch no-such-recipe --dry-run"
    assert replies["jobs"]["jobs"][0]["id"] == replies["launch"]["id"]
