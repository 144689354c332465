"""The operator's policy as the settings have it: what tasks reach, read and write here, and whose results they get.

Called by the worker, its readers, the pipelines and the clients; it opens nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from gpuflow.artifacts.here import is_here
from gpuflow.artifacts.http_names import results_name
from gpuflow.artifacts.store import shown_url
from gpuflow.errors import NotAllowed
from gpuflow.policy import buckets
from gpuflow.policy.buckets import is_bucket_url
from gpuflow.policy.hosts import LOCAL_NETWORKS, Hosts, Place
from gpuflow.policy.paths import texts_of
from gpuflow.policy.roots import Roots
from gpuflow.settings import Settings
from gpuflow.spec.presets import configs_root

#: First part of the names of what clients have sent: content by its digest, which nobody guesses.
UPLOADS: Final = "uploads"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
#: Tasks whose owner is asked for, of those that one spec names.
MOST_NAMED: Final = 4096
#: Longest text that is looked at as a place of results, in characters.
_LONGEST: Final = 8192


def task_hosts(settings: Settings) -> Hosts:
    """Return what tasks may reach from here."""
    own = (settings.gateway_url, settings.orchestrator_base_url, settings.store_url)
    return Hosts(
        allowed=settings.allow_hosts,
        own=tuple(place for url in own if (place := Place.of(url))),
        brokers=tuple(place for place in [Place.of(settings.redis_url)] if place),
    )


def client_hosts(settings: Settings) -> Hosts:
    """Return what a client follows references to: where the broker is on its own machine, local networks too."""
    hosts = task_hosts(settings)
    if settings.redis_url is not None and not is_here(settings.redis_url):
        return hosts
    return Hosts(allowed=(*hosts.allowed, *LOCAL_NETWORKS), own=hosts.own, brokers=hosts.brokers)


def address_alone(url: str | None) -> str | None:
    """Return the URL of a broker with its host and port alone; None for one without."""
    place = Place.of(url)
    return f"redis://{f'[{place.host}]' if ':' in place.host else place.host}:{place.port}" if place else None


def task_roots(settings: Settings, results_of: Iterable[str] = ()) -> Roots:
    """Return what a task may read and write here; `results_of` are the tasks and uploads whose files it gets.

    What of the cache a task reads is what was brought there for it (`Access.brought`).
    """
    folders = [str(settings.results_dir)]
    if (settings.store_url or "").startswith("file:"):
        folders.append(_path(str(settings.store_url)))
    # The folder of a task may have become a link: it counts as the place that it should be, not as where it leads.
    own = [f"{os.path.realpath(folder)}/{name}" for folder in folders for name in results_of]
    return Roots(read=settings.read_roots, write=settings.write_roots, own=(os.path.realpath(configs_root()), *own))


def results_of(
    spec: Any, settings: Settings, mine: str, owned: Callable[[Sequence[str]], Iterable[str]]
) -> frozenset[str]:
    """Return the tasks whose results a task gets: its own, and those of its owner that its spec names a file of.

    And the uploads that it names, `uploads/<digest>`: no task gets the folder of all. `owned` gives, of other tasks,
    those of the same owner. Raises NotAllowed for a spec that names too many.
    """
    found = {name for text in texts_of(spec) if (name := named_task(text, settings))} - {UPLOADS, mine}
    uploads = {name for name in found if "/" in name}
    named = found - uploads
    if len(named) > MOST_NAMED:
        raise NotAllowed(
            f"the task names the results of {len(named)} tasks, and at most {MOST_NAMED} are looked up; gather them in "
            "stages between"
        )
    return frozenset({mine, *uploads, *(named.intersection(owned(sorted(named))) if named else ())})


def named_task(text: str, settings: Settings) -> str | None:
    """Return the first part of the name that a path or URL has in the results of this fleet; None for any other.

    Of a path in the uploads, the first two: each is one content.
    """
    if len(text) > _LONGEST:
        return None
    if text.startswith("http"):
        return (results_name(text, settings) or "").partition("/")[0] or None
    if is_bucket_url(text):
        return _named(*(_in_store(text.partition("#")[0], settings) or ()))
    path = _path(text) if text.startswith("file:") else text
    folders = [str(settings.results_dir)]
    if (settings.store_url or "").startswith("file:"):
        folders.append(_path(str(settings.store_url)))
    for folder in folders:
        if path.startswith(f"{folder}/"):
            return _named(*path[len(folder) + 1 :].split("/"))
    return None


def _named(name: str = "", upload: str = "", *_: str) -> str | None:
    if name == UPLOADS:
        return f"{name}/{upload}" if _DIGEST.fullmatch(upload) else None
    return name if name not in ("", ".", "..") else None


def _in_store(url: str, settings: Settings) -> tuple[str, ...] | None:
    """Return the parts of the name that an s3: URL has in the fleet's store, () for the store; None for elsewhere."""
    if not is_bucket_url(settings.store_url or ""):
        return None
    try:
        return buckets.below(buckets.parts_of(url), buckets.parts_of(str(settings.store_url)))
    except ValueError:
        return None


