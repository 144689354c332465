"""Models: from the `model` section of a spec to a loaded model and tokenizer."""
