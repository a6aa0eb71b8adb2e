"""The rank's own process: it lives (`life`), and says its last word (`last_word`).

Forked by its supervisor, which ends it (`worker.supervisor`). Promises: it sends an `Ended`,
whatever the training function has done, unless that has ended the process; everything that was
reported and printed was sent before; on `ASK_WHERE` it says where it is, also while it waits in a
collective. Relies on that to have blocked that and SIGTERM: one that comes early waits.
"""

import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from dask_ranks.messages import Message
from dask_ranks.rank import last_word, whereabouts


def main(
    environment: dict[str, str],
    threads: int,
    payload: bytes,
    *,
    messages: int,
    output: int,
    tables: int | None = None,
    store_socket: int | None = None,
) -> None:
    """Be a rank: from the fork to its last word.

    `environment`: variables to set; `threads`: of torch; `payload`: pickled (function, keyword
    arguments, sources of notebook cells, functions that repeat torch's global settings of the
    client's program). The others are file descriptors: `messages` and `output` are the write ends
    of two pipes to the agent, `tables` is a file with the Dask collections among the arguments
    (`handover`). Rank 0 alone has `store_socket`, on which the ranks' key-value store listens.
    """
    os.setsid()  # a terminal's Ctrl-C is for the client
    _print_into(output)
    # Python's stack alone: the stack of C, which 3.14 adds, is longer than what a message keeps
    without_c = {"c_stack": False} if sys.version_info >= (3, 14) else {}
    faulthandler.enable(**without_c)
    # The fork server ignores SIGINT, workers block it, and programs that the rank starts would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    send = _sender(messages)
    whereabouts.answer_questions(send)
    try:
        # Not at the top: where torch cannot be imported, the client must learn of it.
        from dask_ranks.rank import life

        ended = life.live(environment, threads, payload, tables, store_socket, send)
    except BaseException as error:  # whatever it is: the client must know
        ended = last_word.raised(error)
    last_word.flush()
    send(ended)
    if ended.how == "raised":
        sys.exit(ended.exitcode)


def _print_into(pipe: int) -> None:
    """From now on, what this process and its children print goes into the pipe."""
    for stream in (1, 2):
        os.dup2(pipe, stream)
    os.close(pipe)
    # What UTF-8 cannot write, such as a file's name in another code, is escaped
    writer = functools.partial(
        open, mode="w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    sys.stdout, sys.stderr = writer(1), writer(2)


def _sender(pipe: int) -> Callable[[Message], None]:
    """A function that any thread may call to write a message into the pipe.

    It waits until the pipe has taken all of the message. Raises OSError if nobody reads it.
    """
    connection = Connection(pipe, readable=False)
    one_at_a_time = threading.Lock()

    def send(message: Message) -> None:
        with one_at_a_time:
            connection.send(message)

    return send
