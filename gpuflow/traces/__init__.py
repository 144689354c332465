"""OpenTelemetry traces of tasks and pipelines: submit, queue, prepare, run, commit (docs/howto/traces.md).

Without GPUFLOW_TRACES gpuflow imports nothing of OpenTelemetry, and the only work is to hand on a `traceparent`.
"""
