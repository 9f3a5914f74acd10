"""Tests of milescli.platform.kernels."""
