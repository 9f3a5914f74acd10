"""A tool that finds texts, in a local corpus by BM25 (the package `bm25s`) or by calling a server.
`rollout.tools=[search]`, with `rollout.search`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from milescli.agents.extras import require_package
from milescli.core.concurrency import in_thread
from milescli.core.errors import AgentError, DataError
from milescli.data.tables import Table, check_file
from milescli.recipe.agents import SearchSettings
from milescli.recipe.schema import Rollout
from milescli.rollout.endpoint import Endpoint

TEXT_KEYS = ("text", "contents", "content", "passage", "body")
NUM_BAD_ROWS_SHOWN = 3
RETRIES = 2
_NOTHING = "nothing was found"


class Search:
    """Search a collection of texts and read the best matches."""

    def __init__(self, settings: Rollout) -> None:
        """Set the settings, without reading the corpus."""
        self._settings = settings

    @staticmethod
    def require(settings: Rollout) -> None:
        """Raise MachineError if the package is not installed, DataError if the corpus cannot be
        opened, RecipeError if the environment lacks the key."""
        search = settings.search
        if search.url is not None:
            _endpoint(settings)
            return
        require_package("bm25s", needed_by="the tool `search`")
        if search.corpus is not None:
            check_file(_path(search), field="prompts")

    async def open(self) -> None:
        """Load the corpus, if it is local. The first call reads it, however long that takes."""
        if self._settings.search.url is None:
            await in_thread(lambda: _corpus(self._settings.search.model_dump_json()).load())

    async def __call__(self, query: str) -> str:
        """Search a collection of texts and read the best matches.

        Args:
            query: words that the text should have

        Raises DataError for a corpus without texts, AgentError where a server fails.
        """
        search = self._settings.search
        if not query.strip():
            raise ValueError("the query is empty")
        if search.url is not None:
            return numbered_texts(await self._search_server(query))
        corpus = _corpus(search.model_dump_json())
        return numbered_texts(await in_thread(lambda: corpus.find(query)))

    async def _search_server(self, query: str) -> list[str]:
        endpoint = _endpoint(self._settings)
        body = {"queries": [query], "topk": self._settings.search.top_k, "return_scores": False}
        reply = await endpoint.post(body)
        try:
            (found,) = reply["result"]
            return [_text_of(one.get("document", one)) for one in found]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise endpoint.failure(f"its reply holds no texts: {reply!r:.200}") from None


@dataclass(slots=True)
class Corpus:
    """Holds the texts of one file, and their index. Read once in a process."""

    settings: SearchSettings
    texts: list[str] = field(default_factory=list)
    _index: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self) -> None:
        """Read the texts and build their index, once. Raises DataError if a row has no text."""
        import bm25s

        with self._lock:
            if self._index is not None:
                return
            self.texts = _read(_path(self.settings), self.settings.text_key)
            index = bm25s.BM25()
            tokens = bm25s.tokenize(self.texts, stopwords="en", show_progress=False)
            index.index(tokens, show_progress=False)
            self._index = index

    def find(self, query: str) -> list[str]:
        """Return the `top_k` best texts, best first; texts that share no word with the query are
        left out."""
        import bm25s

        self.load()
        tokens = bm25s.tokenize(query, stopwords="en", show_progress=False, return_ids=False)
        count = min(self.settings.top_k, len(self.texts))
        places, scores = self._index.retrieve(tokens, k=count, show_progress=False)
        return [
            self.texts[place]
            for place, score in zip(places[0], scores[0], strict=True)
            if score > 0
        ]


@cache
def _corpus(settings: str) -> Corpus:
    return Corpus(SearchSettings.model_validate_json(settings))


def numbered_texts(texts: Sequence[str]) -> str:
    """Return the numbered texts that the model is shown."""
    numbered = [f"[{number}] {text}" for number, text in enumerate(texts, start=1)]
    return "\n".join(numbered) or _NOTHING


def _read(path: Path, text_key: str | None) -> list[str]:
    texts, bad = list[str](), list[str]()
    for line, row in Table(path).records():
        if isinstance(row, str):
            bad.append(f"row {line}: {row}")
            continue
        key = text_key or next((name for name in TEXT_KEYS if name in row), None)
        if key is None or not isinstance(row.get(key), str):
            bad.append(f"row {line}: it has {', '.join(row)}")
            continue
        texts.append(_text_of({**row, "text": row[key]}))
    if bad or not texts:
        raise DataError(
            f"{path} is not a valid corpus",
            why=f"{len(bad)} rows have no text ({'; '.join(bad[:NUM_BAD_ROWS_SHOWN])})"
            if bad
            else "it has no rows",
            fix="--set rollout.search.text_key=COLUMN",
        )
    return texts


def _text_of(row: Any) -> str:
    if isinstance(row, str):
        return row
    text = next(str(row[key]) for key in TEXT_KEYS if key in row)
    title = row.get("title")
    return f"{title}: {text}" if title else text


def _path(search: SearchSettings) -> Path:
    assert search.corpus is not None, "recipe.check lets no search without a corpus pass"
    return Path(search.corpus).expanduser().absolute()


def _endpoint(settings: Rollout) -> Endpoint:
    search = settings.search
    assert search.url is not None, search
    return Endpoint(
        caller="the tool `search`",
        section="rollout.search",
        error=AgentError,
        url=search.url,
        timeout_s=settings.tool_timeout_s / (RETRIES + 1),
        retries=RETRIES,
        api_key_env=search.api_key_env,
    )
