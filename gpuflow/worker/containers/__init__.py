"""Containers of a worker's tasks: what one is asked to be, the engine of the machine, and the removal of lost ones."""
