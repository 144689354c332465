"""Routing: what a task asks for, what a worker can do, whether it fits, and which queue carries it.

Everything here is pure: no Redis, no Celery, no clock. `requirement` is what is asked, `accelerators` and
`resources` read it from what users type, `queues` names its queue, `capability` is what a worker offers,
`fit` compares the two.
"""
