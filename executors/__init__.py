"""What runs in the child process: one file or folder a family of task types.

A worker starts `python -m executors`; the request comes on stdin, events leave on stdout. Nothing here knows Celery or
Redis, and heavy libraries are imported only when a task needs them.
"""
