"""Implements `miles profile`: where a running run spends its time."""
