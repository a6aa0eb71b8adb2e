"""Another user of this host, who tries everything at the ports of a run. Only root can be one."""

import contextlib
import os
import subprocess
import sys

import psutil

NOBODY = 65534

# What a stranger sends: keys of torch's own store that would stop a run, gloo's numbers of a
# connection, a pickle, noise.
IMPORTS = "import socket, struct, sys, os, time"
ATTACK = r"""
pickle = b"\x80\x04cposix\nsystem\n(V" + f"touch {sys.argv[1]}".encode() + b"\ntR."
VALIDATE, SET = b"\x00", b"\x01"  # of torch's TCPStore
torch_store = VALIDATE + struct.pack("=I", 0x3C85F7CE)
for key in (b"/stop/wanted", b"/stop/before"):
    torch_store += SET + struct.pack("=Q", len(key)) + key + struct.pack("=Q", 1) + b"1"
of_gloo = [struct.pack("=q", n) + pickle for n in range(4)]
said = [b"", torch_store, pickle, os.urandom(5000), b"ddp-store-1\n" + bytes(200), *of_gloo]
kept = []
for port in map(int, sys.argv[2:]):
    answered = b""
    for words in said:
        try:
            end = socket.create_connection(("127.0.0.1", port), timeout=0.5)
            end.sendall(words)
            kept.append(end)
            end.settimeout(0.2)
            answered += end.recv(1000)
        except OSError:
            continue
    print(port, len(kept), answered.hex(), flush=True)
time.sleep(1)
"""


BECOME_NOBODY = f"""
import os, encodings.idna, traceback, linecache
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
os.environ["HOME"] = "/nonexistent"
"""


def as_nobody(code, *arguments, imports="", **variables):
    """Run Python code as another user; returns what it printed.

    It has its interpreter from root: another user may not reach that.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}\n{BECOME_NOBODY}\n{code}", *map(str, arguments)],
        text=True,
        env={**kept, **variables},
        capture_output=True,
        timeout=200,
    )
    return done.stdout + done.stderr


def ports_of(pids):
    """Where these processes listen."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found |= {
                entry.laddr.port
                for entry in psutil.Process(pid).net_connections("tcp")
                if entry.status == psutil.CONN_LISTEN
            }
    return sorted(found)
