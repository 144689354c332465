"""What all ranks of a training decide together: to leave after a notice, to save, that a checkpoint is written.

Each rank learns of a notice by itself and at its own time, so one that left alone would leave the others waiting for
it. A process that trains alone decides alone, and pays nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class _Group:
    """The group of all ranks over gloo: small questions must not wait for what a GPU has queued."""

    group: dist.ProcessGroup | None = None

    @classmethod
    def get(cls) -> dist.ProcessGroup | None:
        """Return the group, None for the default one. All ranks call it for the first time at the same point."""
        if cls.group is None and dist.get_backend() != "gloo":
            cls.group = dist.new_group(backend="gloo")
        return cls.group


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def is_first() -> bool:
    """Say whether this is rank 0, or the only process."""
    return _is_alone() or dist.get_rank() == 0


class Votes:
    """Questions that any rank may answer with yes. Every rank casts its votes at the same points.

    The result of a vote is that of the one before: so it travels while the ranks compute, and no step waits for it.
    """

    def __init__(self, questions: int) -> None:
        self._sent = torch.zeros(questions, dtype=torch.uint8)
        self._work: dist.Work | None = None

    def cast(self, *answers: bool) -> tuple[bool, ...]:
        """Send the votes of this rank, and return what any rank has answered at the last point; at first no.

        A process that trains alone gets its own answers at once.
        """
        if _is_alone():
            return answers
        if self._work is not None:
            self._work.wait()
        result = tuple(bool(vote) for vote in self._sent.tolist())
        self._sent = torch.tensor(answers, dtype=torch.uint8)
        self._work = dist.all_reduce(self._sent, op=dist.ReduceOp.MAX, group=_Group.get(), async_op=True)
        return result


def all_written() -> None:
    """Wait until every rank has come here: what each has written before is there."""
    if not _is_alone():
        dist.barrier(group=_Group.get())


def check_gradients(model: torch.nn.Module) -> None:
    """Raise RuntimeError if the ranks are about to take a step, each by gradients of its own.

    That is what a model does which a trainer has not wrapped for several ranks; nothing else shows it. One gradient is
    compared, which is the same to the last bit where gradients are exchanged. Shards (FSDP) are not looked at.
    """
    if _is_alone():
        return
    gradients = (parameter.grad for parameter in model.parameters() if type(parameter.grad) is torch.Tensor)
    sums = (float(gradient.double().abs().sum()) for gradient in gradients)
    own = next((one for one in sums if one), None)  # half the gradients of a new LoRA adapter are zero
    all_of_them: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, own, group=_Group.get())
    if len({str(one) for one in all_of_them}) > 1:
        raise RuntimeError(
            f"the {len(all_of_them)} ranks do not exchange their gradients ({all_of_them}): each would train alone; "
            "set training.allow_multi_gpu: false, and report this as a defect of gpuflow"
        )
