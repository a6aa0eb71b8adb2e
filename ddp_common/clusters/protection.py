"""What keeps other users of this host, and of its network, out of a cluster that `connect` starts.

Dask runs whatever code reaches its scheduler or a worker, on 127.0.0.1 as well as on a network, and its dashboard shows whoever asks what
runs. So every connection is TLS with a key of this one cluster, the dashboard has a secret in its address, and what workers write lies in
a folder of their user's alone. Relies on the scheduler running in this process, as that of local clusters and of jobs does.
"""

import datetime
import hmac
import multiprocessing.spawn
import os
import secrets
import ssl
import stat
import tempfile
from pathlib import Path

import dask
from distributed import Scheduler, SpecCluster
from distributed.security import Security
from tornado import web

VALID = datetime.timedelta(days=365)  # nobody's clock is so wrong, and no cluster so old
ROLES = ("client", "scheduler", "worker")
SECRET_BYTES = 16  # of the dashboard's address
DASK_WORKER = "Dask Worker process"  # how Dask's nanny calls the processes that it starts


def credentials():
    """A `Security` with a new key and certificate, which exist in memory alone: who has them may connect, nobody else.

    The key is of an elliptic curve: made and used in a millisecond, where Dask's own `Security.temporary` takes RSA, some 0.1 s to make
    and several for all connections of a cluster. What the user's Dask settings say of TLS is meant for other clusters.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    made = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ddp_common")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(made.public_key())
    )
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - VALID).not_valid_after(now + VALID)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    cert = builder.sign(made, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    key = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return Security(
        require_encryption=True,
        tls_ca_file=cert,
        tls_ciphers=None,
        tls_min_version=ssl.TLSVersion.TLSv1_3,
        tls_max_version=None,
        **{f"tls_{role}_key": key for role in ROLES},
        **{f"tls_{role}_cert": cert for role in ROLES},
    )


def write_credentials(security, folder):
    """Put the certificate and the key of `credentials` into a folder, as cert.pem and key.pem that their user alone can read."""
    for name, content in (
        ("cert.pem", security.tls_ca_file),
        ("key.pem", security.tls_worker_key),
    ):
        with open(
            os.open(Path(folder) / name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w"
        ) as file:
            file.write(content)


class PrivateScheduler(Scheduler):
    """Dask's scheduler, whose web server answers only below `/<http_prefix>/`: the dashboard, and all that tells of tasks and workers."""

    def __init__(self, *arguments, http_prefix, **options):
        self.dashboard_prefix = http_prefix.strip("/")
        super().__init__(*arguments, http_prefix=http_prefix, **options)

    def start_http_server(self, *arguments, **options):
        super().start_http_server(*arguments, **options)
        application = self.http_application
        find_handler = application.find_handler

        def find_handler_if_invited(request, **options):
            said = request.path.lstrip("/").partition("/")[0]
            if hmac.compare_digest(said.encode(), self.dashboard_prefix.encode()):
                return find_handler(request, **options)
            return application.get_handler_delegate(request, NothingHere)

        application.find_handler = find_handler_if_invited


class NothingHere(web.RequestHandler):
    """The answer to whoever does not know the secret; the same for every address and method."""

    def prepare(self):
        self.set_status(404)
        self.finish(
            "Nothing here. The address of the dashboard has a secret in it: `client.dashboard_link`.\n"
        )


class PrivateDashboard:
    """Comes before a `SpecCluster` among the bases: its scheduler is then a `PrivateScheduler`, unless it is no scheduler of Dask's own."""

    async def _start(self):
        spec = self.scheduler_spec
        if self.scheduler is None and spec is not None and spec["cls"] is Scheduler:
            secret = secrets.token_urlsafe(SECRET_BYTES)
            options = {"http_prefix": secret, **scratch_option(), **spec["options"]}
            self.scheduler_spec = {**spec, "cls": PrivateScheduler, "options": options}
        await super()._start()

    @property
    def dashboard_link(self):
        """The address of the dashboard, with its secret."""
        link, prefix = super().dashboard_link, getattr(self.scheduler, "dashboard_prefix", "")
        return (
            link.removesuffix("status") + f"{prefix}/status"
            if prefix and link.endswith("/status")
            else link
        )


def private(cls):
    """A cluster class, with a `PrivateDashboard` where it starts its scheduler as Dask's own do, in this process."""
    starts_as_dask_does = (
        isinstance(cls, type) and getattr(cls, "_start", None) is SpecCluster._start
    )
    if not starts_as_dask_does:  # Saturn's, say
        return cls
    return type(cls.__name__, (PrivateDashboard, cls), {"__module__": cls.__module__})


def scratch_option():
    """Keyword argument of Dask's scheduler and workers: where to put temporary files, unless Dask's settings say it."""
    return (
        {"local_directory": private_folder()}
        if dask.config.get("temporary-directory") is None
        else {}
    )


def private_folder():
    """A folder for temporary files that belongs to this user, who alone may look into it: always the same, if it can be had.

    Dask's own, /tmp/dask-scratch-space, may have been made by somebody else. It comes first where Python looks for modules, also in
    this program, so that whoever owns it could have code run here.
    """
    path = Path(tempfile.gettempdir()) / f"ddp-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=False)
    except FileExistsError:
        there = path.lstat()
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
            return tempfile.mkdtemp(prefix="ddp-")
        path.chmod(0o700)
    return str(path)


PRIVATE_FOLDER_IN_A_JOB = (  # the same in a job's script
    'export DASK_TEMPORARY_DIRECTORY="${DASK_TEMPORARY_DIRECTORY:-$(umask 077; own="${TMPDIR:-/tmp}/ddp-$(id -u)"; mkdir "$own" 2>/dev/null; '
    '[ -d "$own" -a -O "$own" -a ! -L "$own" ] && chmod 700 "$own" && echo "$own" || mktemp -d)}"'
)


def keep_scripts_out_of_workers():
    """From now on Dask's worker processes do not run the user's script again.

    `multiprocessing` has every process that it spawns import the script, without which it could not find functions of `__main__`. Dask
    sends these by value. So nothing needs it, and a script without `if __name__ == "__main__":` would have each worker start a cluster.
    """
    prepare = multiprocessing.spawn.get_preparation_data
    if getattr(prepare, "keeps_scripts_out", False):
        return

    def get_preparation_data(name):
        data = prepare(name)
        if name.startswith(DASK_WORKER):
            data.pop("init_main_from_path", None)
            data.pop("init_main_from_name", None)
        return data

    get_preparation_data.keeps_scripts_out = True
    multiprocessing.spawn.get_preparation_data = get_preparation_data
