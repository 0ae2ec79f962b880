import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test may touch the network
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait let others run: the browser tests share the cores

import pytest


@pytest.fixture(scope="session")
def loaded():
    """The bundled model in float32 on the CPU, loaded once for the whole run. Leave it as you found it."""
    from kvlab.runtime import load

    return load("smollm2", device="cpu", dtype="float32")
