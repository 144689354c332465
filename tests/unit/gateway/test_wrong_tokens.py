"""How wrong tokens are counted for the audit log."""

from __future__ import annotations

from gpuflow.gateway.wrong_tokens import MOST_AUDITED, OTHERS, WrongTokens


def test_wrong_tokens_are_counted_by_address_and_a_flood_of_addresses_together() -> None:
    wrong = WrongTokens(clock=lambda: 0.0)
    for number in range(MOST_AUDITED + 5):
        for _ in range(3):
            wrong.note_wrong(f"192.0.2.{number}", "/x")
    found = wrong.take_unaudited()
    assert found["192.0.2.0"] == 3
    assert (len(found), found[OTHERS]) == (MOST_AUDITED + 1, 15)
    assert wrong.take_unaudited() == {}
    wrong.put_back(found)
    wrong.note_wrong("192.0.2.0", "/x")
    assert wrong.take_unaudited()["192.0.2.0"] == 4
