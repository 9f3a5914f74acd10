"""An engine that serves LoRA adapters: it begins with blank ones, and what the trainer sends under
PEFT's names is put in the place of one, under running requests. Installed by the plug-in in engine
processes; both weight channels send as they do to any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from milescli.models.adapter import of_engine_name

if TYPE_CHECKING:
    import torch

ADAPTER_VARIABLE = "MILES_ENGINE_ADAPTER"
"""Set to 1 in the environment of engines that serve an adapter."""
before_replacing: list[Callable[[Any, str], None]] = []
"""Called with (manager, name) before an adapter is replaced; see `verify`."""


def install() -> None:
    """Let every engine's model receive an adapter through the same calls as weights."""
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
        named = of_engine_name(listed[0][0]) if listed else None
        if named is None:
            return load(listed, *args, **options)
        for listen in before_replacing:
            listen(manager, named[0])
        # the same adapter's, all of them: what holds for the first name holds for the others
        tensors = {of_engine_name(name)[1]: tensor for name, tensor in listed}  # type: ignore[index]
        replace_adapter(manager, named[0], tensors)
        return None

    model.load_weights = load_weights


def replace_adapter(manager: Any, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the adapter by `tensors`, all of them, by PEFT's names. They are copied: on a CPU
    they lie in the sender's memory, and SGLang stores some without a copy."""
    ref = _ref_of(manager, name)
    named = {each: tensor.clone() for each, tensor in tensors.items()}
    manager.load_lora_weights_from_tensors(ref, named)
    slot = _slot_of(manager, name)
    manager.memory_pool.load_lora_weight_to_buffer(
        ref.lora_id,
        slot,
        manager.loras[ref.lora_id],
        manager.lora_modules,
        manager.embed_tokens_module,
        manager.lm_head_module,
    )
    manager._notify_lora_slots_updated({slot})


def _ref_of(manager: Any, name: str) -> Any:
    (ref,) = (ref for ref in manager.lora_refs.values() if ref.lora_name == name)
    return ref


def _slot_of(manager: Any, name: str) -> int:
    """Return the adapter's place in the buffers that the layers compute with; puts it there where
    no request has asked for it yet."""
    ref = _ref_of(manager, name)
    if ref.lora_id not in manager.memory_pool.uid_to_buffer_id:
        manager.fetch_new_loras({ref.lora_id})
    return manager.memory_pool.uid_to_buffer_id[ref.lora_id]


def adapter_tensors(manager: Any, name: str) -> Sequence[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of everything with which this rank's layers compute the adapter."""
    slot, pool = _slot_of(manager, name), manager.memory_pool
    return [
        (f"{which} of {module} in layer {layer}", buffer[slot])
        for which, buffers in (("A", pool.A_buffer), ("B", pool.B_buffer))
        for module, layers in buffers.items()
        for layer, buffer in enumerate(layers)
        if buffer is not None
    ]
