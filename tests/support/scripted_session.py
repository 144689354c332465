"""A session without a model: it speaks the protocol of docs/reference/sessions.md, and does what a prompt says.

`echo X` answers X; `wait FILE` answers when there is such a file, or is aborted; `die` kills the process; `freeze`
stops it; `sleep N` answers after N seconds; `spell X` tells X letter by letter; `length` is that of its
secret; `fail X` fails for good; `log X` writes X to stderr; `do X` runs X as Python, which has the request and answers
with `said`; `cancelled`, `garbage`, `closing` and `deaf` (it does not end) are what they say. Started as a task's own
child it answers at once. It needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_aborted: set[str] = set()
_deaf = threading.Event()


def say(event: str, id: str | None = None, **data: Any) -> None:
    line = json.dumps({"event": event, **({"id": id} if id else {}), **data})
    with _lock:
        os.write(1, line.encode() + b"\n")


def prompt_of(request: dict[str, Any]) -> str:
    items = (request["spec"].get("data") or {}).get("items") or [""]
    first = items[0]
    if isinstance(first, dict):  # a chat: the last message counts
        first = first["messages"][-1]["content"]
    return str(first)


def answer(id: str | None, request: dict[str, Any], model: str, opened: dict[str, Any]) -> None:
    prompt = prompt_of(request)
    word, _, rest = prompt.partition(" ")
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # the stop may come a moment later
    if word == "cancelled":
        say("finish", id, status="cancelled")
        return
    if word == "fail":
        say("finish", id, status="failed", error={"type": "BadInput", "message": rest, "retryable": False})
        return
    if word == "closing":
        say("closing")
    if word == "garbage":
        with _lock:
            os.write(1, b'no json\n[1]\n{"event":"x","id":[1]}\n{"event":"ready","max_requests":"x"}\n{"id":"y"}\n')
    if word == "deaf":
        _deaf.set()
    if word == "do":
        known: dict[str, Any] = {"request": request}
        exec(rest, known)
        rest = json.dumps(known.get("said"))
    if word == "log":
        print(rest, file=sys.stderr, flush=True)
    if word == "sleep":
        time.sleep(float(rest))
    if word == "wait":
        say("text_delta", id, delta="...", request=0)
        while not Path(rest).exists():
            if id in _aborted:
                say("finish", id, status="cancelled")
                return
            time.sleep(0.01)
    if word == "spell":
        for letter in rest:
            say("text_delta", id, delta=letter, request=0)
    if word == "length":
        rest = str(len(os.environ.get("TOKEN_OF_TEST", "")))
    items: list[dict[str, Any]] = [{"index": 0, "input": prompt, "output": rest or word, "finish_reason": "stop"}]
    if request["spec"].get("taskType") == "embedding":
        texts = request["spec"]["data"]["items"]
        items = [{"index": at, "input": text, "embedding": [float(at), 0.5]} for at, text in enumerate(texts)]
    value = {
        "items": items,
        "usage": {
            "prompt_tokens": len(items) if "embedding" in items[0] else 5,
            "completion_tokens": 2,
            "total_tokens": 7,
        },
        "model": model,
        "pid": os.getpid(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "token": os.environ.get("TOKEN_OF_TEST", ""),
        **opened,
    }
    say("result", id, value=value)
    say("finish", id, status="completed")


def main() -> None:
    say("connection", status="connected")
    if "session" not in sys.argv:
        request = json.loads(sys.stdin.read())
        answer(None, request, request["spec"]["model"]["source"]["identifier"], {"own": True})
        return
    opening = json.loads(sys.stdin.readline())
    model = opening["spec"]["model"]["source"]["identifier"]
    gate = os.environ.get("LOADS_AFTER")
    if gate:
        say("progress", current=1, total=2, unit="MB")
    while gate and not Path(gate).exists():
        time.sleep(0.01)
    if model.endswith("broken"):
        error = {"type": "BadModel", "message": "there is no such model", "retryable": False}
        say("finish", status="failed", error=error)
        sys.exit(1)
    told = {"engine": opening["engine"], "model": model, "load_seconds": 0.1, "max_requests": 4, "memory_bytes": 1000}
    limits = [name for name in ("idle_seconds", "lifetime_seconds") if name.upper() in os.environ]
    say("ready", **told, loads=1, **{name: float(os.environ[name.upper()]) for name in limits})
    threads = []
    for line in sys.stdin:
        told = json.loads(line)
        if told["op"] == "run":
            arguments = (told["id"], told["request"], model, {"own": False})
            threads.append(threading.Thread(target=answer, args=arguments, daemon=True))
            threads[-1].start()
        elif told["op"] == "abort":
            _aborted.add(told["id"])
        elif told["op"] == "ping":
            say("pong", n=told["n"])
        elif told["op"] == "close" and not _deaf.is_set():
            for thread in threads:
                thread.join()
            break
    say("finish", status="completed")


if __name__ == "__main__":
    main()
