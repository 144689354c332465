"""The merge layer: identical calls run once, compatible ones travel together, and no caller can hurt another.

Each call that may be merged is a *caller*: a task with a record and a stored message. What executes is a *run*: a
task of its own, which serves one call or a batch of different ones. docs/decisions/0061 has the reasons.
"""
