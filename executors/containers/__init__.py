"""Tasks in containers: what is created of a task, and the engine that runs it."""
