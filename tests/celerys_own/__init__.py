"""Celery's own integration tests, on stock Celery and on gpuflow with every task in a child (`tox -e celerys-own`)."""
