"""Decides how many processes train a task, and which of its GPUs they use. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executors.base import bad_input
from gpuflow.protocol import Request
from gpuflow.spec.sections import TRAINING_SCHEMAS


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """How many processes train; `gpus` are the UUIDs of the GPUs that they use, one each (none: they use the CPU)."""

    processes: int
    gpus: tuple[str, ...] = ()


def plan_ranks(request: Request) -> RankPlan:
    """Return the plan of a request: one process for each leased GPU, unless `training` says otherwise.

    A task without a GPU is one process, unless `nproc_per_node` asks for more. Task types that do not train are one
    process with all GPUs. Raises ExecutorError: BadInput for more processes than leased GPUs.
    """
    if request.task_type not in TRAINING_SCHEMAS:
        return RankPlan(processes=1, gpus=request.gpus)
    training: Mapping[str, Any] = request.spec.get("training") or {}
    leased, asked = len(request.gpus), training.get("nproc_per_node")
    if not training.get("allow_multi_gpu", True):
        if asked is not None and asked > 1:
            raise bad_input(
                f"training.nproc_per_node is {asked}, but training.allow_multi_gpu is false; keep one of both"
            )
        return RankPlan(processes=1, gpus=request.gpus[:1])
    if asked is not None and 0 < leased < asked:
        raise bad_input(
            f"training.nproc_per_node is {asked}, but the task has {leased} GPU{'s' if leased > 1 else ''}; ask for "
            f'{asked} (resources.accelerators: "{asked}"), or leave nproc_per_node out: it is the number of GPUs then'
        )
    processes = int(asked) if asked is not None else max(leased, 1)
    return RankPlan(processes=processes, gpus=request.gpus[:processes])


def use_gpus(plan: RankPlan, request: Request) -> None:
    """Hide the leased GPUs that the plan does not use from this process, before a library looks for them."""
    if len(plan.gpus) < len(request.gpus):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(plan.gpus)
