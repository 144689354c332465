"""Ids that belong to idempotency keys."""

from __future__ import annotations

from gpuflow.submission import id_for_key


def test_a_task_and_a_pipeline_have_keys_of_their_own() -> None:
    assert id_for_key("me", "k") == "365b7b19-6272-5aa7-9c6e-3171a4e5205a"
    assert id_for_key("me", "k") != id_for_key("me", "k", pipeline=True)
    assert id_for_key("me", "k", pipeline=True) == id_for_key("me", "k", pipeline=True)
    assert id_for_key("me", "k", pipeline=True) != id_for_key("you", "k", pipeline=True)
