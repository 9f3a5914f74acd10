"""A streamed response that is wanted as a whole says nothing before its end. By itself SGLang sends
the first token of every stream: without that, 256 responses of 32 tokens take 6 % less time."""

from __future__ import annotations

from milescli.backends.sglang.batching import ONLY_WHEN_DONE


def install() -> None:
    """Around the streamer's decision for each request after each step."""
    from sglang.srt.managers.scheduler_components import output_streamer

    accumulator = output_streamer._GenerationStreamAccumulator
    accept = accumulator.accept

    def accept_when_done(self, *, req):
        if req.sampling_params.stream_interval != ONLY_WHEN_DONE or req.finished():
            accept(self, req=req)

    accumulator.accept = accept_when_done
