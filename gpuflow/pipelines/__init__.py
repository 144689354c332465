"""Pipelines: stages and graphs. A stage is dispatched when all it needs has succeeded; its join is a control task.

The truth is in the records: `controller.reconcile` compares them with the graph and does what is left to do, so a
trigger that comes twice, late or from a second place does no harm.
"""
