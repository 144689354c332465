"""Warm sessions (`python -m executors session`): one process that keeps one model loaded and serves many requests.

`lines` reads what comes on stdin, `channel` writes stdout, `serving` is the loop between them; an engine (`engine` has
the contract) does the work. docs/reference/sessions.md has the protocol.
"""
