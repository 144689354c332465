"""Requirements of a command: each is one requirement, of fixed content, and never an option of pip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.errors import InvalidTemplate
from gpuflow.spec import canonical, parse
from gpuflow.spec.pip_requirements import read_requirement

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "sha256=" + "a" * 64


@pytest.mark.parametrize(
    "text",
    [
        "torch",
        "torch==2.13.0",
        "vllm[flashinfer]>=0.9,<1 ; python_version >= '3.11'",
        f"tool @ https://example.org/tool-1.0-py3-none-any.whl#{DIGEST}",
        f"tool[x] @ https://example.org/tool-1.0.tar.gz#egg=tool&{DIGEST}",
        f"tool @ git+https://example.org/me/tool.git@{COMMIT}",
        "name.of-a_package",
    ],
)
def test_what_is_fixed_by_its_text_is_taken(text: str) -> None:
    assert (read_requirement(f" {text} ").text, read_requirement(text).path) == (text, None)


@pytest.mark.parametrize(
    ("text", "path", "extras", "relative"),
    [
        ("/wheels/a-1.0-py3-none-any.whl", "/wheels/a-1.0-py3-none-any.whl", "", False),
        ("/wheels/a b-1.0.tar.gz[test,x]", "/wheels/a b-1.0.tar.gz", "[test,x]", False),
        ("./wheels/a-1.0.zip", "./wheels/a-1.0.zip", "", True),
        ("a-1.0-py3-none-any.whl", "a-1.0-py3-none-any.whl", "", True),
    ],
)
def test_files_are_known_as_such(text: str, path: str, extras: str, relative: bool) -> None:
    found = read_requirement(text)

    assert (found.path, found.extras, found.is_relative) == (path, extras, relative)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("# six", "is empty"),
        ("six\n--index-url http://evil", "more than one line"),
        ("-r other.txt", "list its lines here"),
        ("--requirement=other.txt", "list its lines here"),
        ("-e .", "command.project"),
        ("--editable ./x", "command.project"),
        ("-i http://evil/simple", "PIP_INDEX_URL"),
        ("--index-url http://evil/simple", "PIP_INDEX_URL"),
        ("--extra-index-url http://evil/simple", "PIP_EXTRA_INDEX_URL"),
        ("-f /wheels", "PIP_FIND_LINKS"),
        ("-c limits.txt", "write the versions here"),
        ("--target /etc", "write requirements"),
        ("-", "write requirements"),
        ("six --hash=sha256:00", "has an option of pip"),
        ("six --global-option=x", "has an option of pip"),
        ("six -t /etc", "has an option of pip"),
        (".", "no wheel"),
        ("./project", "no wheel"),
        ("/srv/project", "no wheel"),
        ("../a-1.0-py3-none-any.whl", "may lead anywhere"),
        ("/wheels/../../a-1.0-py3-none-any.whl", "may lead anywhere"),
        ("~/a-1.0-py3-none-any.whl", "may lead anywhere"),
        ("https://example.org/tool-1.0-py3-none-any.whl", "a URL without a name"),
        ("git+https://example.org/tool", "a URL without a name"),
        ("file:///wheels/a-1.0-py3-none-any.whl", "URL without a name"),
        ("tool @ https://example.org/tool.whl", "whose content may change"),
        ("tool @ git+https://example.org/tool@main", "a branch or tag"),
        ("tool @ git+https://example.org/tool", "a branch or tag"),
        (f"tool @ git+ssh://git@example.org/tool@{COMMIT}", "a login"),
        (f"tool @ https://me:pass@example.org/tool.whl#{DIGEST}", "a login"),
        ("tool @ file:///wheels/tool.whl", "scheme 'file'"),
        ("tool @ ftp://example.org/tool.whl", "scheme 'ftp'"),
        ("six==", "is no requirement"),
        ("six; import os", "is no requirement"),
        ("two words", "is no requirement"),
        ("six \\", "is no requirement"),
    ],
)
def test_options_and_what_may_change_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_requirement(text)


@given(st.text(max_size=40) | st.from_regex(r"[-a-z@./:+#\[\]; ]{0,30}", fullmatch=True))
def test_whatever_is_written_it_is_one_requirement_or_refused(text: str) -> None:
    try:
        found = read_requirement(text)
    except ValueError:
        return
    assert not found.text.startswith("-")
    assert len(found.text.splitlines()) == 1


def test_they_are_checked_in_a_template_and_those_of_the_environment_later() -> None:
    spec = {"taskType": "command", "command": {"command": "true", "requirements": ["six", "--pre"]}}

    with pytest.raises(InvalidTemplate) as caught:
        parse(spec)
    assert [one.path for one in caught.value.mistakes] == ["command.requirements[1]"]
    later = {**spec, "command": {**spec["command"], "requirements": ["${env:WHAT}"]}}  # type: ignore[dict-item]
    assert canonical(later)["command"]["requirements"] == ["${env:WHAT}"]
