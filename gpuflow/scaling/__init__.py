"""Elastic scaling: how many workers a fleet has, and which of them take work.

`decide(snapshot, policy)` is pure; `snapshot.read` sees the fleet, the `Autoscaler` acts, and only where it leads.
"""
