"""`gpuflow validate`: is a template right, and if not, where not?"""

from __future__ import annotations

import click

from gpuflow.cli.errors import BAD_INPUT
from gpuflow.cli.options import json_option, load_template, show_filled, show_warnings, template_options


@click.command(short_help="Check a template.")
@template_options
@json_option
def validate(source: str, overrides: tuple[str, ...], labels: tuple[str, ...], as_json: bool) -> int | None:
    """Check a template, and that the files it uploads are here; list every mistake. Nothing is submitted."""
    from gpuflow.cli.output import emit_json, line, note
    from gpuflow.errors import InvalidTemplate
    from gpuflow.policy.code import kinds_of
    from gpuflow.routing.offers import secrets_asked

    try:
        template = load_template(source, overrides, labels)
    except InvalidTemplate as error:
        if not as_json:
            raise
        found = [mistake.to_dict() for mistake in error.mistakes] or [{"path": "", "line": None, "message": str(error)}]
        warnings = [warning.to_dict() for warning in error.warnings]
        emit_json({"valid": False, "mistakes": found, "warnings": warnings})
        return BAD_INPUT
    code = {stage.name: kinds for stage in template.stages if (kinds := kinds_of(stage.spec))}
    secrets = {stage.name: names for stage in template.stages if (names := secrets_asked(stage.spec))}
    if as_json:
        emit_json(
            {
                "valid": True,
                "name": template.name,
                "stages": [
                    {"name": stage.name, "taskType": stage.task_type, "dependsOn": list(stage.depends_on)}
                    for stage in template.stages
                ],
                "mistakes": [],
                "warnings": [warning.to_dict() for warning in template.warnings],
                "filled": [one.to_dict() for one in template.filled],
                "code": {stage: list(kinds) for stage, kinds in code.items()},
                "secrets": {stage: list(names) for stage, names in secrets.items()},
            }
        )
        return None
    show_warnings(template)
    show_filled(template)
    for stage, kinds in code.items():
        note(f"stage {stage!r} brings code ({', '.join(kinds)}): only workers whose GPUFLOW_ALLOW_CODE has it take it")
    for stage, names in secrets.items():
        note(f"stage {stage!r} asks for secrets ({', '.join(names)}): only workers that offer them take it")
    listed = ", ".join(f"{stage.name} ({stage.task_type})" for stage in template.stages)
    line(f"{template.source}: valid; {'stages' if template.is_pipeline else 'task'}: {listed}")
    return None
