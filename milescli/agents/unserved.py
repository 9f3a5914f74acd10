"""What requests to a session may ask for and nobody does here: it is refused where passing it over
would change what a response means. How tokens are sampled is the recipe's, whatever a client says.
Pure; `openai_forms` and `anthropic_forms` call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Body = Mapping[str, Any]
_CONSTRAINED = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("json_schema", "regex", "ebnf"),
)
"""Of SGLang and vLLM."""
_UNSERVED = (
    *("logit_bias", "functions", "function_call", "web_search_options", "audio"),
    *("echo", "suffix"),
)


def require_served(body: Body) -> None:
    """Of OpenAI's forms. Raises ValueError with what is not served."""
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type", "text") != "text"):
        raise ValueError("`response_format` is text: what is sampled is not constrained")
    if asked := next((key for key in _CONSTRAINED if body.get(key)), None):
        raise ValueError(f"`{asked}` is not served: what is sampled is not constrained")
    if asked := next((key for key in _UNSERVED if body.get(key)), None):
        raise ValueError(f"`{asked}` is not served")
    best_of = body.get("best_of")
    if best_of is not None and best_of != (body.get("n") or 1):
        raise ValueError("`best_of` is not served: `n` responses are sampled, and all returned")
    most = max(_number(body.get("top_logprobs")), _number(body.get("logprobs")) - 1)
    if most > 0:
        raise ValueError("`top_logprobs` are not served, only those of what was sampled")
    if body.get("modalities") not in (None, [], ["text"]):
        raise ValueError("`modalities` is text alone")


def require_texts(messages: list[Any]) -> None:
    """Raises ValueError for a part of OpenAI's messages that is no text: it would be left out."""
    for message in messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"a part of type `{kind}` is not served, only text")


def _number(value: object) -> int:
    return value if type(value) is int else 0
