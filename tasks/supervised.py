"""The Celery tasks of all task types, users' own among them: each hands its delivery to the supervisor."""

from __future__ import annotations

from gpuflow.celery_app import app
from gpuflow.routing.families import SUPERVISED_TASKS
from gpuflow.task import RoutedTask
from gpuflow.worker.outcome import ENDS
from gpuflow.worker.supervisor import supervise

for _name in sorted(SUPERVISED_TASKS):
    app.task(bind=True, name=_name, base=RoutedTask, throws=ENDS)(supervise)
