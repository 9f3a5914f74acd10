"""Settings of the tool `search`: a section of `rollout`. Part of the schema."""

from __future__ import annotations

from milescli.recipe.section import Positive, Section


class SearchSettings(Section):
    """What the tool `search` finds texts in."""

    corpus: str | None = None
    """A .jsonl, .parquet, .csv or .arrow file with a text in each row, which is searched here, by
    BM25; null: a server is asked."""
    text_key: str | None = None
    """Its column of the text; null: the first of text, contents, content, passage and body that is
    there. A column `title`, where there is one, stands before it."""
    url: str | None = None
    """Of a server of retrieval, the whole address: it is sent `{queries: [...], topk: N}` and
    replies `{result: [[{document: {contents: ...}}, ...]]}`, as that of Search-R1 does."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key for `url`, sent as `Authorization:
    Bearer`; null: none is sent."""
    top_k: Positive = 3
    """Texts that a call gives."""
