"""Grading for a class: what a student wrote runs in a process of its own and is judged outside of it.

wire.py       values as plain data, between a process that is trusted and one that is not
sandbox.py    what that process is kept from: files, network, other processes, memory without end
worker.py     the process: runs the answer, calls it, sends back what it gave
remote.py     the answer as a function on the trusted side
hidden.py     cases the notebook does not show, drawn from a secret
grade.py      one answer, its points, and what to say
nbgrader.py   the above as nbgrader's preprocessors
"""
