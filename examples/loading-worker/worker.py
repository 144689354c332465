#!/usr/bin/env python3
"""Pretends to load a model, to answer, and to unload it: a worker in a container that speaks gpuflow's event protocol.

It needs Python and nothing else, and runs by itself as well as under a gpuflow worker. What it does is said by its
environment: MODEL_NAME, MODEL_PATH, GPU_DEVICE and OUTPUT_DIR come from gpuflow; PROMPT, LOAD_STEPS and STEP_SECONDS
from the preset or the task.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def emit(event: str, **data: object) -> None:
    """Print one event: a JSON object on a line of its own, at once."""
    print(json.dumps({"event": event, **data}), flush=True)


def cancelled(*_: object) -> None:
    """SIGTERM: free what is held, say so, and leave with the exit code that says the same."""
    emit("worker", status="cleaning_up", message="Cancelled")
    emit("finish", status="cancelled")
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    """Load, answer, unload."""
    signal.signal(signal.SIGTERM, cancelled)
    model = os.environ.get("MODEL_NAME", "test-loading")
    steps = int(os.environ.get("LOAD_STEPS", "3"))
    pause = float(os.environ.get("STEP_SECONDS", "0.2"))
    prompt = os.environ.get("PROMPT", "world")
    place = f"{os.environ.get('MODEL_PATH') or 'no folder'} on {os.environ.get('GPU_DEVICE') or 'the CPU'}"

    emit("connection", status="connected")
    emit("worker", status="initializing", message=f"Starting {model}")
    emit("worker", status="loading", message=f"Loading {model} from {place}")
    for step in range(1, steps + 1):
        time.sleep(pause)
        emit("progress", current=step, total=steps, unit="layer")
    emit("worker", status="working", message="Answering")
    text = f"Hello {prompt}!"
    for word in text.split(" "):
        emit("text_delta", delta=f"{word} ")
    emit("text", content=text)
    if os.environ.get("OUTPUT_DIR"):
        Path(os.environ["OUTPUT_DIR"], "answer.txt").write_text(f"{text}\n", encoding="utf-8")
        emit("artifact", path="answer.txt")
    emit("worker", status="cleaning_up", message=f"Unloading {model}")
    emit("result", value={"text": text, "model": model})
    emit("finish", status="completed")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        emit("finish", status="failed", error={"type": type(error).__name__, "message": str(error)})
        sys.exit(1)
