"""Hugging Face transformers: the independent reference for conversions. It never trains and never
serves."""
