"""The `gpuflow` command. Each sub-command lives in a module of its own, loaded when it is called.

This file imports click alone, so that `gpuflow --help` is instant; it knows the names and one line of each command.
"""

from __future__ import annotations

from typing import Any, Final

import click

from gpuflow.cli.errors import ReaderGone, guarded, set_debug
from gpuflow.cli.interrupts import keep_interrupts
from gpuflow.importing import end_quickly, load

#: section -> command -> (module under gpuflow.cli, its attribute, one line of help).
SECTIONS: Final[dict[str, dict[str, tuple[str, str, str]]]] = {
    "Run": {
        "run": ("run", "run", "Run a template here, with everything embedded, and show its results."),
        "up": ("up", "up", "Start a local cluster: broker, workers, beat, Flower."),
        "submit": ("submit", "submit", "Hand a template to the fleet."),
        "validate": ("templates", "validate", "Check a template; list every mistake with its line."),
        "explain": ("explain", "explain", "Say which queue and workers a template or task goes to, and why."),
    },
    "Watch and steer": {
        "status": ("status", "status", "Show a pipeline or task, or all recent ones."),
        "logs": ("logs", "logs", "Show what a pipeline or task has told."),
        "result": ("result", "result", "Show the result of a pipeline or task."),
        "cancel": ("steer", "cancel", "Cancel a pipeline or task."),
        "retry": ("steer", "retry", "Queue an ended task again."),
        "dead": ("dead", "dead", "List, show, retry or purge tasks that used up their attempts."),
        "resume": ("resume", "resume", "Run what is not done of a pipeline."),
    },
    "Fleet": {
        "queues": ("fleet", "queues", "List the queues: what waits, what runs, who serves."),
        "workers": ("fleet", "workers", "List the workers; show, enable, disable, drain, create or delete one."),
        "tokens": ("tokens", "tokens", "Make, list and revoke the tokens of people for the gateway."),
        "broker-users": (
            "broker_users",
            "broker_users",
            "Make, list and remove users of the broker with least rights.",
        ),
        "usage": ("usage", "usage", "Show what was used, by owner, pipeline, model, worker or type."),
        "scaling": ("scaling", "scaling", "Show what scales the fleet, and its decisions."),
        "schedules": ("schedules", "schedules", "Submit templates at set times: list, add, remove."),
        "hardware": ("hardware", "hardware", "Show the GPUs, CPUs and memory of this machine."),
        "audit": ("audit", "audit", "List, verify and export what was done to the fleet, and by whom."),
        "gateway": ("gateway", "gateway", "Serve the results of tasks over HTTP."),
        "presets": ("presets", "presets", "List what is shipped: pipelines, models, data sets, environments."),
        "serve": ("serve", "serve", "Keep models loaded on workers for /v1; list or stop them."),
        "models": ("models", "models", "List, fetch, remove, export and import models."),
        "env": ("env", "env", "Build, list and check the environments of executors."),
        "executor": ("executor", "executor", "List the executors; run one by itself, without a broker."),
        "doctor": ("doctor", "doctor", "Check broker, GPUs, folders, environments and settings; say how to mend."),
    },
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, and whose errors are one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [name for section in SECTIONS.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        for section in SECTIONS.values():
            if cmd_name in section:
                module, attribute, _ = section[cmd_name]
                command: click.Command = getattr(load(f"gpuflow.cli.{module}"), attribute)
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section, without importing them."""
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, _, line) in section.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click would end with 1 when the reader of our output goes away, we say so ourselves."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error

    def main(  # type: ignore[override]
        self, args: Any = None, prog_name: str | None = None, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """Run the command line; as a program, end with its exit code."""

        def run() -> Any:
            return super(LazyGroup, self).main(args, prog_name or "gpuflow", standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        end_quickly()
        keep_interrupts()
        raise SystemExit(guarded(run))


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from gpuflow.build import full_version

        click.echo(f"gpuflow {full_version()}")
        ctx.exit()


@click.group(
    "gpuflow", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option("--debug", is_flag=True, help="Show a traceback with an error (also GPUFLOW_DEBUG=1).")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show it.")
def cli(debug: bool) -> None:
    """Fine-tuning, inference and any other GPU job, in stages, on a mixed fleet of GPUs.

    Start with `gpuflow run quickstart`. Exit codes: 0 done, 1 failed, 2 bad input.
    """
    set_debug(debug)


def main() -> None:
    """Run the command line of this process."""
    cli()


__all__ = ["cli", "main"]
