"""The Celery tasks of gpuflow: thin, one file a family. What they do lives in `gpuflow`."""
