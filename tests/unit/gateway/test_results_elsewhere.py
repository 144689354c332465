"""A result whose values lie elsewhere: the gateway goes where a client of the fleet may go, and to no other place."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuflow.artifacts.references import json_bytes, make_reference
from gpuflow.gateway.fleet_calls import Calls
from gpuflow.gateway.openai_errors import error_response
from gpuflow.gateway.openai_tasks import Shared, TaskCall
from gpuflow.gateway.problems import Problem
from gpuflow.ledger.states import TaskState
from gpuflow.settings import Settings


def test_the_gateway_connects_to_no_address_that_a_result_names(tmp_path: Path) -> None:
    # Given a fleet whose broker is elsewhere, and a task whose result names a port of this machine
    settings = Settings(redis_url="redis://192.0.2.1:6379/0", cache_dir=tmp_path, results_dir=tmp_path / "results")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/value"
        call = TaskCall(Shared(calls=Calls(settings), hub=cast("Any", None)), "one", {}, "")
        result = {"items": make_reference(["x"], json_bytes(["x"]), url)}
        call._record = cast("Any", SimpleNamespace(id="t", state=TaskState.SUCCEEDED, result=result))
        # When the gateway answers with it
        with pytest.raises(Problem) as told:
            asyncio.run(call.result())
        # Then it has not gone there, and says no more than which setting is to be seen to
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert (told.value.status, told.value.kind) == (502, "not-allowed")
    assert "GPUFLOW_ALLOW_HOSTS" in told.value.detail and "127.0.0.1" not in told.value.detail
    assert b"server_error" in error_response(told.value).body
