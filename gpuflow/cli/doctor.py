"""`gpuflow doctor`: checks what gpuflow needs, and says for each how to mend it."""

from __future__ import annotations

import click

from gpuflow.cli.errors import DONE, FAILED
from gpuflow.cli.options import json_option


@click.command(short_help="Check broker, GPUs, folders, environments and settings.")
@click.option("--all", "show_all", is_flag=True, help="Also the settings that have their defaults.")
@json_option
def doctor(show_all: bool, as_json: bool) -> int:
    """Check broker, GPUs, folders, the executors' environments and the settings. Exit code 1 if a check fails."""
    from gpuflow.cli import checks, output
    from gpuflow.errors import InvalidSettings
    from gpuflow.settings import Settings

    try:
        settings = Settings.load()
    except InvalidSettings as error:
        found = [checks.Check(name="settings", status="fail", detail=line) for line in str(error).splitlines()]
        found += checks.machine()
        origins = []
    else:
        found = checks.everything(settings)
        origins = settings.origins()
    failed = any(check.status == "fail" for check in found)
    if as_json:
        output.emit_json(
            {
                "ok": not failed,
                "checks": [check.to_dict() for check in found],
                "settings": [
                    {"name": one.name, "env": one.env_name, "value": one.value_masked, "source": one.source}
                    for one in origins
                ],
            }
        )
        return FAILED if failed else DONE
    output.table(["check", "", "found"], [[check.name, check.status, check.detail] for check in found])
    for check in found:
        if check.mend and check.status != "ok":
            output.line(f"{check.name}: {check.mend}")
    shown = [one for one in origins if show_all or not one.source.startswith("default")]
    if shown:
        output.line()
        output.table(["setting", "value", "from"], [[one.env_name, one.value_masked, one.source] for one in shown])
    if len(shown) < len(origins):
        output.line(f"{len(origins) - len(shown)} more settings have their defaults; --all lists them")
    return FAILED if failed else DONE
