"""Messages between clients and workers: the leased Redis transport, its Lua steps, and the embedded server.

What is here knows messages, queues and leases. It must not know what a task does or what its record says.
"""
