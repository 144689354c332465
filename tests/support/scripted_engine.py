"""The command `docker` as far as provisioners use it: run, create, stop, ps and rm. Its containers are files."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = """#!{python}
import hashlib, json, os, pathlib, sys, time
folder = pathlib.Path({folder!r})
action, words = sys.argv[1], sys.argv[2:]
(folder / "calls").open("a").write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
if (folder / "broken").exists():
    sys.exit("Cannot connect to the Docker daemon")
def all_of():
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: -one["at"])
def find(name):
    for one in all_of():
        if name in (one["name"], one["id"]):
            return one
    sys.exit("Error response from daemon: No such container: " + name)
def save(one):
    (folder / (one["id"] + ".json")).write_text(json.dumps(one))
def values(option):
    return [words[n + 1] for n, word in enumerate(words) if word == option]
if action in ("run", "create"):
    name = values("--name")[0]
    if any(one["name"] == name for one in all_of()):
        sys.exit("Conflict. The container name " + name + " is already in use")
    labels = dict(text.split("=", 1) for text in values("--label"))
    number = hashlib.sha256(name.encode()).hexdigest()[:12]
    state = "running" if action == "run" else "created"
    save(dict(name=name, id=number, labels=labels, state=state, at=time.time_ns()))
    print(number)
elif action == "stop":
    save(find(words[-1]) | dict(state="exited"))
elif action == "rm":
    (folder / (find(words[-1])["id"] + ".json")).unlink()
else:
    (shown,) = values("--format")
    states, labels = ["running"], []
    for text in values("--filter"):
        kind, _, value = text.partition("=")
        if kind == "status":
            states = [*(states if "running" not in states else []), value]
        else:
            labels.append(value.split("=", 1))
    for one in all_of():
        fits = all(k in one["labels"] and (not v or one["labels"][k] == v[0]) for k, *v in labels)
        if one["state"] in states and fits:
            text = shown.replace("{{{{.ID}}}}", one["id"])
            for key in ("gpuflow-fleet", "gpuflow-machine", "gpuflow-family"):
                text = text.replace('{{{{.Label "' + key + '"}}}}', one["labels"].get(key, ""))
            print(text)
"""


def scripted_engine(folder: Path) -> Path:
    """Write the command into a folder of its own below this one, and return that, for PATH."""
    place = folder / "engine"
    (place / "state").mkdir(parents=True)
    command = place / "docker"
    command.write_text(SCRIPT.format(python=sys.executable, folder=str(place / "state")))
    command.chmod(0o755)
    return place
