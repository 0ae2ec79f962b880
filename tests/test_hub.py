"""A real JupyterHub on the loopback, with the configuration in classroom/: one teacher and three students, users of the system.

They log in by HTTP; the lab is fetched, written and submitted through the students' own servers; the teacher collects and
grades from hers. Needs root, PAM, JupyterHub and its proxy: `make test-classroom` installs and runs it.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from pathlib import Path

import make_labs
import psutil
import pytest
from test_classroom import ALL, LAB, NONE, POINTS, WORKED, answers, right

from kvlab.classroom import sandbox
from kvlab.runtime import weights

ROOT = make_labs.ROOT
PROXY = ROOT / "classroom/node_modules/configurable-http-proxy/bin/configurable-http-proxy"
RUN = uuid.uuid4().hex[:6]  # a run that was killed leaves its users behind: they are in nobody's way
TEACHER, *STUDENTS = (f"kvt-{name}-{RUN}" for name in ("teacher", "ann", "ben", "cyd"))


def lacking() -> str | None:
    if sys.platform != "linux" or os.getuid() != 0:
        return "needs root: the hub starts its users' servers"
    if not all(map(shutil.which, ("useradd", "userdel", "chpasswd"))):
        return "needs useradd and its like"
    if importlib.util.find_spec("jupyterhub") is None or not PROXY.exists():
        return "needs JupyterHub and its proxy: make test-classroom"
    if not sandbox.supported():
        return "this system has no Landlock; grading refuses to run here"
    return None


pytestmark = [
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.model,
]


# ---- a machine with users ------------------------------------------------------------------------------------------------


def course_for_everybody(place: Path) -> Path:
    """A hub's environment as the teacher's page makes it, under `place`, where every user may read. Returns its Python.

    The interpreter and the packages are those that run this test, linked, not installed once more: theirs may lie where
    only root may look. The course is in it as a package, without the solutions.
    """
    version, own, course = f"python3.{sys.version_info.minor}", Path(sys.base_prefix), place / "course"
    base = place / "python" / "bin" / version
    base.parent.mkdir(parents=True)
    link(own / "bin" / version, base)
    unused = shutil.ignore_patterns("site-packages", "dist-packages", "test")
    link_tree(own / "lib" / version, place / "python" / "lib" / version, unused)
    for library in own.glob("lib/libpython*"):
        link(library, place / "python" / "lib" / library.name)
    environment = os.environ | {"LD_LIBRARY_PATH": str(place / "python" / "lib")}
    subprocess.run([base, "-m", "venv", "--without-pip", course], env=environment, check=True)
    packages = course / "lib" / version / "site-packages"
    link_tree(Path(sysconfig.get_path("purelib")), packages, shutil.ignore_patterns("__editable__*"))
    link_tree(ROOT / "kvlab", packages / "kvlab")
    for part in ("share/jupyter", "etc/jupyter"):
        link_tree(Path(sys.prefix) / part, course / part)
    link_tree(ROOT / "classroom", course / "classroom", shutil.ignore_patterns("node_modules"))
    alembic = course / "bin" / "alembic"  # nbgrader calls it by name
    alembic.write_text(f"#!{course}/bin/python\nfrom alembic.config import main\nmain()\n")
    alembic.chmod(0o755)
    return course / "bin" / "python"


def link(source: str | Path, target: str | Path) -> None:
    """The same file once more, for all to read; a copy where the disk does not allow that or the file is closed."""
    real, target = Path(os.path.realpath(source)), Path(target)
    mode = real.stat().st_mode
    try:
        if not mode & 0o004:
            raise PermissionError
        os.link(real, target)
    except OSError:
        shutil.copy2(real, target)
        target.chmod(mode | 0o444 | mode >> 6 & 0o111)


def link_tree(source: Path, target: Path, ignore=None) -> None:
    """The same folder once more, for all to read, file by file."""
    shutil.copytree(source, target, copy_function=link, ignore=ignore, dirs_exist_ok=True)
    for folder, _, _ in os.walk(target):
        os.chmod(folder, 0o755)


def shared_weights(place: Path) -> Path:
    """The model's folder once more, readable by all and writable by nobody."""
    model = weights.BUNDLED[weights.DEFAULT]
    source, target = weights.ensure(model), place / "kvlab" / "models" / model.name
    link_tree(source, target)
    for folder in (target, target.parent, target.parent.parent):
        folder.chmod(0o555)
    return place / "kvlab"


