"""Which URLs lie in the results services of the fleet, and what they name there."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote, urlsplit

from gpuflow.settings import Settings

#: Path of the results service of a gateway.
_RESULTS: Final = "/api/v1/results"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def results_name(url: str, settings: Settings) -> str | None:
    """Return what a URL names below the fleet's results services ("" for the service itself); None: it is elsewhere."""
    gateways = [f"{item}{_RESULTS}" for item in (settings.gateway_url, settings.orchestrator_base_url) if item]
    asked = urlsplit(url)
    for base in (*gateways, *([settings.store_url] if (settings.store_url or "").startswith("http") else [])):
        root = urlsplit(str(base)).path.rstrip("/")
        if _origin(url) == _origin(str(base)) and f"{asked.path}/".startswith(f"{root}/"):
            name = unquote(asked.path[len(root) :]).strip("/")
            # What another reading of the URL would take for another place is none of ours.
            return None if asked.query or ".." in name.split("/") else name
    return None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)
