"""Retrieval: documents, their passages, indexes of passages, and prompts that hold them."""
