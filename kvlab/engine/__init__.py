"""A serving engine on the block manager: continuous batching, small enough to read in an evening.

    engine = Engine(load(), num_blocks=256)
    request = engine.submit("The capital of France is", max_tokens=8)
    for piece in engine.stream(request):
        print(piece, end="")

`kvlab.core.schedule` decides what a step computes, `kvlab.runtime.packed` computes it, `engine.py` is the loop around both, `metrics.py` writes
down what happened, `watch.py` looks at what the model is given, and trusts none of them.
"""

from kvlab.engine.engine import Engine
from kvlab.engine.metrics import Metrics, StepRecord
from kvlab.engine.request import Request

__all__ = ["Engine", "Metrics", "Request", "StepRecord"]
