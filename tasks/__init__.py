"""The Celery tasks of gpuflow: thin, those of all task types in one file. What they do lives in `gpuflow`."""
