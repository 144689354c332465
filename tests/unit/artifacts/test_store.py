"""Names, URLs and retries of the stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.artifacts.retrying import retrying
from gpuflow.artifacts.store import check_name, check_prefix, fetch, open_store, shown_url
from gpuflow.errors import ArtifactError
from gpuflow.settings import Settings


@given(st.text(max_size=60))
def test_a_name_that_passes_stays_in_its_folder(name: str) -> None:
    try:
        check_name(name)
    except ArtifactError:
        return
    path = Path("/folder") / name
    assert path.is_relative_to("/folder")
    assert path.as_posix() == f"/folder/{name}"
    assert ".." not in path.parts
    assert name.isprintable() or all(ord(char) > 31 for char in name)


@pytest.mark.parametrize("name", ["a", "a/b", "..a/b..", "a b", "é/✓", "n" * 255, "/".join(["n" * 203] * 5)])
def test_plain_names_pass(name: str) -> None:
    assert check_name(name) == name
    assert check_prefix(f"{name}/") == name
    assert check_prefix("") == ""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pass@host:1/a?sig=x#y", "https://host:1/a"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("file:///a", "file:///a"),
    ],
)
def test_a_shown_url_has_no_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize("url", ["", "folder", "gopher://user:canary@host/a?canary"])
def test_an_unknown_scheme_is_told(url: str, tmp_path: Path) -> None:
    for action in (
        lambda: open_store(url, settings=Settings()),
        lambda: fetch(url, tmp_path / "a", settings=Settings()),
    ):
        with pytest.raises(ArtifactError, match="use file:, http:, https: or s3:") as refused:
            action()
        assert "canary" not in str(refused.value)


class Line:
    """A transfer that fails always, and gets on by `steps` bytes a try."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.offset, self.tries = list(steps), 0, 0

    def __call__(self) -> None:
        self.tries += 1
        self.offset += self.steps.pop(0) if self.steps else 0
        raise ConnectionError


@pytest.mark.parametrize(("steps", "tries"), [((), 3), ((1,), 3), ((1, 1, 1, 0, 1), 7), ((0, 0, 9), 5)])
def test_tries_that_get_on_do_not_count(steps: tuple[int, ...], tries: int) -> None:
    line = Line(*steps)
    again = retrying(
        lambda error: isinstance(error, ConnectionError),
        offset=lambda: line.offset,
        first_wait_seconds=0,
        max_attempts=3,
    )

    with pytest.raises(ConnectionError):
        again(line)

    assert line.tries == tries


def test_what_is_not_transient_is_not_tried_again() -> None:
    line = Line()

    with pytest.raises(ConnectionError):
        retrying(lambda error: False)(line)

    assert line.tries == 1


@pytest.mark.parametrize("url", ["http://host/api/v1/results", "https://host/a", "s3://bucket/a", "gopher://host/a"])
def test_offline_opens_nothing_but_folders(url: str, tmp_path: Path) -> None:
    settings = Settings(offline=True)
    for action in (
        lambda: open_store(url, settings=settings),
        lambda: fetch(url, tmp_path / "a", settings=settings),
    ):
        with pytest.raises(ArtifactError, match="offline here"):
            action()
    (tmp_path / "here").write_text("x")

    stored = open_store((tmp_path / "shared").as_uri(), settings=settings).put(tmp_path / "here", "a")

    assert fetch(stored.url, tmp_path / "back", settings=settings).sha256 == stored.sha256
