"""The operator's policy of a worker: what a task may bring (code), know (secrets), read, write (roots), reach (hosts).

Pure, and knows neither settings nor services: the worker asks it before anything is fetched, `validate` and `explain`
for the fleet. Every refusal names the setting that would allow it.
"""
