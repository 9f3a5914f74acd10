"""Hugging Face transformers: the independent witness of conversions. It never trains and never
serves."""
