"""The way of a newcomer: it fetches a real model and takes minutes, so it runs on CI, or when named by its path."""

from __future__ import annotations

import os

if not os.environ.get("CI"):
    collect_ignore_glob = ["test_*.py"]
