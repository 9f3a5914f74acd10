"""Import stand-in on a CPU engine's PYTHONPATH: where scikit-learn is installed, transformers imports
it for assisted generation, and it needs the whole of scipy."""

from miles_absent import stand_in

stand_in(__name__)
