"""The bookkeeping of `kvlab.core`, carrying tensors through a real model."""

from kvlab.runtime.models import Loaded, load

__all__ = ["Loaded", "load"]
