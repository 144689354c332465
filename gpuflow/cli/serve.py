"""`gpuflow serve`: keep models loaded on workers, so that `/v1` answers without a load; list them; stop them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click

from gpuflow.cli.errors import FAILED, bad_input
from gpuflow.cli.options import json_option, override, set_option

if TYPE_CHECKING:
    from gpuflow.celery_app import GPUFlow
    from gpuflow.serving.models import ServedModel
    from gpuflow.serving.replicas import ServedStatus

#: How often `--wait` looks, in seconds.
_LOOK_SECONDS: Final = 0.5


@click.command(short_help="Keep models loaded for /v1; list or stop them.")
@click.argument("model", required=False)
@click.option("--replicas", type=int, metavar="N", help="How many workers keep it loaded (default 1).")
@click.option("--name", metavar="NAME", help="How /v1 calls it (default: MODEL).")
@click.option("--embedding", is_flag=True, help="Serve /v1/embeddings, in place of chat and completions.")
@click.option("--engine", type=click.Choice(["auto", "vllm", "transformers"]), help="What answers (default auto).")
@click.option("--accelerators", metavar="ASK", help='What a replica needs: "A100:1", "40GB+:2", or cpu.')
@click.option("--owner", metavar="OWNER", help="Serve this owner alone; needed where workers keep owners apart.")
@set_option
@click.option("--list", "listing", is_flag=True, help="List what is served, and where it is loaded.")
@click.option("--stop", is_flag=True, help="Serve MODEL (by the name that /v1 calls it) no more.")
@click.option("--wait", is_flag=True, help="Wait until every replica is loaded; exit code 1 when one fails for good.")
@json_option
def serve(
    model: str | None,
    replicas: int | None,
    name: str | None,
    embedding: bool,
    engine: str | None,
    accelerators: str | None,
    owner: str | None,
    overrides: tuple[str, ...],
    listing: bool,
    stop: bool,
    wait: bool,
    as_json: bool,
) -> int | None:
    """Keep MODEL loaded on N workers, so that /v1 answers without a load.

    MODEL is a shipped preset, an id of the hub, or an absolute path on the workers. The same command again with another
    number changes how many replicas there are. Needs the rights of an operator at the broker.
    """
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.serving.replicas import Replicas
    from gpuflow.serving.store import ServedModels

    options = [replicas, name, engine, accelerators, owner, *overrides, embedding or None, wait or None]
    if listing or (model is None and not stop):
        if stop or model is not None or any(option is not None for option in options):
            raise bad_input("--list stands alone; `gpuflow serve --list` shows all served models")
        with connected() as app, reachable():
            _show(app, as_json)
        return None
    if model is None:
        raise bad_input("no MODEL is named; `gpuflow serve --list` shows what is served")
    if stop:
        if any(option is not None for option in options):
            raise bad_input("--stop takes no other options; give the name that /v1 calls the model")
        with connected() as app, reachable():
            if not ServedModels(app.redis, app.keys, app.signer).stop(model):
                raise bad_input(f"no model {model!r} is served; `gpuflow serve --list` shows what is")
            Replicas(app).reconcile(wait=True)
        if as_json:
            from gpuflow.cli import output

            output.emit_json({"name": model, "served": False})
        else:
            click.echo(f"{model} is served no more; calls that it is answering go on")
        return None
    _known_source(model)
    with connected() as app, reachable():
        asked = _asked(app, model, name or model, replicas, embedding, engine, accelerators, owner or "", overrides)
        answer = ServedModels(app.redis, app.keys, app.signer).serve(asked)
        Replicas(app).reconcile(wait=True)
        code = _wait(app, asked.name) if wait else None
        _told(app, asked, answer, as_json)
    return code


def _known_source(model: str) -> None:
    """Refuse what names no model, before the broker is asked. Raises InvalidTemplate."""
    from gpuflow.serving.models import source_of

    source_of(model)


def _asked(
    app: GPUFlow,
    model: str,
    name: str,
    replicas: int | None,
    embedding: bool,
    engine: str | None,
    accelerators: str | None,
    owner: str,
    overrides: tuple[str, ...],
) -> ServedModel:
    """Return what is to be served. Raises InvalidTemplate, click.UsageError."""
    from gpuflow.serving.asking import model_of
    from gpuflow.serving.models import parts_of

    data = parts_of(model, embedding=embedding, engine=engine, accelerators=accelerators)
    for text in overrides:
        path, separator, value = text.partition("=")
        if not separator or not path.strip():
            raise bad_input(f"--set {text!r} has no value; write --set NAME=VALUE")
        data = override(data, path.strip(), value)
    return model_of(app, data, name=name, replicas=replicas, owner=owner)


def _wait(app: GPUFlow, name: str) -> int | None:
    """Wait until all replicas of a model are loaded; FAILED when one has failed for good, or it is served no more."""
    from gpuflow.cli import output
    from gpuflow.serving.replicas import Replicas

    replicas = Replicas(app)
    while True:
        status = next((one for one in replicas.statuses() if one.model.name == name), None)
        if status is None:
            output.note(f"{name} is served no more")
            return FAILED
        if len(status.warm) >= status.model.replicas:
            return None
        replicas.reconcile()
        if status.failure.count:
            output.note(f"{name}: {status.failure.error}")
            return FAILED
        time.sleep(_LOOK_SECONDS)


def _told(app: GPUFlow, asked: ServedModel, answer: str, as_json: bool) -> None:
    from gpuflow.cli import output

    if as_json:
        found = next((row for row in rows_of(app) if row["name"] == asked.name), None)
        output.emit_json({"answer": answer, **(found or {"name": asked.name})})
        return
    how = {"served": "is served", "scaled": "is served now", "same": "is served already"}[answer]
    count = f"{asked.replicas} replica{'s' if asked.replicas != 1 else ''}"
    output.line(f"{asked.name} {how} by {count} on {_where(asked)}; `gpuflow serve --list` shows where it is loaded")


def _where(model: ServedModel) -> str:
    from gpuflow.routing.describe import describe
    from gpuflow.routing.resources import requirement_from_resources

    return " or ".join(describe(one) for one in requirement_from_resources(model.spec["resources"], gpu_available=True))


def _show(app: GPUFlow, as_json: bool) -> None:
    from gpuflow.cli import output

    rows = rows_of(app)
    if as_json:
        output.emit_json(rows)
        return
    shown = [
        [
            row["name"],
            row["model"],
            row["taskType"],
            f"{row['loaded']}/{row['replicas']}",
            ", ".join(row["workers"]),
            row["owner"],
            row["error"] or "; ".join(dict.fromkeys(row["waits"])),
        ]
        for row in rows
    ]
    headers = ["name", "model", "type", "loaded", "workers", "owner", "waits"]
    output.table(headers, shown, empty="no models are served; `gpuflow serve MODEL --replicas N` serves one")


def rows_of(app: GPUFlow) -> list[dict[str, Any]]:
    """Return the served models with their replicas, JSON-able; `waits` says why replicas are not loaded."""
    from gpuflow.serving.replicas import Replicas

    return [_row(app, status) for status in Replicas(app).statuses()]


def _row(app: GPUFlow, status: ServedStatus) -> dict[str, Any]:
    from gpuflow.explaining import explain_records
    from gpuflow.serving.replicas import is_warm

    loading = [record for record in status.replicas if not is_warm(record)]
    waits = [
        f"loads on {one.task.worker}" if one.outcome == "runs" else one.verdict for one in explain_records(app, loading)
    ]
    return {
        **status.public(),
        "waits": waits,
    }
