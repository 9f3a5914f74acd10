"""What a model is told of a tool."""

from __future__ import annotations

from typing import Literal

import pytest

from milescli.core.errors import RecipeError
from milescli.recipe.schema import Rollout
from milescli.rollout.episode.agents import tool_schemas
from milescli.rollout.tool_schema import fits, parameters_of, schema_of


def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None
) -> str:
    """Tell the weather
    of a city.

    Not for the sea.

    Args:
        city: its name
        days: how far ahead
    """
    return f"{city}{days}{unit}{tags}"


class Notes:
    """Keep notes."""

    def __call__(self, text: str) -> str:
        """Add one.

        Args:
            text: what to keep
        """
        return text


def test_signature_and_docstring_say_what_a_tool_takes() -> None:
    assert schema_of(weather, name="weather") == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "days": {"type": "integer", "description": "how far ahead"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }


def test_a_class_is_told_by_its_call() -> None:
    function = schema_of(Notes, name="Notes")["function"]
    assert function["description"] == "Keep notes."
    properties = {"text": {"type": "string", "description": "what to keep"}}
    assert function["parameters"]["properties"] == properties


def test_a_parameter_without_a_type_is_refused_by_name() -> None:
    def lookup(key, *, deep: bool = False):  # type: ignore[no-untyped-def]
        return key

    with pytest.raises(RecipeError, match="does not declare the type of `key`"):
        schema_of(lookup, name="lookup")


@pytest.mark.parametrize(
    ("value", "name", "is_fit"),
    [
        ("Rome", "city", True),
        (3, "city", False),
        (2, "days", True),
        (True, "days", False),
        (2.5, "days", False),
        (["a"], "tags", True),
    ],
)
def test_values_are_held_against_plain_types(value: object, name: str, is_fit: bool) -> None:
    parameter = next(known for known in parameters_of(weather) if known.name == name)
    assert fits(value, parameter) is is_fit


def test_tools_are_named_by_the_recipe() -> None:
    (schema,) = tool_schemas(Rollout(tools=["calculator"]))
    assert schema["function"]["name"] == "calculator"
    with pytest.raises(RecipeError, match="no tool `calculater`") as caught:
        tool_schemas(Rollout(tools=["calculater"]))
    assert caught.value.fixes == ["--set 'rollout.tools=[calculator]'"]
