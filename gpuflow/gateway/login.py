"""The login of the gateway that `gpuflow up` starts: its address and token, in a file of the state folder (mode 0600).

Written at each start with another token and removed at the end, so that who takes the gateway's port after a crash gets
a token that opens nothing. The user's other commands read it. Imports no web framework.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuflow.errors import GPUFlowError
from gpuflow.private_files import write_private
from gpuflow.settings import Settings

TOKEN_VARIABLE: Final = "GPUFLOW_WORKER_TOKEN"  # noqa: S105  (its name)
URL_VARIABLE: Final = "GPUFLOW_GATEWAY_URL"
#: A shorter token can be guessed, in characters.
LEAST_TOKEN: Final = 16
HOW_TO_MAKE_ONE: Final = f"make one with `openssl rand -hex 32` and set {TOKEN_VARIABLE} to it"


def login_file(state_dir: Path) -> Path:
    """Return where the login is."""
    return state_dir / "gateway-login.json"


def weakness(token: str) -> str | None:
    """Say what is wrong with a token and how to make a good one; None for a good one."""
    if not token:
        return f"the gateway has no token; {HOW_TO_MAKE_ONE}"
    if len(token) < LEAST_TOKEN:
        return f"the token of the gateway is shorter than {LEAST_TOKEN} characters; {HOW_TO_MAKE_ONE}"
    if len(set(token)) < LEAST_TOKEN // 4 or not token.isascii() or any(c.isspace() for c in token):
        return f"the token of the gateway can be guessed, or cannot stand in a header; {HOW_TO_MAKE_ONE}"
    return None


def make_login(settings: Settings, port: int) -> dict[str, str]:
    """Return the variables of a gateway on this port of loopback and of its workers, by which they know each other.

    The token is the user's own where one is set, else a new one. Raises GPUFlowError.
    """
    given = settings.worker_token.get_secret_value() if settings.worker_token else ""
    token = given or secrets.token_urlsafe(32)
    mistake = weakness(token)
    if mistake:
        raise GPUFlowError(mistake)
    url = f"http://127.0.0.1:{port}"
    path = login_file(settings.state_dir)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps({"url": url, "token": token}) + "\n")
    except OSError as error:
        raise GPUFlowError(
            f"the gateway's token cannot be written to {path}: {error.strerror or error}; set GPUFLOW_STATE_DIR to "
            "a folder of yours, or start without the gateway: gpuflow up --no-gateway"
        ) from None
    return {TOKEN_VARIABLE: token, URL_VARIABLE: url}


def read_login(state_dir: Path) -> tuple[str, str] | None:
    """Return the address and the token of the gateway that runs for this folder, None where there is none."""
    try:
        found = json.loads(login_file(state_dir).read_text())
        return str(found["url"]), str(found["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_login(state_dir: Path, login: Mapping[str, str]) -> None:
    """Remove the login, unless another cluster has written its own meanwhile."""
    found = read_login(state_dir)
    if found is not None and found[1] == login[TOKEN_VARIABLE]:
        with contextlib.suppress(OSError):
            login_file(state_dir).unlink()
