"""A local cluster: an embedded broker, workers and, if wanted, beat, gateway and Flower, as processes of this one.

Used by `gpuflow run`, `gpuflow up` and `gpuflow resume`. It starts, watches and ends processes; it knows neither
templates nor tasks, and nothing of it imports Celery.
"""

from gpuflow.cluster.local import LocalCluster

__all__ = ["LocalCluster"]
