"""What makes a Celery worker a gpuflow worker: pool, boot steps, admission, and supervision of child processes."""
