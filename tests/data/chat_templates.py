"""Chat templates with the structure of well-known families, written for tests: how a turn opens and
ends, what is left out of earlier turns, how tools are called. No family's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from milescli.data.tokenizer import ChatTokenizer


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template, and the special tokens that it writes."""

    template: str
    special: list[str]
    eos: str
    added: Sequence[str] = ()
    """Tokens that a turn contains."""
    has_tools: bool = True
    has_system: bool = True
    has_reasoning: bool = False
    """Of the last turn; that of earlier turns is left out."""


_TAGS = ("<think>", "</think>", "<tool>", "</tool>")
_CHATML = ["<|im_start|>", "<|im_end|>"]
_TOOL_CALLS = (
    "{%- for call in m.tool_calls or [] -%}"
    "<tool>{{ call.function.name }}({{ call.function.arguments | tojson }})</tool>"
    "{%- endfor -%}"
)
_LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
)

CHATML = Family(
    special=_CHATML,
    eos="<|im_end|>",
    template=(
        "{%- for m in messages -%}<|im_start|>{{ m.role }}{{ '\\n' ~ m.content }}"
        + _TOOL_CALLS
        + "<|im_end|>{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}"
    ),
)
MARKED = Family(
    special=_CHATML,
    eos="<|im_end|>",
    template=(
        "{%- for m in messages -%}<|im_start|>{{ m.role ~ '\\n' }}"
        "{%- if m.role == 'assistant' -%}{% generation %}{{ m.content }}"
        + _TOOL_CALLS
        + "<|im_end|>{% endgeneration %}{%- else -%}{{ m.content }}<|im_end|>{%- endif -%}"
        "{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}"
    ),
)
LLAMA_3 = Family(
    special=["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    eos="<|eot_id|>",
    template=(
        "<|begin_of_text|>{%- for m in messages -%}"
        "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>"
        "{{ '\\n\\n' ~ m.content | trim }}" + _TOOL_CALLS + "<|eot_id|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}"
        "<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}{%- endif -%}"
    ),
)
# the block of reasoning is written from the last question of the user on, empty or not
QWEN_3 = Family(
    special=_CHATML,
    eos="<|im_end|>",
    has_reasoning=True,
    template=(
        _LAST_USER + "{%- for m in messages -%}"
        "{%- if m.role == 'tool' -%}"
        "<|im_start|>user{{ '\\n<tool_response>' ~ m.content }}</tool_response>"
        "{%- else -%}<|im_start|>{{ m.role ~ '\\n' }}"
        "{%- if m.role == 'assistant' and loop.index0 > ns.last"
        " and (loop.last or m.reasoning_content) -%}"
        "<think>{{ '\\n' ~ (m.reasoning_content or '') ~ '\\n' }}</think>{{ '\\n\\n' }}"
        "{%- endif -%}{{ m.content }}" + _TOOL_CALLS + "{%- endif -%}"
        "<|im_end|>{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}"
    ),
)
# as Qwen 3, but the opening of an answer opens its reasoning too
QWEN_3_5 = Family(
    special=_CHATML,
    eos="<|im_end|>",
    has_reasoning=True,
    template=(
        _LAST_USER + "{%- for m in messages -%}"
        "<|im_start|>{{ ('user' if m.role == 'tool' else m.role) ~ '\\n' }}"
        "{%- if m.role == 'assistant' and loop.index0 > ns.last -%}"
        "<think>{{ '\\n' ~ (m.reasoning_content or '') ~ '\\n' }}</think>{{ '\\n\\n' }}"
        "{%- endif -%}{{ m.content }}" + _TOOL_CALLS + "<|im_end|>{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}<think>{{ '\\n' }}"
        "{%- endif -%}"
    ),
)
# the same that opens an answer without reasoning, whatever the row holds
QWEN_3_5_SHORT = Family(
    special=_CHATML,
    eos="<|im_end|>",
    has_reasoning=True,
    template=QWEN_3_5.template.replace(
        "assistant{{ '\\n' }}<think>{{ '\\n' }}",
        "assistant{{ '\\n' }}<think>{{ '\\n\\n' }}</think>{{ '\\n\\n' }}",
    ),
)
# answers after a tool go on in the same turn; what was thought is cut off
DEEPSEEK_V3 = Family(
    special=["<|bos|>", "<|User|>", "<|Assistant|>", "<|outputs|>", "<|/outputs|>", "<|eos|>"],
    eos="<|eos|>",
    template=(
        "<|bos|>{%- set ns = namespace(tool=false) -%}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{{ m.content }}"
        "{%- elif m.role == 'user' -%}<|User|>{{ m.content }}"
        "{%- elif m.role == 'tool' -%}{%- set ns.tool = true -%}"
        "<|outputs|>{{ m.content }}<|/outputs|>"
        "{%- else -%}{%- if not ns.tool -%}<|Assistant|>{%- endif -%}{%- set ns.tool = false -%}"
        "{{ m.content.split('</think>')[-1] }}" + _TOOL_CALLS + "<|eos|>{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt and not ns.tool -%}<|Assistant|>{%- endif -%}"
    ),
)
# a turn ends where the next one begins
GLM_4_5 = Family(
    special=[
        *("[gMASK]", "<sop>", "<|endoftext|>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ],
    eos="<|endoftext|>",
    added=_TAGS,
    has_reasoning=True,
    template=(
        "[gMASK]<sop>" + _LAST_USER + "{%- for m in messages -%}"
        "{%- if m.role == 'assistant' -%}<|assistant|>{{ '\\n' }}<think>"
        "{%- if loop.index0 > ns.last -%}{{ m.reasoning_content or '' }}{%- endif -%}"
        "</think>{{ '\\n' ~ m.content | trim }}" + _TOOL_CALLS + "{%- elif m.role == 'tool' -%}"
        "<|observation|>{{ '\\n' ~ m.content }}"
        "{%- else -%}<|{{ m.role }}|>{{ '\\n' ~ m.content }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
    ),
)
# channels, and another end for the last turn
GPT_OSS = Family(
    special=["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"],
    eos="<|return|>",
    has_reasoning=True,
    template=(
        "<|start|>system<|message|>Be of use.<|end|>" + _LAST_USER + "{%- for m in messages -%}"
        "{%- if m.role == 'assistant' and m.tool_calls -%}"
        "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
        "<|channel|>commentary<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{%- elif m.role == 'assistant' -%}"
        "{%- if m.thinking and loop.last -%}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "{%- endif -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{%- if loop.last and not add_generation_prompt -%}<|return|>{%- else -%}<|end|>"
        "{%- endif -%}"
        "{%- elif m.role == 'tool' -%}"
        "<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
        "{%- else -%}<|start|>{{ 'developer' if m.role == 'system' else m.role }}"
        "<|message|>{{ m.content }}<|end|>{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
    ),
)
GEMMA = Family(
    special=["<bos>", "<start_of_turn>", "<end_of_turn>"],
    eos="<end_of_turn>",
    has_tools=False,
    has_system=False,
    template=(
        "<bos>{%- for m in messages -%}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('Roles must alternate user/assistant') }}{%- endif -%}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}"
        "{{ '\\n' ~ m.content | trim }}<end_of_turn>{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<start_of_turn>model{{ '\\n' }}{%- endif -%}"
    ),
)
# an empty block of reasoning stands before an answer without any, in one piece
NEMOTRON = Family(
    special=_CHATML,
    added=_TAGS,
    eos="<|im_end|>",
    has_reasoning=True,
    template=(
        _LAST_USER + "{%- for m in messages -%}"
        "<|im_start|>{{ ('user' if m.role == 'tool' else m.role) ~ '\\n' }}"
        "{%- if m.role == 'assistant' -%}"
        "{%- if m.reasoning_content and loop.index0 > ns.last -%}"
        "<think>{{ '\\n' ~ m.reasoning_content ~ '\\n' }}</think>{{ '\\n' }}"
        "{%- else -%}<think></think>{%- endif -%}"
        "{%- endif -%}{{ m.content }}" + _TOOL_CALLS + "<|im_end|>{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}<think>{{ '\\n' }}"
        "{%- endif -%}"
    ),
)
KIMI = Family(
    special=["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"],
    eos="<|im_end|>",
    template=(
        "{%- for m in messages -%}{%- if m.role in ('user', 'assistant') -%}"
        "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{%- else -%}"
        "<|im_system|>{{ m.role }}<|im_middle|>{%- endif -%}"
        "{{ m.content }}" + _TOOL_CALLS + "<|im_end|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
    ),
)
# what a tool returned is written into the turn that called it, before its content
FOLDED = Family(
    special=["<|turn>", "<turn|>", "<|call>", "<call|>", "<|response>", "<response|>"],
    eos="<turn|>",
    template=(
        "{%- set ns = namespace(open=false) -%}{%- for m in messages -%}{%- if m.role != 'tool' -%}"
        "{%- set turn = loop.index0 -%}"
        "{%- if not ns.open -%}<|turn>{{ m.role ~ '\\n' }}{%- endif -%}{%- set ns.open = false -%}"
        "{%- for call in m.tool_calls or [] -%}"
        "<|call>{{ call.function.name ~ (call.function.arguments | tojson) }}<call|>"
        "{%- endfor -%}"
        "{%- if m.tool_calls -%}{%- for later in messages[turn + 1:] -%}"
        "{%- if later.role == 'tool' and not ns.open -%}"
        "{%- set ns.open = true -%}<|response>{{ later.content }}<response|>"
        "{%- endif -%}{%- endfor -%}{%- endif -%}{{ m.content | trim }}"
        "{%- if m.tool_calls and not ns.open -%}<|response>"
        "{%- elif not ns.open -%}<turn|>{{ '\\n' }}{%- endif -%}"
        "{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt and not ns.open -%}<|turn>assistant{{ '\\n' }}{%- endif -%}"
    ),
)
# what a model should call is left out
DROPS = Family(
    special=["<|user|>", "<|assistant|>", "<|tool|>", "<|system|>", "<|end|>", "<|endoftext|>"],
    eos="<|endoftext|>",
    template=(
        "{%- for m in messages -%}<|{{ m.role }}|>{{ '\\n' ~ m.content }}<|end|>{{ '\\n' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>{{ '\\n' }}{%- else -%}<|endoftext|>"
        "{%- endif -%}"
    ),
)
# the opening of an answer opens reasoning, which no turn shows again
R1_DISTILL = Family(
    special=["<|bos|>", "<|User|>", "<|Assistant|>", "<|calls|>", "<|/calls|>", "<|eos|>"],
    eos="<|eos|>",
    template=(
        "<|bos|>{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|Assistant|>"
        "{%- if m.tool_calls -%}<|calls|>{{ m.tool_calls[0].function | tojson }}<|/calls|>"
        "{%- else -%}{{ m.content.split('</think>')[-1] }}{%- endif -%}<|eos|>"
        "{%- else -%}<|User|>{{ m.content }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|Assistant|><think>{{ '\\n' }}{%- endif -%}"
    ),
)
# what tools return is closed before an answer, but not before another call
ROUNDS = Family(
    special=["<|bos|>", "<|User|>", "<|Assistant|>", "<|outputs|>", "<|/outputs|>", "<|eos|>"],
    eos="<|eos|>",
    template=(
        "<|bos|>{%- set ns = namespace(tool=false) -%}{%- for m in messages -%}"
        "{%- if m.role == 'tool' -%}<|outputs|>{{ m.content }}{%- set ns.tool = true -%}"
        "{%- elif m.role == 'assistant' -%}"
        "{%- if not ns.tool -%}<|Assistant|>{%- elif not m.tool_calls -%}<|/outputs|>{%- endif -%}"
        "{%- set ns.tool = false -%}{{ m.content }}" + _TOOL_CALLS + "<|eos|>"
        "{%- else -%}<|User|>{{ m.content }}{%- endif -%}{%- endfor -%}"
        "{%- if ns.tool -%}<|/outputs|>{%- elif add_generation_prompt -%}<|Assistant|>"
        "{%- endif -%}"
    ),
)
# tools are declared before the last question, wherever that is
LAST_TOOLS = Family(
    special=["<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[RESULT]"],
    eos="</s>",
    template=(
        "<s>" + _LAST_USER + "{%- for m in messages -%}"
        "{%- if m.role == 'assistant' -%}{{ ' ' ~ m.content }}" + _TOOL_CALLS + "</s>"
        "{%- elif m.role == 'tool' -%}[RESULT]{{ m.content }}[/INST]"
        "{%- else -%}{%- if loop.index0 == ns.last -%}[TOOLS]{{ (tools or []) | tojson }}"
        "{%- endif -%}[INST]{{ ' ' ~ m.content }}[/INST]{%- endif -%}{%- endfor -%}"
    ),
)
# an answer is closed, and then the turn; the user's turn ends by the same token
TWICE_CLOSED = Family(
    special=["<|START|>", "<|USER|>", "<|BOT|>", "<|ANSWERED|>", "<|END|>"],
    eos="<|END|>",
    template=(
        "{%- for m in messages -%}<|START|>"
        "{%- if m.role == 'assistant' -%}<|BOT|>{{ m.content }}" + _TOOL_CALLS + "<|ANSWERED|>"
        "{%- else -%}<|USER|>{{ m.content }}{%- endif -%}<|END|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|START|><|BOT|>{%- endif -%}"
    ),
)
# reasoning before a call is written as long as no answer follows
CALL_CHANNELS = Family(
    special=GPT_OSS.special,
    eos=GPT_OSS.eos,
    has_reasoning=True,
    template=GPT_OSS.template.replace(
        "{%- if m.role == 'assistant' and m.tool_calls -%}",
        "{%- if m.role == 'assistant' and m.tool_calls -%}"
        "{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant')"
        " | rejectattr('tool_calls', 'defined') | list -%}"
        "{%- if m.thinking and not later -%}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}",
    ),
)
FAMILIES = {
    "chatml": CHATML,
    "marked": MARKED,
    "llama 3": LLAMA_3,
    "qwen 3": QWEN_3,
    "qwen 3.5": QWEN_3_5,
    "qwen 3.5 short": QWEN_3_5_SHORT,
    "deepseek v3": DEEPSEEK_V3,
    "glm 4.5": GLM_4_5,
    "gpt-oss": GPT_OSS,
    "gemma": GEMMA,
    "nemotron": NEMOTRON,
    "kimi": KIMI,
}
KINDS = FAMILIES | {
    "folded": FOLDED,
    "drops calls": DROPS,
    "r1 distill": R1_DISTILL,
    "rounds": ROUNDS,
    "last tools": LAST_TOOLS,
    "twice closed": TWICE_CLOSED,
    "call channels": CALL_CHANNELS,
}
"""And those that lose something, or write earlier turns otherwise."""


def tokenizer_of(
    template: str, *, special: list[str], eos: str, added: Sequence[str] = ()
) -> ChatTokenizer:
    """A token for each byte, the special ones, and those that are `added`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    inner.add_tokens([AddedToken(token, normalized=False) for token in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos)
    return ChatTokenizer(fast, folder=Path(), template=template)
