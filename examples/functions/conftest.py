"""Switches the fixtures of gpuflow on, for the tests of this project."""

pytest_plugins = ["gpuflow.testing"]
