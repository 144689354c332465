"""Takes GPUs that the driver has lost out of a running worker, and stops the tasks on them; takes them back later.

Called by the presence thread. A task that loses its GPU fails with a cause that may pass, so another worker takes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from redis.exceptions import RedisError

from gpuflow.logs import get_logger
from gpuflow.routing.capability import Capability
from gpuflow.worker.runtime import Runtime

log = get_logger("gpuflow.gpus")

#: The driver is asked this often, in seconds.
WATCH_SECONDS: Final = 1.0


class GpuWatch:
    """Watches the GPUs of one worker."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._whole: Capability = runtime.admission.capability

    def look(self) -> None:
        """Compare what the driver tells with what this worker offers. Raises redis errors."""
        runtime = self._runtime
        if not self._whole.gpus:
            return
        lost = runtime.machine_gpus.lost()
        if lost is None:
            return
        now = runtime.admission.capability
        there = self._whole.only([gpu.uuid for gpu in self._whole.gpus if gpu.uuid not in lost])
        if there.gpus != now.gpus:
            log.error("gpus_lost", gpus=sorted(lost)) if lost else log.info("gpus_are_back")
            runtime.admission.matcher.change(replace(now, gpus=there.gpus))
        for uuid in lost:
            if runtime.admission.sessions is not None:
                runtime.admission.sessions.kill_on(uuid, lost[uuid])
            for task in runtime.tasks_on(uuid):
                if runtime.stop(task, "gpu_lost"):
                    log.error("task_stopped", task=task, gpu=uuid, cause=lost[uuid])

    def look_quietly(self) -> None:
        """Do so; a broker that is away is asked again the next time."""
        try:
            self.look()
        except RedisError as error:
            log.debug("gpus_not_compared", cause=str(error))
