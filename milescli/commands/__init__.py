"""Defines the commands, one file per verb. Each declares options, calls one function, and shows one
result."""
