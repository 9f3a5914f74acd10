"""The tool that finds texts: here by BM25, and by a server; and what it says of a corpus that is
none."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from milescli.agents.search import Search
from milescli.core.errors import AgentError, DataError, MilesError, RecipeError
from milescli.recipe.agents import SearchSettings, rules
from milescli.recipe.schema import Recipe, Rollout
from milescli.recipe.section import refuse
from milescli.rollout.tool_schema import schema_of

ROWS = [
    {"title": "Marie Curie", "text": "She was born in Warsaw and won two Nobel prizes."},
    {"title": "Warsaw", "text": "The capital of Poland, on the Vistula."},
    {"title": "Vistula", "text": "The longest river of Poland."},
    {"title": "Lake", "text": "Water with land around it."},
]


def _rollout(**search: Any) -> Rollout:
    return Rollout(tools=["search"], agent="tools", search=SearchSettings(**search))


def _said(rollout: Rollout, *queries: str) -> list[str]:
    async def ask() -> list[str]:
        Search.require(rollout)
        tool = Search(rollout)
        await tool.open()
        return [await tool(query) for query in queries]

    return asyncio.run(ask())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_the_best_texts_come_first_and_those_without_a_word_not_at_all(corpus: Path) -> None:
    pytest.importorskip("bm25s")
    first, one, none = _said(
        _rollout(corpus=str(corpus), top_k=2), "river of Poland", "Nobel", "zebra"
    )
    assert first.splitlines()[0] == "[1] Vistula: The longest river of Poland."
    assert first.splitlines()[1].startswith("[2] Warsaw: ")
    assert one == "[1] Marie Curie: She was born in Warsaw and won two Nobel prizes."
    assert none == "nothing was found"
    with pytest.raises(ValueError, match="the query is empty"):
        _said(_rollout(corpus=str(corpus)), "  ")


def test_a_corpus_of_other_columns_is_read_by_name_or_refused(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    file = tmp_path / "other.jsonl"
    file.write_text('{"abstract": "rivers of ice"}\n{"abstract": "a hot desert"}\n')
    with pytest.raises(DataError) as caught:
        _said(_rollout(corpus=str(file)), "ice")
    assert "2 rows have no text" in caught.value.why and "abstract" in caught.value.why
    assert _said(_rollout(corpus=str(file), text_key="abstract"), "ice") == ["[1] rivers of ice"]
    with pytest.raises(MilesError, match="missing"):
        _said(_rollout(corpus=str(tmp_path / "missing.jsonl")), "ice")


class _Server(BaseHTTPRequestHandler):
    """Finds the query itself."""

    def do_POST(self) -> None:
        """As a server of retrieval."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        (query,) = body["queries"]
        found = [{"document": {"contents": f"{query} {n}"}} for n in range(body["topk"])]
        reply = {"result": [found]} if query != "odd" else {"documents": []}
        data = json.dumps(reply).encode()
        self.send_response(200 if query != "gone" else 404)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    made = HTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}/retrieve"
    made.shutdown()
    made.server_close()


def test_a_server_is_asked_and_what_it_does_wrong_is_named(server: str) -> None:
    assert _said(_rollout(url=server, top_k=2), "rivers") == ["[1] rivers 0\n[2] rivers 1"]
    for query, told in (("odd", "its reply holds no texts"), ("gone", "404")):
        with pytest.raises(AgentError) as caught:
            _said(_rollout(url=server), query)
        assert "the tool `search` failed at" in caught.value.what and told in caught.value.why


def test_where_it_searches_is_said_once() -> None:
    for search in ({}, {"corpus": "a.jsonl", "url": "http://127.0.0.1:1/retrieve"}):
        recipe = Recipe.model_validate(
            {
                "model": {"scratch": {}},
                "data": {"prompts": "task:sums"},
                "rollout": {"agent": "tools", "tools": ["search"], "search": search},
            }
        )
        with pytest.raises(RecipeError, match="the tool `search` needs exactly one source"):
            refuse(rules(recipe))


def test_the_model_is_told_what_it_takes() -> None:
    function = schema_of(Search, name="search")["function"]
    assert function["description"] == "Search a collection of texts and read the best matches."
    assert list(function["parameters"]["properties"]) == ["query"]
