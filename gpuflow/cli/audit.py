"""`gpuflow audit`: what was done to the fleet, and by whom; checks the chain, and exports it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuflow.cli.errors import DONE, FAILED, bad_input
from gpuflow.cli.options import json_option

if TYPE_CHECKING:
    from gpuflow.audit.chain import Key, Verdict


@click.command(short_help="List, verify and export what was done to the fleet.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--since", metavar="TIME", help="Only the last so long, such as 2h or 7d.")
@click.option("--actor", default="", metavar="GLOB", help="Only by these: 'ana@*', 'worker:w1', autoscaler.")
@click.option("--action", default="", metavar="GLOB", help="Only these: task.cancel, 'worker.*'.")
@click.option("--target", default="", metavar="GLOB", help="Only of these: 'task:ID', 'worker:*'.")
@click.option("-n", "--limit", default=50, show_default=True, type=click.IntRange(1, 10_000), help="How many.")
@click.option("--verify", is_flag=True, help="Check the chain of the log, or of an exported FILE.")
@click.option("--anchor", default="", metavar="DIGEST", help="With --verify: a digest of the chain noted earlier.")
@click.option("--allow-unkeyed", is_flag=True, help="With --verify: take links from before there was a key.")
@click.option("--export", metavar="FILE", type=click.Path(path_type=Path), help="Write the log as JSON lines.")
@json_option
def audit(
    file: Path | None,
    since: str | None,
    actor: str,
    action: str,
    target: str,
    limit: int,
    verify: bool,
    anchor: str,
    allow_unkeyed: bool,
    export: Path | None,
    as_json: bool,
) -> int:
    """List what was done to the fleet, the newest first: what, by whom, to what.

    With --verify, check that nothing of it was changed, removed, inserted or moved since it was sealed; FILE is an
    export, which needs no broker. Exit code 1: the chain is broken, and where first.
    """
    from gpuflow.audit.sealing import audit_key
    from gpuflow.settings import Settings

    if file is not None and not verify:
        raise bad_input("FILE is for --verify: `gpuflow audit --verify FILE`")
    if export is not None and verify:
        raise bad_input("--export and --verify are two steps: export first, then `gpuflow audit --verify FILE`")
    if (anchor or allow_unkeyed) and not verify:
        raise bad_input("--anchor and --allow-unkeyed belong to --verify")
    settings = Settings.load()
    if file is not None:
        return _tell(_verified_file(file, audit_key(settings), anchor, allow_unkeyed), as_json)
    if verify:
        return _tell(_verified(anchor, allow_unkeyed), as_json)
    if export is not None:
        return _export(export, as_json)
    return _list(since, (actor, action, target), limit, as_json)


def _verified_file(path: Path, key: Key, anchor: str, allow_unkeyed: bool) -> Verdict:
    from gpuflow.audit.reading import verify_export

    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return verify_export(lines, key, anchor=anchor, allow_unkeyed=allow_unkeyed)
    except OSError as error:
        raise bad_input(f"{path}: {error.strerror}; name a file that `gpuflow audit --export` has written") from None


def _verified(anchor: str, allow_unkeyed: bool) -> Verdict:
    """Check the log; where it is whole, seal what was appended since."""
    from gpuflow.audit.reading import AuditLog
    from gpuflow.audit.sealing import Sealer, audit_key
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable

    with connected() as app, reachable():
        key = audit_key(app.settings)
        log = AuditLog(app.redis, app.keys)
        verdict = log.verify(key, anchor=anchor, allow_unkeyed=allow_unkeyed)
        if not verdict.broken and Sealer(app.redis, app.keys, key).seal():
            verdict = log.verify(key, anchor=anchor, allow_unkeyed=allow_unkeyed)
    return verdict


def _tell(verdict: Verdict, as_json: bool) -> int:
    from gpuflow.cli import output

    if as_json:
        output.emit_json(verdict.public())
    elif verdict.broken:
        output.line(f"broken: {verdict.broken}")
        output.line(f"whole before that: {verdict.entries} entries, through {verdict.last or 'none'}")
    else:
        trimmed = f", after {verdict.trimmed} that were trimmed" if verdict.trimmed else ""
        output.line(f"whole: {verdict.entries} entries in {verdict.links} links{trimmed}; {verdict.unsealed} unsealed")
        output.line(f"digest: {verdict.head or 'none'}")
        if verdict.unkeyed:
            output.note(f"{verdict.unkeyed} entries were sealed without the key; the broker's owner could replace them")
    return FAILED if verdict.broken else DONE


def _export(path: Path, as_json: bool) -> int:
    import os

    from gpuflow.audit.links import UnreadableChain
    from gpuflow.audit.reading import AuditLog, export_lines
    from gpuflow.audit.sealing import Sealer, audit_key
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable

    count = 0
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with connected() as app, reachable():
        try:
            Sealer(app.redis, app.keys, audit_key(app.settings)).seal()
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
                for line in export_lines(AuditLog(app.redis, app.keys).items()):
                    file.write(line)
                    count += 1
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except UnreadableChain as error:
            raise bad_input(f"{error}; `gpuflow audit --verify` says more") from None
        except OSError as error:
            raise bad_input(f"{path}: {error.strerror}; name a file in a folder that you may write") from None
        finally:
            part.unlink(missing_ok=True)
    if as_json:
        output.emit_json({"file": str(path), "lines": count})
    else:
        output.line(f"{path}: {count} lines; `gpuflow audit --verify {path}` checks them")
    return DONE


def _list(since: str | None, globs: tuple[str, str, str], limit: int, as_json: bool) -> int:
    from gpuflow.audit.reading import AuditLog, Filter
    from gpuflow.cli import output
    from gpuflow.cli.session import connected
    from gpuflow.client import reachable
    from gpuflow.explaining import server_time
    from gpuflow.spec.units import duration_seconds

    try:
        back_seconds = duration_seconds(since) if since else None
    except ValueError as error:
        raise bad_input(f"--since {since!r}: {error}") from None
    actor, action, target = globs
    with connected() as app, reachable():
        now = server_time(app)
        oldest = 0.0 if back_seconds is None else now - back_seconds
        wanted = Filter(actor=actor, action=action, target=target, since=max(0.0, oldest))
        log = AuditLog(app.redis, app.keys)
        found, after = log.newest(wanted, limit)
        while after and len(found) < limit:  # it looks at a bounded part, and a bulk leaves thousands of other entries
            further, after = log.newest(wanted, limit - len(found), after)
            found += further
    if as_json:
        output.emit_json([entry.public() for entry in found])
        return DONE
    rows = []
    for entry in found:
        shown = entry.public()
        details = ", ".join(f"{name}={value}" for name, value in shown["details"].items() if value)
        rows.append([output.when_ago(entry.at, now), shown["action"], shown["actor"], shown["target"], details])
    output.table(["when", "action", "actor", "target", "details"], rows, empty="nothing of that stands in the log")
    if after and len(found) == limit:
        output.note(f"there are more; -n {limit * 2} shows them")
    return DONE
