"""Embeddings: which texts, how a model's vectors of tokens become one of a text, and the result that carries them."""
