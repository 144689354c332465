"""OpenTelemetry traces of tasks and pipelines: submit, queue, prepare, run, commit (docs/howto/traces.md).

Without GPUFLOW_TRACES nothing of OpenTelemetry is imported, and the only work is to hand on a `traceparent`.
"""
