"""Errors of a team that its workers do not import, and its functions do."""


class OnlyThereError(Exception):
    """Raised in a child."""
