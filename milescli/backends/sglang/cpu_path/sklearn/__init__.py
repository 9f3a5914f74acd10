"""Import stand-in on a CPU engine's PYTHONPATH: transformers imports scikit-learn where it is there,
for assisted generation, and it needs the whole of scipy."""

from miles_absent import stand_in

stand_in(__name__)
