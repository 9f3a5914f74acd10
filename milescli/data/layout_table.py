"""The table of known row layouts: the columns that identify each, and what a run reads of it.
`layouts` finds the layout of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Use = Literal["prompts", "chats", "pairs"]
"""Purpose of rows: prompts are answered; chats and pairs are trained on."""
Role = Literal[
    "prompt", "label", "chat", "response", "calls", "chosen", "rejected", "judged", "system",
    "context", "tools", "choices",
]  # fmt: skip
"""Role of a column in a row. calls: a response that is a list of tool calls; judged: whether the
response is good; context: a text that follows the prompt as a separate paragraph; choices: the
options of a question, in one column or, with spaces between their names, in several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Describes one layout of rows."""

    name: str
    has: Mapping[str, str]
    """Columns, or fields within (`reward_model.ground_truth`), that identify it -> the shape of the
    value; empty: any."""
    use: Use
    """Use of a file whose use is not stated. A chat that ends with the user is a prompt."""
    reads: Mapping[str, str]
    """Role -> column, if names alone do not decide."""
    aside: frozenset[str]
    """Columns to ignore although they look like part of the prompt: they repeat what is read."""
    refused: str
    """Why such rows cannot be used; empty: they can."""
    first_choice: int
    """The number by which the label names the first of `choices`."""


def _layout(
    name: str,
    has: str,
    use: Use,
    *,
    aside: str = "",
    refused: str = "",
    first_choice: int = 0,
    **reads: str,
) -> Layout:
    pairs = (column.partition("=") for column in has.split())
    return Layout(
        name=name,
        has={column: shape for column, _, shape in pairs},
        use=use,
        reads=reads,
        aside=frozenset(aside.split()),
        refused=refused,
        first_choice=first_choice,
    )


LAYOUTS: tuple[Layout, ...] = (
    _layout(
        "TRL stepwise supervision", "prompt completions=list labels=list", "chats",
        refused="each step of a completion has a label of its own, and no objective learns that",
    ),
    _layout(
        "SHP", "history=text human_ref_A human_ref_B", "pairs",
        refused="`labels` says which of the two references is better",
    ),
    _layout(
        "PKU-SafeRLHF", "prompt response_0 response_1", "pairs",
        refused="another column says which of the two responses is better",
    ),
    _layout(
        "OpenAssistant tree", "message_id parent_id text role", "chats",
        refused="each row is one message of a tree",
    ),
    _layout(
        "Glaive function calling", "system chat=text", "chats",
        refused="`chat` is a dialogue written as one text with markers of its own",
    ),
    _layout(
        "OpenAI preference", "input.messages=chat preferred_output non_preferred_output", "pairs",
        prompt="input.messages", tools="input.tools", chosen="preferred_output",
        rejected="non_preferred_output",
    ),
    _layout(
        "ms-swift preference", "messages=chat rejected_response", "pairs",
        chat="messages", rejected="rejected_response",
    ),
    _layout(
        "ms-swift preference", "messages=chat rejected_messages=chat", "pairs",
        chosen="messages", rejected="rejected_messages",
    ),
    _layout(
        "LLaMA-Factory preference", "conversations=chat chosen=turn rejected=turn", "pairs",
        prompt="conversations",
    ),
    _layout("UltraFeedback", "prompt=text chosen=chat rejected=chat", "pairs", prompt="prompt"),
    _layout("HH", "chosen=dialogue rejected=dialogue", "pairs"),
    _layout(
        "HH with a prompt", "prompt=dialogue chosen=text rejected=text", "pairs", prompt="prompt"
    ),
    _layout("Orca DPO pairs", "system=text question=text chosen=text rejected=text", "pairs"),
    _layout("TRL preference", "prompt chosen rejected", "pairs", prompt="prompt"),
    _layout("TRL preference, implicit prompt", "chosen=chat rejected=chat", "pairs"),
    _layout(
        "XTuner preference", "chosen_messages=chat rejected_messages=chat", "pairs",
        chosen="chosen_messages", rejected="rejected_messages",
    ),
    _layout(
        "Argilla preference", "instruction chosen_response rejected_response", "pairs",
        chosen="chosen_response", rejected="rejected_response",
    ),
    _layout("preference by name", "chosen rejected", "pairs"),
    _layout("TRL unpaired preference", "prompt completion label=bool", "pairs", judged="label"),
    _layout("ms-swift KTO", "messages=chat label=bool", "pairs", chat="messages", judged="label"),
    _layout("RACE", "article question options=options answer", "prompts", prompt="question",
            label="answer", context="article", choices="options"),
    _layout("LogiQA", "context query options=options correct_option", "prompts", prompt="query",
            label="correct_option", context="context", choices="options"),
    _layout("MMLU-Pro", "question options=options answer_index", "prompts", prompt="question",
            label="answer_index", choices="options"),
    _layout("MedQA", "question options=options answer_idx", "prompts", prompt="question",
            label="answer_idx", choices="options"),
    _layout("AQuA-RAT", "question options=options correct", "prompts", prompt="question",
            label="correct", choices="options"),
    _layout("question and options", "question options=options answer", "prompts",
            prompt="question", label="answer", choices="options"),
    _layout("MMLU", "question choices=options answer", "prompts", prompt="question",
            label="answer", choices="choices"),
    _layout("OpenBookQA", "question_stem choices=options answerKey", "prompts",
            prompt="question_stem", label="answerKey", choices="choices"),
    _layout("ARC, CommonsenseQA", "question choices=options answerKey", "prompts",
            prompt="question", label="answerKey", choices="choices"),
    _layout("HellaSwag", "ctx endings=options label", "prompts", prompt="ctx", label="label",
            choices="endings"),
    _layout("SciQ", "question correct_answer distractor1 distractor2 distractor3", "prompts",
            prompt="question", label="correct_answer", aside="support",
            choices="correct_answer distractor1 distractor2 distractor3"),
    _layout("PIQA", "goal sol1 sol2 label", "prompts", prompt="goal", label="label",
            choices="sol1 sol2"),
    _layout("WinoGrande", "sentence option1 option2 answer", "prompts", prompt="sentence",
            label="answer", choices="option1 option2", first_choice=1),
    _layout("Social IQa", "context question answerA answerB answerC label", "prompts",
            prompt="question", label="label", context="context",
            choices="answerA answerB answerC", first_choice=1),
    _layout("CosmosQA", "context question answer0 answer1 answer2 answer3 label", "prompts",
            prompt="question", label="label", context="context",
            choices="answer0 answer1 answer2 answer3"),
    _layout("MedMCQA", "question opa opb opc opd cop", "prompts", prompt="question", label="cop",
            choices="opa opb opc opd"),
    _layout(
        "DAPO-Math-17k, processed", "prompt=text source_prompt reward_model.ground_truth",
        "prompts", prompt="prompt", label="reward_model.ground_truth",
    ),
    _layout(
        "verl", "prompt reward_model.ground_truth", "prompts",
        prompt="prompt", label="reward_model.ground_truth",
    ),
    _layout(
        "PrimeIntellect", "prompt verification_info.ground_truth", "prompts",
        prompt="prompt", label="verification_info.ground_truth",
    ),
    _layout(
        "ROLL", "messages=chat ground_truth", "prompts",
        prompt="messages", label="ground_truth", aside="prompt",
    ),
    _layout("AReaL", "prompt query_id solutions", "prompts", prompt="prompt", label="solutions"),
    _layout("AReaL, code", "prompt query_id input_output", "prompts", label="input_output"),
    _layout("verifiers", "prompt=chat answer info", "prompts", prompt="prompt", label="answer",
            aside="question"),
    _layout("verifiers", "prompt=chat answer task", "prompts", prompt="prompt", label="answer",
            aside="question"),
    _layout("verifiers", "question answer info", "prompts", prompt="question", label="answer"),
    _layout("verifiers", "question answer task", "prompts", prompt="question", label="answer"),
    _layout("OpenRLHF", "context_messages=chat", "prompts", prompt="context_messages",
            aside="context"),
    _layout(
        "xlam function calling", "query answers tools", "chats",
        prompt="query", calls="answers", label="answers",
    ),
    _layout("ms-swift", "query response", "chats", prompt="query", response="response"),
    _layout("OpenOrca", "system_prompt question response", "chats", prompt="question",
            response="response"),
    _layout("Dolly", "instruction context response", "chats", prompt="instruction",
            response="response", context="context"),
    _layout("Alpaca", "instruction output", "chats", prompt="instruction", response="output"),
    _layout("Alpaca", "instruction response", "chats", prompt="instruction", response="response"),
    _layout("SQuAD", "question context answers.text", "prompts", prompt="question",
            label="answers.text", context="context"),
    _layout("HumanEval", "task_id prompt test entry_point", "prompts", prompt="prompt"),
    _layout("OpenMathInstruct", "problem generated_solution expected_answer", "chats",
            prompt="problem", response="generated_solution", label="expected_answer"),
    _layout("OpenR1-Math", "problem solution answer messages=chat", "prompts", prompt="problem",
            label="answer", chat="messages", aside="messages"),
    _layout("NuminaMath", "problem solution messages=chat", "prompts", prompt="problem",
            label="solution", chat="messages", aside="messages"),
    _layout("MATH with answers", "problem solution answer", "prompts", prompt="problem",
            label="answer", response="solution"),
    _layout("Big-Math", "prompt solution answer", "prompts", prompt="prompt", label="answer",
            response="solution"),
    _layout("MATH", "problem solution", "prompts", prompt="problem", label="solution",
            response="solution"),
    _layout("DeepMath", "question final_answer", "prompts", prompt="question",
            label="final_answer"),
    _layout("APPS", "question input_output", "prompts", prompt="question", label="input_output"),
    _layout("OpenAI, answered", "messages=chat answer", "prompts", prompt="messages",
            label="answer", chat="messages"),
    _layout("ms-swift GRPO", "messages=chat solution", "prompts", prompt="messages",
            label="solution", chat="messages"),
    _layout("GSM8K", "question answer", "prompts", prompt="question", label="answer"),
    _layout("slime, Miles", "prompt label", "prompts", prompt="prompt", label="label"),
    _layout("UltraChat", "prompt=text messages=chat", "chats", chat="messages"),
    _layout("ShareGPT", "conversations=turns", "chats", chat="conversations"),
    _layout("ShareGPT of ms-swift", "conversation=exchanges", "chats", chat="conversation"),
    _layout("Anthropic messages", "messages=blocks", "chats", chat="messages"),
    _layout("OpenAI messages", "messages=chat", "chats", chat="messages"),
    _layout("chat", "conversations=chat", "chats", chat="conversations"),
    _layout("chat", "conversation=chat", "chats", chat="conversation"),
    _layout("Gemini", "contents=chat", "chats", chat="contents"),
    _layout("TRL prompt and completion", "prompt completion", "chats"),
    _layout("verl SFT", "prompt response", "chats", prompt="prompt", response="response"),
    _layout("NeMo SFT", "input output", "chats", prompt="input", response="output"),
    _layout("TRL language modeling", "text=text", "chats"),
    _layout("TRL prompt-only", "prompt", "prompts"),
)  # fmt: skip
"""The first that fits a row is its layout: layouts with more requirements come first."""
BY_NAME = _layout("", "", "prompts")
"""The layout of rows that no other fits: their columns are found by name."""
