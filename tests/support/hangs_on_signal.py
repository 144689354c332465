"""Makes the consumer loop of this worker hang at SIGUSR2. Loaded by `--include hangs_on_signal`."""

from __future__ import annotations

import signal
import threading

signal.signal(signal.SIGUSR2, lambda *_: threading.Event().wait())  # handlers run on the main thread: the loop's
