"""Files of tasks: what goes in, what comes out, archives and manifests. It knows no Celery and no queue."""
