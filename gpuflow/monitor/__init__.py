"""The pages that gpuflow adds to Flower: Fleet, Queues, Pipelines, Scaling, Dead letters and Merge.

Loaded by `celery -A gpuflow flower` alone. All that the pages show is read from Redis, by the same functions that the
command line and the gateway use, so a restart of Flower loses nothing.
"""
