"""kvlab: run a real model, share its KV cache well or badly, and prove which of the two happened.

The parts, from the ground up (imports point down only):

- `kvlab.core`: the bookkeeping, standard library only.
- `kvlab.runtime`: the same things carrying tensors through a real model; `kvlab.runtime.load()` is the way in.
- `kvlab.compare`, `kvlab.faults`: two runs side by side, and the faults that set them apart.
- `kvlab.experiments`: one module per question; `kvlab.record` keeps what they measured.
- `kvlab.show`, `kvlab.checks`: figures, and what the labs check.

Importing this package loads none of them.
"""

__version__ = "0.1.0"
