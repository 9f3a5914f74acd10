"""An engine that serves a LoRA adapter: it begins with a blank one, and what the trainer sends
under PEFT's names is put in its place, under running requests. Installed by the plug-in in engine
processes; both weight channels send as they do to any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from milescli.models.adapter import PEFT_PREFIX

if TYPE_CHECKING:
    import torch

ADAPTER_VARIABLE = "MILES_ENGINE_ADAPTER"
"""Set to 1 in the environment of engines that serve one."""
ADAPTER_NAME = "policy"
"""By which requests ask for it."""


def install() -> None:
    """Let every engine's model take an adapter wherever it takes weights."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    begin = ModelRunner.init_lora_manager

    def begin_and_listen(self):
        begin(self)
        _take_adapters(self.model, self.lora_manager)

    ModelRunner.init_lora_manager = begin_and_listen


def _take_adapters(model: torch.nn.Module, manager: Any) -> None:
    load = model.load_weights

    def load_weights(weights, *args, **options):
        listed = list(weights)
        if not listed or not listed[0][0].startswith(PEFT_PREFIX):
            return load(listed, *args, **options)
        replace_adapter(manager, dict(listed))
        return None

    model.load_weights = load_weights


def replace_adapter(manager: Any, tensors: dict[str, torch.Tensor]) -> None:
    """`tensors`: all of them, by PEFT's names. They are copied: on a CPU they lie in memory of the
    sender's, and SGLang keeps some as they are."""
    (ref,) = (ref for ref in manager.lora_refs.values() if ref.lora_name == ADAPTER_NAME)
    named = {name: tensor.clone() for name, tensor in tensors.items()}
    manager.load_lora_weights_from_tensors(ref, named)
    slot = slot_of_adapter(manager)
    manager.memory_pool.load_lora_weight_to_buffer(
        ref.lora_id,
        slot,
        manager.loras[ref.lora_id],
        manager.lora_modules,
        manager.embed_tokens_module,
        manager.lm_head_module,
    )
    manager._notify_lora_slots_updated({slot})


def slot_of_adapter(manager: Any) -> int:
    """Its place in the buffers that the layers compute with; it is put there where no request has
    asked for it yet."""
    (ref,) = (ref for ref in manager.lora_refs.values() if ref.lora_name == ADAPTER_NAME)
    if ref.lora_id not in manager.memory_pool.uid_to_buffer_id:
        manager.fetch_new_loras({ref.lora_id})
    return manager.memory_pool.uid_to_buffer_id[ref.lora_id]


def adapter_tensors(manager: Any) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of all that the layers compute the adapter with on this rank."""
    slot, pool = slot_of_adapter(manager), manager.memory_pool
    return [
        (f"{which} of {module} in layer {layer}", buffer[slot])
        for which, buffers in (("A", pool.A_buffer), ("B", pool.B_buffer))
        for module, layers in buffers.items()
        for layer, buffer in enumerate(layers)
        if buffer is not None
    ]
