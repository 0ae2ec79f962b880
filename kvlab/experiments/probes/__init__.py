"""Scripts that run inside other people's releases, each in a process of its own. Not imported here: copied beside `probe.py`."""
