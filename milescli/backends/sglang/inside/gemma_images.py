"""Images of Gemma 3 in an engine: a prompt that is sent as tokens stays as it is but for its image
tokens, prefixes are told apart by their images, the tower has the activation of config.json,
weights come under every name that releases and transformers give them, and on a CPU the tokens of
an image see each other. Installed by the plug-in in engines of this family alone.

Stock SGLang decodes such a prompt, expands the start of an image within the text that is expanded
already, and encodes it again: one token too many, and others where text is not canonical."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

_OUTER = ("model.vision_tower.", "model.multi_modal_projector.", "model.language_model.")


def install() -> None:
    """Put the corrections in place. On a CPU, `Batched.images_see_themselves` is set besides."""
    from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration as Model
    from sglang.srt.multimodal.processors.gemma3 import Gemma3SGLangImageProcessor as Processor

    Processor.process_mm_data_async = _with_given_tokens(Processor.process_mm_data_async)
    Model.pad_input_ids = _pad_images
    Model.__init__ = _with_own_activation(Model.__init__)
    load = Model.load_weights
    Model.load_weights = lambda self, weights: load(
        self, ((released_name(name), tensor) for name, tensor in weights)
    )


def _with_own_activation(ordinary):
    """SGLang's tower computes QuickGELU, whatever config.json says."""

    def make(self, config, *arguments, **settings) -> None:
        from sglang.srt.layers.activation import QuickGELU
        from transformers.activations import ACT2FN

        ordinary(self, config, *arguments, **settings)
        for module in self.vision_tower.modules():
            if isinstance(getattr(module, "act", None), QuickGELU):
                module.act = ACT2FN[config.vision_config.hidden_act]

    return make


def released_name(name: str) -> str:
    """Return the name of a weight in releases, by which SGLang loads: transformers 5 writes others
    and has still others in memory."""
    if name.startswith(_OUTER):
        name = name.removeprefix("model.")
    for outer, inner in (("vision_tower.", "vision_model."), ("language_model.", "model.")):
        rest = name.removeprefix(outer)
        if rest != name and not rest.startswith((inner, "lm_head.")):
            return f"{outer}{inner}{rest}"
    return f"language_model.{name}" if name.startswith("lm_head.") else name


def expanded(
    token_ids: Sequence[int], *, image: int, num_tokens: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the prompt with `num_tokens` in the place of each token of an image, and the first and
    last place of each image."""
    ids, places = list[int](), list[tuple[int, int]]()
    for token in token_ids:
        if token == image:
            places.append((len(ids), len(ids) + num_tokens - 1))
            ids += [image] * num_tokens
        else:
            ids.append(token)
    return ids, places


def _with_given_tokens(ordinary):
    async def process(self, image_data, input_text, request_obj, *arguments, **settings):
        if not isinstance(input_text, list):
            return await ordinary(self, image_data, input_text, request_obj, *arguments, **settings)
        # the images alone: what the text around them says was given as tokens
        shown = self.mm_tokens.image_token * len(image_data)
        made = await ordinary(self, image_data, shown, request_obj, *arguments, **settings)
        ids, places = expanded(
            input_text,
            image=self.mm_tokens.image_token_id,
            num_tokens=self.hf_config.mm_tokens_per_image,
        )
        offered = sum(len(item.offsets) for item in made.mm_items)
        if len(places) != offered:
            raise ValueError(f"{len(places)} image tokens for {offered} images")
        for item in made.mm_items:
            item.offsets, places = places[: len(item.offsets)], places[len(item.offsets) :]
        made.input_ids, made.im_token_id = ids, self.mm_tokens.image_token_id
        return made

    return process


def _pad_images(self, input_ids: list[int], images) -> list[int]:
    """Return the prompt with the hash of each image in the place of its tokens, by which prefixes
    are kept: the stock way leaves them out where starts and ends of images do not pair up."""
    padded = list(input_ids)
    for item in images.mm_items:
        for first, last in item.offsets:
            padded[first : last + 1] = [item.pad_value] * (last + 1 - first)
    return padded


def images_of(batch) -> Iterator[tuple[int, int, int]]:
    """Yield (request, first place, last place) of each image whose tokens a pass computes. Those of
    a kept prefix have seen each other when it was computed."""
    if batch.mm_inputs is None or batch.extend_prefix_lens is None:  # a decode step has no new one
        return
    kept = batch.extend_prefix_lens.tolist()
    for request, given in enumerate(batch.mm_inputs):
        for item in given.mm_items if given is not None else ():
            for first, last in item.offsets or ():
                if first >= kept[request]:
                    yield request, first, last


def see_themselves(
    seen: torch.Tensor, query_positions: torch.Tensor, images: Iterable[tuple[int, int, int]]
) -> torch.Tensor:
    """Return which of N positions each query sees, [B, Q, N] bool, where each token of an image
    also sees the others of it. `query_positions` is [B, Q]."""
    seen = seen.clone()
    for request, first, last in images:
        own = query_positions[request]
        rows = ((own >= first) & (own <= last)).nonzero().squeeze(1)
        seen[request, rows, first : last + 1] = True
    return seen
