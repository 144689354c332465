"""Keeps the ML libraries from drawing progress bars and from talking to anyone: our events say how far the work is.

Call `quiet()` before the first import of a library.
"""

from __future__ import annotations

import os
from typing import Final

_DEFAULTS: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TQDM_DISABLE": "1",
}


def quiet() -> None:
    """Set what the user has not set, and turn progress bars off."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from transformers.utils import logging

    logging.disable_progress_bar()
