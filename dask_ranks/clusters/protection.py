"""What keeps other users of this host, and of its network, out of a cluster that `connect` starts.

Dask runs whatever code reaches its scheduler or a worker, on 127.0.0.1 as well as on a network,
and its dashboard shows to anybody who asks what runs. Relies on the scheduler running in this
process, as that of local clusters and of jobs does. Promises: every connection is TLS with a key
of this one cluster, the dashboard has a secret in its address, and what workers write is in a
folder that only their user can read.
"""

import functools
import hmac
import multiprocessing.spawn
import os
import secrets
import ssl
import stat
import tempfile
from pathlib import Path
from typing import Any

from distributed import Scheduler, SpecCluster
from distributed.security import Security
from distributed.utils import format_dashboard_link
from tornado import web

from dask_ranks.worker.plugin import allow_ends_without_notice

SECRET_BYTES = 16  # of the dashboard's address
DASK_WORKER = "Dask Worker process"  # what Dask's nanny calls the processes that it starts


class Credentials(Security):
    """Dask's `Security`, whose connections may end without notice."""

    def _get_tls_context(self, *arguments: Any) -> ssl.SSLContext | None:
        """For connections that are made, and for those that are accepted."""
        context = super()._get_tls_context(*arguments)
        allow_ends_without_notice(context)
        return context


def credentials() -> Security:
    """A `Security` with a new key and certificate, in memory alone.

    Whoever has them may connect, nobody else. What the user's Dask settings say of TLS is meant
    for other clusters, and ignored.
    """
    return Credentials.temporary(
        tls_ciphers=None, tls_min_version=ssl.TLSVersion.TLSv1_3, tls_max_version=None
    )


class PrivateScheduler(Scheduler):
    """Dask's scheduler, whose web server answers only below `/<http_prefix>/`.

    This covers the dashboard, and everything else that tells of tasks and workers. Dask does not
    learn of the prefix: its pages then name what they load by relative addresses, and so work
    behind a proxy, too.
    """

    def __init__(self, *arguments: Any, http_prefix: str, **options: Any):
        self.dashboard_prefix = http_prefix.strip("/")
        super().__init__(*arguments, **options)

    def start_http_server(self, *arguments: Any, **options: Any) -> None:
        super().start_http_server(*arguments, **options)
        application = self.http_application
        find_handler = application.find_handler

        def find_handler_if_invited(request: Any, **options: Any) -> Any:
            prefix, _, page = request.path.lstrip("/").partition("/")
            if hmac.compare_digest(prefix.encode(), self.dashboard_prefix.encode()):
                request.path = f"/{page}"
                return find_handler(request, **options)
            return application.get_handler_delegate(
                request, web.ErrorHandler, {"status_code": 404}
            )

        application.find_handler = find_handler_if_invited


class PrivateDashboard:
    """Before a `SpecCluster` among the bases, it has it start a `PrivateScheduler`.

    A scheduler that is not Dask's own stays as it is.
    """

    # Both are of the `SpecCluster` behind it.
    scheduler: Any
    scheduler_spec: dict | None

    async def _start(self) -> None:
        spec = self.scheduler_spec
        if self.scheduler is None and spec is not None and spec["cls"] is Scheduler:
            secret = secrets.token_urlsafe(SECRET_BYTES)
            options = {"http_prefix": secret, **spec["options"]}
            self.scheduler_spec = {**spec, "cls": PrivateScheduler, "options": options}
        await super()._start()  # type: ignore[misc]  # the same

    @property
    def dashboard_link(self) -> str:
        """The address of the dashboard on this host, with its secret behind the port.

        Dask's setting `distributed.dashboard.link` may lead through a proxy.
        """
        link = super().dashboard_link  # type: ignore[misc]  # the `SpecCluster` has it
        prefix = getattr(self.scheduler, "dashboard_prefix", "")
        if not prefix or not link:
            return link
        port = self.scheduler_info["services"]["dashboard"]  # type: ignore[attr-defined]
        return format_dashboard_link("127.0.0.1", f"{port}/{prefix}")


def private(cls: type) -> type:
    """The cluster class with a `PrivateDashboard`.

    The class itself if it does not start its scheduler as Dask's own do, in this process.
    """
    if getattr(cls, "_start", None) is not SpecCluster._start:  # Saturn's, say
        return cls
    return type(cls.__name__, (PrivateDashboard, cls), {"__module__": cls.__module__})


def private_folder() -> str:
    """A folder for temporary files that belongs to this user, who alone may look into it.

    It is always the same, unless somebody else has taken its name. Dask's own,
    /tmp/dask-scratch-space, may have been made by somebody else. It comes first where Python
    looks for modules, also in this program, so that its owner could have code run here.
    """
    path = Path(tempfile.gettempdir()) / f"ddp-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=False)
    except FileExistsError:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return tempfile.mkdtemp(prefix="ddp-")
        path.chmod(0o700)
    return str(path)


@functools.cache  # once is enough
def keep_scripts_out_of_workers() -> None:
    """From now on Dask's worker processes do not run the user's script again.

    `multiprocessing` has every process that it spawns import the script, without which it could
    not find functions of `__main__`. Dask sends these by value, so nothing needs it; and with a
    script without `if __name__ == "__main__":` each worker would start a cluster.
    """
    prepare = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict:
        data = prepare(name)
        if name.startswith(DASK_WORKER):
            data.pop("init_main_from_path", None)
            data.pop("init_main_from_name", None)
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data
