"""TEMPORARY stand-in by the lead so that the worker can be tried: the executors helper overwrites this file."""
import json, os, signal, subprocess, sys, threading, time
req = json.loads(sys.stdin.read()); e = req["spec"].get("echo") or {}
def emit(n, **k): print(json.dumps({"event": n, **k}), flush=True)
stop = threading.Event()
if e.get("ignore_sigterm"): signal.signal(signal.SIGTERM, signal.SIG_IGN)
emit("connection", status="connected")
if e.get("stdout_garbage"): print("garbage {", flush=True)
for _ in range(e.get("children", 0)): subprocess.Popen(["sleep", "600"])
if e.get("sleep_seconds"): stop.wait(e["sleep_seconds"])
if e.get("silent"): sys.exit(e.get("exit_code", 0))
n = e.get("steps", 0)
for i in range(n): emit("progress", current=i + 1, total=n)
fail = e.get("fail")
if fail and not (fail.get("unless_exists") and os.path.exists(fail["unless_exists"])):
    emit("finish", status="failed", error={"type": "Failed", "message": "", "retryable": False, **fail}); sys.exit(1)
items = [{"index": i, "input": x, "output": x} for i, x in enumerate((req["spec"].get("data") or {}).get("items") or [])]
emit("result", value={"items": items, "output": e.get("output"), "environment": {k: os.environ.get(k) for k in e.get("print_environment", [])}, "gpus": req["gpus"], "pid": os.getpid()})
emit("finish", status="completed"); sys.exit(e.get("exit_code", 0))
