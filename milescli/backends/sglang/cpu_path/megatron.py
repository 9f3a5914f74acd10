"""Import stub on a CPU engine's PYTHONPATH: SGLang's debugging aid asks whether it runs beside
Megatron-Core, half a second of every engine's start. It does not."""

raise ImportError("an engine does not import Megatron-Core")
