import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test may touch the network

import pytest


@pytest.fixture(scope="session")
def loaded():
    """The bundled model in float32 on the CPU, loaded once for the whole run. Leave it as you found it."""
    from kvlab.runtime import load

    return load("smollm2", device="cpu", dtype="float32")
