"""Import stub on a CPU engine's PYTHONPATH: SGLang's debugging aid checks whether it runs beside
Megatron-Core, which it does not; importing Megatron would take half a second of every engine's
start."""

raise ImportError("an engine does not import Megatron-Core")
