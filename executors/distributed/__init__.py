"""Training in several processes, one for each GPU: torchrun's ranks, started, watched and ended as one task."""
