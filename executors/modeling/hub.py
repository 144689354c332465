"""Models of the Hugging Face hub on this machine: in the hub's own cache, fetched, listed and removed by its library.

Used by `models`, `cache_trim` and `modeling.location`. There is no second cache of them: they lie where HF_HOME says.
Imports huggingface_hub late, and never torch.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from executors.base import ExecutorError, bad_input
from executors.cache import cache_root, hold, lock_path, unused
from executors.modeling.libraries import prepare_libraries
from executors.offline import not_here, offline
from gpuflow.protocol import Emitter

DEFAULT_REVISION: Final = "main"
#: `organisation/name`, with or without `@revision`.
_NAME: Final = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?")
#: Weights for other frameworks, and copies in formats that nothing here reads.
_OTHER_FORMATS: Final = (
    "*.msgpack", "*.h5", "*.ot", "*.tflite", "*.onnx", "*.onnx_data", "*.mlmodel", "onnx/*", "openvino/*", "coreml/*",
    "original/*",
)  # fmt: skip
#: Left out as well where the same weights are there as safetensors.
_PICKLES: Final = ("*.bin", "*.pth", "*.pt")
_TELL_SECONDS: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """One revision of a model in the hub's cache. `refs` are the branches and tags that point to it here."""

    id: str
    commit: str
    refs: tuple[str, ...]
    folder: Path
    snapshot: Path
    size_bytes: int
    used_at: float


def parse_name(name: str) -> tuple[str, str] | None:
    """Return the id and the revision of `organisation/name[@revision]`; None for anything else."""
    match = _NAME.fullmatch(name)
    return (match["id"], match["revision"] or DEFAULT_REVISION) if match and ".." not in name else None


def lock_name(identifier: str) -> str:
    """Return the name of the lock of a model; one for all its revisions."""
    return f"hub-models--{identifier.replace('/', '--')}"


def hold_model(identifier: str, cache_dir: str | None) -> None:
    """Keep a model from being removed as long as this process lives, and note its use."""
    if parse_name(identifier) is not None:
        hold(cache_root(cache_dir), lock_name(identifier))


def cache_folder() -> Path | None:
    """Return the folder of the hub's cache; None without its library."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def pull(source: Mapping[str, Any], cache_dir: str | None, emitter: Emitter) -> str:
    """Fetch `identifier` at `revision`, with progress in bytes, and return the folder of its files.

    Raises ExecutorError: Offline, and what the hub's library raises.
    """
    prepare_libraries()
    identifier, revision = str(source["identifier"]), str(source.get("revision") or DEFAULT_REVISION)
    hold_model(identifier, cache_dir)
    if offline():
        found = find(identifier, revision, cache_dir)
        if found is None:
            raise ExecutorError("Offline", not_here(f"{identifier}@{revision}"))
        return str(found.snapshot)
    from huggingface_hub import HfApi, snapshot_download

    emitter.status("loading", f"fetching {identifier} from the hub")
    ignored = _ignored(HfApi().list_repo_files(identifier, revision=revision))
    return str(snapshot_download(identifier, revision=revision, ignore_patterns=ignored, tqdm_class=_progress(emitter)))


def _ignored(names: Iterable[str]) -> list[str]:
    return [*_OTHER_FORMATS, *(_PICKLES if any(name.endswith(".safetensors") for name in names) else ())]


def _progress(emitter: Emitter) -> Any:
    from tqdm.auto import tqdm

    class Progress(tqdm):  # type: ignore[misc,type-arg]
        """Tells the bytes of the whole download as events, its end included; draws nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = str(options.get("desc") or "").startswith("Reconstructing")
            self._arrived, self._told_at = int(options.get("initial") or 0), 0.0
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self._arrived += int(n or 0)
            now = time.monotonic()
            due = now - self._told_at >= _TELL_SECONDS or self._arrived >= (self.total or 0)
            if self._counts and self.total and due:
                self._told_at = now
                emitter.progress(min(self._arrived, self.total), self.total, "byte")

    return Progress


def cached(cache_dir: str | None) -> Iterator[HubModel]:
    """Yield the models of the hub's cache, one for each revision that is here."""
    folder = cache_folder()
    if folder is None or not folder.is_dir():
        return
    from huggingface_hub import scan_cache_dir

    root = cache_root(cache_dir)
    for repo in scan_cache_dir(folder).repos:
        if repo.repo_type != "model":
            continue
        used = _used_at(lock_path(root, lock_name(repo.repo_id)))
        for revision in repo.revisions:
            yield HubModel(
                id=repo.repo_id,
                commit=revision.commit_hash,
                refs=tuple(sorted(revision.refs)),
                folder=Path(repo.repo_path),
                snapshot=Path(revision.snapshot_path),
                size_bytes=revision.size_on_disk,
                used_at=max(used, revision.last_modified),
            )


def find(identifier: str, revision: str, cache_dir: str | None) -> HubModel | None:
    """Return a model of the hub's cache by branch, tag or commit; None if it is not here."""
    for model in cached(cache_dir):
        if model.id == identifier and (revision in model.refs or revision == model.commit):
            return model
    return None


def missing_files(model: HubModel) -> list[str]:
    """Return the files that a broken-off pull has left out; none is known of where no pull has listed them."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.utils import LocalEntryNotFoundError, filter_repo_objects

    try:
        names = [file.path for file in get_cached_repo_tree(model.id, revision=model.commit)]
    except LocalEntryNotFoundError:
        return []
    wanted = filter_repo_objects(names, ignore_patterns=_ignored(names))
    return [name for name in wanted if not (model.snapshot / name).is_file()]


def remove(identifier: str, cache_dir: str | None, *, revision: str | None = None) -> int:
    """Remove one revision, or all, of a model, and return the bytes that are free then.

    Raises ExecutorError: InUse, BadInput if it is not here.
    """
    with unused(cache_root(cache_dir), lock_name(identifier)) as free:
        if not free:
            raise ExecutorError(
                "InUse", f"{identifier} is being used by a task or fetched; try again when it has ended"
            )
        commits = [
            model.commit
            for model in cached(cache_dir)
            if model.id == identifier and (revision is None or revision in (model.commit, *model.refs))
        ]
        if not commits:
            raise bad_input(f"{identifier}{f'@{revision}' if revision else ''} is not in the cache of this machine")
        from huggingface_hub import scan_cache_dir

        strategy = scan_cache_dir(cache_folder()).delete_revisions(*commits)
        strategy.execute()
        return int(strategy.expected_freed_size)


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
