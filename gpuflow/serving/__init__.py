"""Served models, which stay loaded on some workers, so that `/v1` answers without a load (docs/decisions/0074)."""
