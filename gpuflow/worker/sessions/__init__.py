"""Warm models of a worker: processes that keep one model loaded and answer many tasks (docs/reference/sessions.md)."""
