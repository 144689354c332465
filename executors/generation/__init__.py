"""Text generation with transformers: sampling parameters, prompts, batches, stop strings and streams."""
