"""The task record in Redis: states, attempts, fencing. All changes are Lua compare-and-set steps (lua/).

What is here knows records, attempts and events; not how a task runs, and not what a pipeline is.
"""
