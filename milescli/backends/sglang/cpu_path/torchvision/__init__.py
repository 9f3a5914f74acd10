"""Import stand-in on a CPU engine's PYTHONPATH: SGLang imports names of `torchvision` first thing,
and PyPI has builds for CUDA alone. No text model calls one; transformers, which looks for it too,
imports it then, and calls nothing either."""

from miles_absent import stand_in

stand_in(__name__)
