#!/usr/bin/env python3
"""Pretends to load a model, to answer, and to unload it: a worker in a container that speaks gpuflow's event protocol.

It needs Python and nothing else, and runs by itself as well as under a gpuflow worker. What it does is said by its
environment: MODEL_NAME, MODEL_PATH, GPU_DEVICE and OUTPUT_DIR come from gpuflow; PROMPT, LOAD_STEPS and STEP_SECONDS
from the preset or the task. With `--session` it loads once and answers the requests that come on its stdin.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

MODEL = os.environ.get("MODEL_NAME", "test-loading")
PAUSE = float(os.environ.get("STEP_SECONDS", "0.2"))


def emit(event: str, **data: object) -> None:
    """Print one event: a JSON object on a line of its own, at once."""
    print(json.dumps({"event": event, **data}), flush=True)


def cancelled(*_: object) -> None:
    """SIGTERM: free what is held, say so, and leave with the exit code that says the same."""
    emit("worker", status="cleaning_up", message="Cancelled")
    emit("finish", status="cancelled")
    sys.exit(128 + signal.SIGTERM)


def load() -> None:
    """Tell how the model is loaded."""
    steps = int(os.environ.get("LOAD_STEPS", "3"))
    place = f"{os.environ.get('MODEL_PATH') or 'no folder'} on {os.environ.get('GPU_DEVICE') or 'the CPU'}"
    emit("worker", status="initializing", message=f"Starting {MODEL}")
    emit("worker", status="loading", message=f"Loading {MODEL} from {place}")
    for step in range(1, steps + 1):
        time.sleep(PAUSE)
        emit("progress", current=step, total=steps, unit="layer")


def answer(prompt: str, output_dir: str | None) -> dict:
    """Answer as events and a file; return the result."""
    emit("worker", status="working", message="Answering")
    text = f"Hello {prompt}!"
    for word in text.split(" "):
        emit("text_delta", delta=f"{word} ")
    emit("text", content=text)
    if output_dir:
        Path(output_dir, "answer.txt").write_text(f"{text}\n", encoding="utf-8")
        emit("artifact", path="answer.txt")
    return {"text": text, "model": MODEL}


def once() -> None:
    """Load, answer, unload."""
    load()
    result = answer(os.environ.get("PROMPT", "world"), os.environ.get("OUTPUT_DIR"))
    emit("worker", status="cleaning_up", message=f"Unloading {MODEL}")
    emit("result", value=result)
    emit("finish", status="completed")


def session() -> None:
    """Load, and answer one request after the other until the input ends. An abort ends one that waits or sleeps."""
    requests: queue.Queue[dict | None] = queue.Queue()
    aborted: set[str] = set()

    def listen() -> None:
        for line in sys.stdin:
            told = json.loads(line)
            if told["op"] == "abort":
                aborted.add(told["id"])
            else:
                requests.put(told)
        requests.put(None)

    threading.Thread(target=listen, daemon=True).start()
    load()
    emit("ready")
    while (told := requests.get()) is not None:
        try:
            until = time.monotonic() + float(told["request"].get("seconds", 0))
            while time.monotonic() < until and told["id"] not in aborted:
                time.sleep(0.01)
            if told["id"] in aborted:
                emit("finish", id=told["id"], status="cancelled")
                continue
            emit("result", value=answer(str(told["request"]["prompt"]), told["output_dir"]))
            emit("finish", id=told["id"], status="completed")
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            # This request has failed; the next one is answered.
            emit("finish", id=told["id"], status="failed", error={"type": type(error).__name__, "message": str(error)})


def main() -> int:
    """Run once, or as a session."""
    signal.signal(signal.SIGTERM, cancelled)
    emit("connection", status="connected")
    if "--session" in sys.argv[1:]:
        session()
    else:
        once()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        emit("finish", status="failed", error={"type": type(error).__name__, "message": str(error)})
        sys.exit(1)
