"""Memory after a batch that failed: what it left is freed before the next one begins."""

from __future__ import annotations

import gc


def free_unused() -> None:
    """Free what no object needs any more, the blocks that torch keeps included.

    Call it outside of `except`: the frames of the failure hold the tensors of the batch as long as its error lives.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
