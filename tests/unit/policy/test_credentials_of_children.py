"""What a child inherits of variables with URLs: the addresses, and no part of a login, however the value is written."""

from __future__ import annotations

import pytest

from gpuflow.policy.secrets import without_credentials


@pytest.mark.parametrize(
    ("name", "value", "inherited"),
    [
        ("HTTPS_PROXY", "user:pw@proxy:3128", "proxy:3128"),
        ("https_proxy", "pw@proxy:3128", "proxy:3128"),
        ("HTTPS_PROXY", "http://user:pw@proxy:3128", "http://proxy:3128"),
        ("HTTPS_PROXY", "http://user:p/w@x@proxy:3128", "http://proxy:3128"),
        ("HTTPS_PROXY", "http://user:p,pw@proxy:3128", "http://proxy:3128"),
        ("HTTPS_PROXY", "user:p,pw@proxy:3128", "proxy:3128"),
        ("HTTPS_PROXY", "http://u:pw@a:1,http://u:pw@b:2", "http://a:1,http://b:2"),
        ("ALL_PROXY", "socks5://u:pw@a:1\tu:pw@b:2", "socks5://a:1\tb:2"),
        ("no_proxy", "localhost,10.0.0.0/8,.internal", "localhost,10.0.0.0/8,.internal"),
        ("PIP_PROXY", "u:pw@proxy:1", "proxy:1"),
        ("PIP_INDEX_URL", "https://u:pw@a/simple", "https://a/simple"),
        ("PIP_INDEX_URL", "https://u:pw@[::1/simple", "https://[::1/simple"),
        ("PIP_EXTRA_INDEX_URL", "https://u:pw@a/simple\nhttps://u:pw@b/simple", "https://a/simple\nhttps://b/simple"),
        ("PIP_EXTRA_INDEX_URL", "https://pw@a/x  https://b/y\thttps://pw@c", "https://a/x  https://b/y\thttps://c"),
        ("PIP_EXTRA_INDEX_URL", "https://u:pw@a/x,https://u:pw@b/y", "https://a/x,https://b/y"),
        ("PIP_EXTRA_INDEX_URL", "https://u:p,pw@a/x", "https://a/x"),
        ("HF_ENDPOINT", "https://hub.internal/a@b?c=d@e", "https://hub.internal/a@b?c=d@e"),
        ("PIP_REQUIREMENT", "name @ file", "name @ file"),
    ],
)
def test_no_part_of_a_login_is_inherited(name: str, value: str, inherited: str) -> None:
    assert without_credentials({name: value}) == {name: inherited}
