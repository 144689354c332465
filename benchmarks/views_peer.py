"""The peer of views.py: a plain Celery app on the server that PEER_URL names."""

from __future__ import annotations

import os

from stock_celery import stock_app

app = stock_app(os.environ["PEER_URL"])
