"""The bug zoo. Every fault is one reversible change to a named mechanism, with its symptom, detector, fix and public cases.

    from kvlab.faults import ZOO, fault

    with fault("cache-not-reset"):
        ...        # everything in here runs with the fault on; outside, nothing has changed

A fault replaces one function of the code it breaks; the code itself knows nothing of it.
"""

from kvlab.faults import attention as _attention  # noqa: F401  (fills ZOO)
from kvlab.faults import blocks as _blocks  # noqa: F401  (fills ZOO)
from kvlab.faults import decoding as _decoding  # noqa: F401  (fills ZOO)
from kvlab.faults import engine as _engine  # noqa: F401  (fills ZOO)
from kvlab.faults import ledger as _ledger  # noqa: F401  (fills ZOO)
from kvlab.faults import positions as _positions  # noqa: F401  (fills ZOO)
from kvlab.faults import prefix as _prefix  # noqa: F401  (fills ZOO)
from kvlab.faults import transformers as _transformers  # noqa: F401  (fills ZOO)
from kvlab.faults.zoo import ZOO, Fault, add, fault

__all__ = ["ZOO", "Fault", "add", "fault"]
