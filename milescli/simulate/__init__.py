"""Simulates runs on machines that do not exist here: engines, trainer, publications and failures as
events. Nothing is started; `candidates` compares layouts and asynchronous settings."""
