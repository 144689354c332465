"""Reads GPUFLOW_FLOWER_ROLES: `ana=operator,ben=viewer,*=viewer`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ROLES: Final = ("viewer", "operator")
#: Stands for all users that no other entry names.
EVERYBODY: Final = "*"


def roles_by_user(entries: Sequence[str]) -> dict[str, str]:
    """Return the role of each user by `user_key`, from entries `user=role`. Raises ValueError with the cause."""
    found: dict[str, str] = {}
    for entry in entries:
        name, _, role = (part.strip() for part in entry.rpartition("="))
        if not name:
            raise ValueError(f"{entry!r} is not of the form user=role")
        if role not in ROLES:
            raise ValueError(f"{role!r} is no role of Flower's users")
        if name != EVERYBODY and (not name.isprintable() or any(char in "*:," for char in name)):
            raise ValueError(f"{name!r} is no user; a name has no '*', ':' or ','")
        if user_key(name) in found:
            raise ValueError(f"{name!r} is named twice")
        found[user_key(name)] = role
    return found


def user_key(name: str) -> str:
    """Return what two spellings of a user have in common: an e-mail address is compared without its case."""
    return name.casefold() if "@" in name else name


__all__ = ["EVERYBODY", "ROLES", "roles_by_user", "user_key"]
