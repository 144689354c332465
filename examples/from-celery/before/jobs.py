"""A team's GPU jobs. The GPUs of a call are what CUDA_VISIBLE_DEVICES says."""

import ctypes
import os
import signal
import sys
import time

import celery

app = celery.Celery("jobs", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])


@app.task
def parse(text):
    """Return the lines of a text."""
    return text.splitlines()


@app.task
def embed(lines):
    """Return a vector for each line."""
    print("embed on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    return {"vectors": [[len(line)] for line in lines], "pid": os.getpid()}


@app.task
def train(seconds):
    """Use a GPU for some seconds."""
    print("train on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    time.sleep(seconds)
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@app.task
def fail(how):
    """End as jobs do that go wrong: by `exit`, `segfault`, 4 GiB of `memory`, or `killed` as the kernel does it."""
    if how == "exit":
        sys.exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "memory":
        _ = b"x" * (4 << 30)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def index(text):
    """Return the work on one text: `index("...").delay().get()`."""
    return celery.chain(parse.s(text), embed.s())
