"""The Hugging Face hub: models and data sets fetched, exported folders pushed. The only place that
imports huggingface_hub."""
