"""The login of the gateway that `gpuflow up` starts: its address and token, in a file of the state folder (mode 0600).

Written at each start with another token and removed at the end, so that who takes the gateway's port after a crash gets
a token that opens nothing. The user's other commands read it. As long as the command that wrote it lives, another
cluster of the folder writes none, and has the same token. Imports no web framework.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from gpuflow.errors import GPUFlowError
from gpuflow.private_files import write_private
from gpuflow.settings import Settings
from gpuflow.tokens.texts import read_token

TOKEN_VARIABLE: Final = "GPUFLOW_WORKER_TOKEN"  # noqa: S105  (its name)
URL_VARIABLE: Final = "GPUFLOW_GATEWAY_URL"
#: A shorter token can be guessed, in characters.
LEAST_TOKEN: Final = 16
#: Two processes of one id differ by more than this in when they were created, in seconds.
_SAME_SECONDS: Final = 0.5
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
    if read_token(token) is not None:
        return f"{TOKEN_VARIABLE} is the token of one worker or person, which would open everything; {HOW_TO_MAKE_ONE}"
    return None


def make_login(settings: Settings, port: int) -> dict[str, str]:
    """Return the variables of a gateway on this port of loopback and of its workers, by which they know each other.

    The token is the user's own where one is set, else that of a gateway of the folder that lives, else a new one.
    Raises GPUFlowError.
    """
    other = login_of_another(settings.state_dir)
    given = settings.worker_token.get_secret_value() if settings.worker_token else ""
    token = given or other.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    mistake = weakness(token)
    if mistake:
        raise GPUFlowError(mistake)
    login = {TOKEN_VARIABLE: token, URL_VARIABLE: f"http://127.0.0.1:{port}"}
    if other:
        return login
    path = login_file(settings.state_dir)
    mine = {"url": login[URL_VARIABLE], "token": token, "pid": os.getpid(), "created": psutil.Process().create_time()}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(mine) + "\n")
    except OSError as error:
        raise GPUFlowError(
            f"the gateway's token cannot be written to {path}: {error.strerror or error}; set GPUFLOW_STATE_DIR to "
            "a folder of yours, or start without the gateway: gpuflow up --no-gateway"
        ) from None
    return login


def read_login(state_dir: Path) -> tuple[str, str] | None:
    """Return the address and the token of the gateway that runs for this folder, None where there is none."""
    found = _read(state_dir)
    return None if found is None else (found["url"], found["token"])


def login_of_another(state_dir: Path) -> dict[str, str]:
    """Return the variables of the gateway of another command that lives; empty where there is none."""
    found = _read(state_dir)
    if found is None or found.get("pid") == os.getpid():
        return {}
    try:
        written_by = psutil.Process(int(found["pid"]))
        lives = abs(written_by.create_time() - float(found["created"])) < _SAME_SECONDS
        lives = lives and written_by.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return {}
    return {TOKEN_VARIABLE: found["token"], URL_VARIABLE: found["url"]} if lives else {}


def _read(state_dir: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(login_file(state_dir).read_text())
        return {**found, "url": str(found["url"]), "token": str(found["token"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_login(state_dir: Path, login: Mapping[str, str]) -> None:
    """Remove the login, unless another cluster has written its own meanwhile."""
    found = read_login(state_dir)
    if found == (login[URL_VARIABLE], login[TOKEN_VARIABLE]):
        with contextlib.suppress(OSError):
            login_file(state_dir).unlink()
