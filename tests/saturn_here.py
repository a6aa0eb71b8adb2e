"""A Saturn Cloud of one resource on this machine: its REST interface as dask-saturn uses it.

    with running_saturn(folder) as saturn: os.environ.update(saturn.environment)

Behind it are a real scheduler and real workers, as far from the client as one machine allows: an
environment of their own that has everything but `ddp_common`, no variable of ours, own working,
home and temporary directories, and, where mount namespaces may be made, something else where
`hidden` lies.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from processes import can_hide, hiding, is_alive, wait_until

SIZES = {"tiny": "1 core", "small": "2 cores"}
TOKEN = "a-token-of-saturn"


@contextlib.contextmanager
def running_saturn(folder, hidden=None):
    """Yields a `Saturn` that listens on a port of 127.0.0.1; its clusters are gone afterwards.

    `hidden`: a directory that they see empty.
    """
    saturn = Saturn(Path(folder), hidden)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer("GET")

        def do_POST(self):
            self._answer("POST")

        def _answer(self, method):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0].strip("/")
            if self.headers.get("Authorization") != f"token {TOKEN}":
                code, content = 401, {"message": "Invalid token"}
            elif not path.startswith("api/dask_clusters"):
                code, content = 404, {"message": "There is nothing here"}
            else:
                below = path.removeprefix("api/dask_clusters").strip("/")
                values = json.loads(body) if body.startswith(b"{") else {}
                code, content = saturn.answer(method, below, values)
            text = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    saturn.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield saturn
    finally:
        server.shutdown()
        server.server_close()
        for cluster in saturn.clusters:
            cluster.close()


class Saturn:
    """What the service knows: its `clusters`, the oldest first."""

    def __init__(self, folder, hidden=None):
        self.folder = folder
        self.hidden = hidden
        self.url = None
        self.clusters = []
        self.python = environment_without_ddp_common(folder / "environment")
        self._one_at_a_time = threading.Lock()

    @property
    def environment(self):
        """Variables for the client; as inside Saturn, where connections need no certificate."""
        return {"SATURN_BASE_URL": self.url, "SATURN_TOKEN": TOKEN, "SATURN_IS_INTERNAL": "true"}

    def answer(self, method, path, body):
        """(HTTP status, content) for a request below api/dask_clusters."""
        with self._one_at_a_time:
            if (method, path) == ("GET", "info"):
                sizes = [{"name": name, "display": text} for name, text in SIZES.items()]
                return 200, {"server_options": {"size": sizes}}
            if (method, path) == ("POST", ""):
                return 200, self._start(body)
            name, _, what = path.partition("/")
            cluster = next((each for each in self.clusters if each.name == name), None)
            if cluster is None or what == "csr":
                return 404, {"message": f"There is no {path}"}
            return 200, self._on_cluster(cluster, method, what, body)

    def _start(self, wanted):
        """As there, a resource has one cluster: who starts it while it runs gets that one."""
        if not self.clusters or self.clusters[-1].closed:
            self.clusters.append(Cluster(self, f"cluster-{len(self.clusters)}", wanted))
        return {"id": self.clusters[-1].name, "status": "ready"}

    @staticmethod
    def _on_cluster(cluster, method, what, body):
        if method == "POST":
            {
                "scale": lambda: cluster.scale(body["n"]),
                "adapt": lambda: cluster.scale(body["minimum"]),
                "close": cluster.close,
            }[what]()
            return {}
        if what == "info":
            return {
                "dashboard_link": "http://127.0.0.1/none",
                "scheduler_address": cluster.address,
            }
        if what == "scheduler_info":
            return {
                "type": "Scheduler",
                "id": cluster.name,
                "address": cluster.address,
                "services": {},
                "workers": {},
            }
        return {"status": "closed" if cluster.closed else "running"}


class Cluster:
    """A scheduler and instances, each of them a nanny with `nprocs` workers."""

    def __init__(self, saturn, name, wanted):
        self.saturn = saturn
        self.name = name
        self.wanted = wanted
        self.closed = False
        self.instances = []
        self._made = 0
        # a short path: sockets lie in it
        self._temporary = tempfile.TemporaryDirectory(prefix="saturn-")
        options = "--host 127.0.0.1 --port 0 --no-dashboard --dashboard-address 127.0.0.1:0"
        self.scheduler = self._run(
            "scheduler",
            "distributed.cli.dask_scheduler",
            *options.split(),
            "--scheduler-file",
            "scheduler.json",
        )
        file = self._place("scheduler") / "scheduler.json"
        # it is not written at once
        wait_until(lambda: file.exists() and file.read_text().endswith("}"))
        self.address = json.loads(file.read_text())["address"]
        self.scale(wanted.get("n_workers") or 0)

    def scale(self, number):
        workers, threads = (self.wanted.get(each) or 1 for each in ("nprocs", "nthreads"))
        options = f"--no-dashboard --nworkers {workers} --nthreads {threads}"
        while len(self.instances) < number:
            module = "distributed.cli.dask_worker"
            words = [self.address, *options.split(), "--local-directory", "local"]
            self.instances.append(self._run(f"instance-{self._made}", module, *words))
            self._made += 1
        while len(self.instances) > number:
            _end(self.instances.pop())

    def close(self):
        self.closed = True
        self.scale(0)
        _end(self.scheduler)
        self._temporary.cleanup()

    def alive(self):
        """Those of its processes that live."""
        pids = [process.pid for process in (self.scheduler, *self.instances)]
        return [pid for pid in pids if is_alive(pid)]

    def _place(self, process):
        return self.saturn.folder / self.name / process

    def _run(self, name, module, *arguments):
        place = self._place(name)
        place.mkdir(parents=True)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "TMPDIR": tempfile.mkdtemp(dir=self._temporary.name),
            "LANG": "C.UTF-8",
        }
        with open(place / "log.txt", "w") as log:
            return subprocess.Popen(
                [*self._elsewhere(), self.saturn.python, "-m", module, *map(str, arguments)],
                cwd=place,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _elsewhere(self):
        if self.saturn.hidden is None or not can_hide():
            return []
        return hiding(self.saturn.hidden)


def _end(process):
    """As an instance ends: all of it at once.

    The ranks of its workers lead sessions of their own, and end with them.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment_without_ddp_common(folder):
    """Make a virtual environment with what is installed here, except for this project.

    Returns the path of its python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    program = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    target = Path(done.stdout.strip())
    for source in {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}:
        for path in Path(source).iterdir():
            is_ours = path.suffix == ".pth" or "ddp_common" in path.name
            if not is_ours and not (target / path.name).exists():
                (target / path.name).symlink_to(path)
    return python
