"""Simulates runs on machines that are not there: engines, trainer, publications and failures as
events. Nothing is started; `candidates` compares layouts and asynchronous settings."""
