"""How a test pops by the Lua step alone."""

from __future__ import annotations

from gpuflow.broker.gate import Taste
from gpuflow.broker.look import Look

#: The next message of one plain queue.
POP_ONE = Look(queues=["queue"], plain=["queue"]).to_json([], Taste(), 0)