def free_ports() -> int:
    """The first of three ports in a row that nobody listens on."""
    for port in range(18000, 19000, 10):
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            try:
                for number, tried in enumerate((first, second, third)):
                    tried.bind(("127.0.0.1", port + number))
                return port
            except OSError:
                continue
    raise RuntimeError("no free ports")


class Hub:
    """The hub's process, its users and their servers."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.python = course_for_everybody(place)
        self.exchange = place / "exchange"
        self.exchange.mkdir()
        self.exchange.chmod(0o777)
        self.port = free_ports()
        self.url = f"http://127.0.0.1:{self.port}"
        self.passwords = {name: uuid.uuid4().hex for name in (TEACHER, *STUDENTS)}
        self.tokens: dict[str, str] = {}
        (place / "home").mkdir()
        for name, password in self.passwords.items():
            subprocess.run(["useradd", "-m", "-d", str(place / "home" / name), "-s", "/bin/bash", name], check=True)
            self.made.append(name)
            (place / "home" / name).chmod(0o700)
            subprocess.run(["chpasswd"], input=f"{name}:{password}", text=True, check=True)
        self.give_checkout()
        environment = os.environ | {
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(place / "python" / "lib"),
            "KVLAB_TEACHER": TEACHER,
            "KVLAB_HOME": str(shared_weights(place)),
            "KVLAB_EXCHANGE": str(self.exchange),
            "KVLAB_HUB_PORT": str(self.port),
            "KVLAB_HUB_PROXY": str(PROXY),
        }
        self.log = place / "hub.log"
        self.process = subprocess.Popen(
            [self.python, "-m", "jupyterhub", "-f", self.python.parents[1] / "classroom" / "jupyterhub_config.py"],
            cwd=place,
            env=environment,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        self.wait(lambda: self.get("/hub/health").ok, "the hub")

    def give_checkout(self) -> None:
        """The checkout in the teacher's home: the solutions and the tools are hers alone."""
        checkout = self.place / "home" / TEACHER / "checkout"
        for part in ("solutions", "tools", "classroom"):
            shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
        for path in (checkout, *checkout.rglob("*")):
            shutil.chown(path, TEACHER)

    def wait(self, ready, what: str, seconds: float = 120) -> None:
        import requests

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if ready():
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"{what} is not there after {seconds} s\n{self.log.read_text()[-3000:]}")

    def get(self, path: str, **named):
        import requests

        return requests.get(self.url + path, timeout=60, **named)

    def log_in(self, name: str, password: str | None = None) -> bool:
        """With a name and a password, as a browser does; then a token, so that the calls below are short."""
        import requests

        session = requests.Session()
        session.get(f"{self.url}/hub/login", timeout=60)
        form = {"username": name, "password": password or self.passwords[name], "_xsrf": session.cookies["_xsrf"]}
        reply = session.post(f"{self.url}/hub/login", data=form, allow_redirects=False, timeout=60)
        if reply.status_code != 302:
            return False
        session.get(f"{self.url}/hub/home", timeout=60)
        xsrf = next(cookie.value for cookie in session.cookies if cookie.name == "_xsrf" and cookie.path == "/hub/")
        made = session.post(
            f"{self.url}/hub/api/users/{name}/tokens", json={}, headers={"X-XSRFToken": xsrf, "Referer": self.url}, timeout=60
        )
        self.tokens[name] = made.json()["token"]
        return True

    def call(self, name: str, method: str, path: str, **named):
        import requests

        headers = {"Authorization": f"token {self.tokens[name]}"}
        return requests.request(method, self.url + path, headers=headers, timeout=120, **named)

    def start(self, name: str) -> None:
        assert self.call(name, "POST", f"/hub/api/users/{name}/server").status_code in (201, 202), self.log.read_text()[-2500:]
        self.wait(
            lambda: self.call(name, "GET", f"/hub/api/users/{name}").json()["servers"].get("", {}).get("ready"),
            f"{name}'s server",
        )

    def assignment(self, name: str, action: str) -> None:
        """A button of nbgrader's assignment list."""
        data = {"course_id": "shared-state", "assignment_id": LAB}
        told = self.call(name, "POST", f"/user/{name}/assignments/{action}", data=data).json()
        assert told["success"], told

    def run(self, name: str, code: str, seconds: float = 240) -> str:
        """What the code prints in a kernel of the user's server; errors are printed too."""
        import websocket

        kernel = self.call(name, "POST", f"/user/{name}/api/kernels", json={"name": "python3"}).json()["id"]
        address = f"ws://127.0.0.1:{self.port}/user/{name}/api/kernels/{kernel}/channels"
        channel = websocket.create_connection(address, header=[f"Authorization: token {self.tokens[name]}"], timeout=seconds)
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": "execute_request",
            "username": "",
            "session": uuid.uuid4().hex,
            "version": "5.3",
        }
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        channel.send(
            json.dumps({"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"})
        )
        said = ""
        try:
            while True:
                message = json.loads(channel.recv())
                if message["parent_header"].get("msg_id") != header["msg_id"]:
                    continue
                if message["msg_type"] == "stream":
                    said += message["content"]["text"]
                elif message["msg_type"] == "error":
                    said += "\n".join(message["content"]["traceback"])
                elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    return said
        finally:
            channel.close()
            self.call(name, "DELETE", f"/user/{name}/api/kernels/{kernel}")

    def close(self) -> None:
        """The hub stops its servers and its proxy; what is left after a failure is ended here. Then the users go."""
        if hasattr(self, "process"):
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for left in self.processes():
            left.kill()
        for name in self.made:
            subprocess.run(["userdel", name], capture_output=True, check=False)

    def processes(self) -> list[psutil.Process]:
        """What runs in this hub's environment, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.python.parent) in process.environ().get("PATH", ""):
                    found.append(process)
            except psutil.Error:  # it is gone
                continue
        return found


def interrupted(number, frame):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def hub():
    # links need the same disk; a user needs a place that is open, which a temporary folder of one's own need not be
    disk = Path(sys.prefix).stat().st_dev
    under = next((place for place in ("/tmp", "/var/tmp", "/srv") if Path(place).stat().st_dev == disk), "/tmp")
    place = Path(tempfile.mkdtemp(prefix="kvlab-hub-", dir=under))
    place.chmod(0o755)
    made = object.__new__(Hub)  # so that there is something to close when it does not get far
    made.made, made.python = [], place / "course" / "bin" / "python"
    before = signal.signal(signal.SIGTERM, interrupted)  # a time limit's signal: clean up, then go
    try:
        made.__init__(place)
        yield made
    finally:
        made.close()
        shutil.rmtree(place)
        signal.signal(signal.SIGTERM, before)


# ---- a lesson ------------------------------------------------------------------------------------------------------------

COMMAND = """
import subprocess, sys, os
os.chdir(os.path.expanduser("~"))
done = subprocess.run({command}, cwd={cwd}, capture_output=True, text=True)
print(done.stdout[-3000:], done.stderr[-3000:], "exit", done.returncode)
"""


def teacher(hub: Hub, *command: str, cwd: str = "course") -> str:
    """A command in the teacher's server; {python} is its Python."""
    told = hub.run(TEACHER, COMMAND.format(command=f"[sys.executable, *{command!r}]", cwd=f"os.path.expanduser('~/{cwd}')"))
    assert told.rstrip().endswith("exit 0"), told
    return told


