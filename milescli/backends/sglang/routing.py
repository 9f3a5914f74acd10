"""Every response carries its routing record, where the engine keeps one. Installed by the plug-in.

sglang-router 0.3.2 drops `return_routed_experts` from the requests that it passes on; so
the engine has it from its environment.
"""

from __future__ import annotations

ROUTING_VARIABLE = "MILES_RETURN_ROUTED_EXPERTS"
"""Set to 1 by EngineServer where EngineSpec.return_routed_experts."""


def install() -> None:
    """Ask for the record on behalf of every request."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    ordinary = TokenizerManager.generate_request

    def generate_request(self, obj, request=None):
        if isinstance(obj, GenerateReqInput):
            obj.return_routed_experts = True
        return ordinary(self, obj, request)

    TokenizerManager.generate_request = generate_request
