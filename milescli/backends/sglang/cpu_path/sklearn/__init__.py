"""Import stand-in on a CPU engine's PYTHONPATH: transformers imports scikit-learn, where it is
installed, for assisted generation, and that needs the scipy which is replaced."""

from miles_absent import stand_in

stand_in(__name__)