def test_a_lesson_from_release_to_feedback(hub):
    assert not hub.log_in(STUDENTS[0], "not the password")
    for name in (TEACHER, *STUDENTS):
        assert hub.log_in(name)
        hub.start(name)

    teacher(hub, "checkout/tools/release.py", "--course", "course", LAB, cwd="")

    writes = {STUDENTS[0]: right, STUDENTS[1]: answers(slots=WORKED["slots"]), STUDENTS[2]: lambda notebook: None}
    for name, write in writes.items():
        hub.assignment(name, "fetch")
        path = f"/user/{name}/api/contents/{LAB}/{LAB}.ipynb"
        content = hub.call(name, "GET", path).json()["content"]
        notebook = make_labs.nbformat.from_dict(content)
        write(notebook)
        assert hub.call(name, "PUT", path, json={"type": "notebook", "content": notebook}).ok
        hub.assignment(name, "submit")

    # the weights: one copy, that the student may not write, without a network
    said = hub.run(
        STUDENTS[1],
        "import os\nfrom kvlab.runtime import load, weights\nprint(weights.home(), load().spec)\nopen(weights.home() / 'x', 'w')",
    )
    assert "SmolLM2" in said and str(hub.place / "kvlab") in said and "PermissionError" in said
    doctor = hub.run(
        STUDENTS[1],
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-m', 'kvlab.doctor', '--line'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout)",
    )
    assert doctor.startswith("The labs will run."), doctor

    # the teacher's course is the teacher's; a submission in another's name counts for its maker
    said = hub.run(STUDENTS[2], f"print(open('{hub.place}/home/{TEACHER}/course/source/{LAB}/{LAB}.ipynb').read())")
    assert "PermissionError" in said
    said = hub.run(
        STUDENTS[2], f"import kvlab\nprint(kvlab.__file__)\nopen('{hub.place}/home/{TEACHER}/checkout/tools/release.py')"
    )
    assert said.startswith(str(hub.place / "course")) and "PermissionError" in said
    forge = (
        f"import shutil\nshutil.copytree('{LAB}', '{hub.exchange}/shared-state/inbound/{STUDENTS[0]}+{LAB}+2099-01-01 00:00:00.0 UTC+x')\n"
        f"import pathlib\npathlib.Path('{hub.exchange}/shared-state/inbound/{STUDENTS[0]}+{LAB}+2099-01-01 00:00:00.0 UTC+x/timestamp.txt')"
        ".write_text('2099-01-01 00:00:00.0 UTC')\nprint('forged')"
    )
    assert "forged" in hub.run(STUDENTS[2], forge)

    teacher(hub, "-m", "nbgrader", "collect", LAB)
    teacher(hub, "-m", "nbgrader", "autograde", LAB)
    teacher(hub, "-m", "nbgrader", "generate_feedback", LAB)
    teacher(hub, "-m", "nbgrader", "release_feedback", LAB)
    scores = teacher(
        hub,
        "-c",
        "from nbgrader.api import Gradebook\ng = Gradebook('sqlite:///gradebook.db', 'shared-state')\n"
        f"print('SCORES', {{s.student.id: s.score for s in g.assignment_submissions('{LAB}')}})",
    )
    expected = {STUDENTS[0]: sum(ALL.values()), STUDENTS[1]: POINTS["slots"], STUDENTS[2]: sum(NONE.values())}
    found = eval(next(line for line in scores.splitlines() if "SCORES" in line).split("SCORES")[1])
    assert found == {name: float(points) for name, points in expected.items()}

    for name in STUDENTS[:2]:  # the third one's newest submission is the forged one
        hub.assignment(name, "fetch_feedback")
        page = hub.run(
            name, f"import glob\nprint(*[open(f).read() for f in glob.glob('{LAB}/feedback/**/*.html', recursive=True)])"
        )
        assert "right, on the notebook" in page


def test_a_hub_that_ends_leaves_nothing_running(hub):
    hub.process.terminate()
    hub.process.wait(60)
    assert [process.name() for process in hub.processes()] == []
