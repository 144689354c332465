"""Functions of a team in children: what the worker sends to the child of a decorated function, and that child.

`gpuflow.functions.calls` is what both sides speak, `python -m gpuflow.functions` the child. The worker's side is
`gpuflow.worker.function_delivery`.
"""
