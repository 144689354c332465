"""Fuzzing of what reads foreign bytes: `tox -e fuzz`, and a bounded run of it in tests/hostile/test_fuzz.py."""