def judge_bucket(url: str, settings: Settings, *, write: bool = False) -> None:
    """Raise NotAllowed for an s3: URL that a task may not name: the worker's keys reach others' results as well.

    Below the fleet's store it gets what was uploaded, by its own name, and the results that it gets by `results_of`;
    it writes to the store itself. Other places are the operator's to list.
    """
    access = _access.get()
    if not is_bucket_url(url) or (access is None and not write):
        return
    try:
        parts = buckets.parts_of(url)
    except ValueError as error:
        raise NotAllowed(f"{shown_url(url)!r} is not used: {error}", buckets.SETTING) from None
    name = _in_store(url, settings)
    if name is None:
        found = buckets.refusal(parts, settings.allow_buckets)
        if found is not None:
            raise NotAllowed(found.message, found.setting)
    elif write:
        if name:
            raise NotAllowed(f"{shown_url(url)} lies in the fleet's store; leave output.destination out to write there")
    elif access is not None and (_named(*name) not in access.results_of or len(name) < 2):
        raise NotAllowed(
            f"{shown_url(url)} is in the fleet's store, of which a task gets what was uploaded, and results of "
            "tasks of its owner; name one of those"
        )


def _path(url: str) -> str:
    return unquote(urlsplit(url).path)


@dataclass(frozen=True, kw_only=True)
class Access:
    """What one task gets: its roots, and the tasks whose results it may fetch with the worker's token.

    `brought` are the real paths in the cache of what was fetched and unpacked for it.
    """

    roots: Roots
    results_of: frozenset[str]
    brought: set[str] = field(default_factory=set)

    def roots_of_child(self) -> Roots:
        """Return what the child reads and writes: of the cache, what was brought for it."""
        return replace(self.roots, own=(*self.roots.own, *sorted(self.brought)))


_access: Final[ContextVar[Access | None]] = ContextVar("gpuflow_access", default=None)


@contextlib.contextmanager
def limited_to(access: Access) -> Iterator[None]:
    """Let this thread read for a task in the block: within its roots, the token for its own results alone."""
    before = _access.set(access)
    try:
        yield
    finally:
        _access.reset(before)


def current_roots() -> Roots | None:
    """Return the roots of the task that this thread reads for; None: it reads for its own user."""
    access = _access.get()
    return access.roots if access else None


def note_brought(path: Path) -> Path:
    """Let the task that this thread reads for have a file or folder of the cache; return the path."""
    access = _access.get()
    if access is not None:
        access.brought.add(os.path.realpath(path))
    return path


def may_use_token(url: str, settings: Settings) -> bool:
    """Say whether the worker's token may be sent to a URL: for files of the fleet's results, never for a listing.

    For a task they are what clients have sent, and the results that it gets.
    """
    name = results_name(url, settings)
    access = _access.get()
    if access is None:
        return name is not None
    first, _, rest = (name or "").partition("/")
    return bool(rest) and (first == UPLOADS or first in access.results_of)


def judge_own_service(url: str, settings: Settings) -> None:
    """Raise NotAllowed where a task names more of the fleet's own services than the results that it gets.

    A gateway without a token answers every program of its machine, and a worker there asks for a task.
    """
    if _access.get() is None or Place.of(url) not in task_hosts(settings).own or may_use_token(url, settings):
        return
    raise NotAllowed(
        f"{shown_url(url)} is a service of the fleet itself, of which a task gets what was uploaded, and results of "
        "tasks of its owner; name one of those, or give a token by `headers`"
    )
