"""Sets up the ML libraries of a child: no progress bars, no telemetry, and cores that are shared with others.

Call `prepare_libraries()` before the first import of one of them.
"""

from __future__ import annotations

import os
import warnings
from typing import Final

_QUIET: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TQDM_DISABLE": "1",
}
#: How often an idle OpenMP thread looks for work before it sleeps. Two trainings of 8 steps at once on 2 cores took
#: 274 s with libgomp's default, which spins, and 16 s with this; one alone took 8.7 s and 8.6 s.
_SPINS: Final = "1000"


def prepare_libraries() -> None:
    """Set what the user has not set in the environment, and turn progress bars off."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    # The versions are pinned: what they deprecate among themselves is no news to whoever reads the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft)\b")
    from transformers.utils import logging

    logging.disable_progress_bar()
