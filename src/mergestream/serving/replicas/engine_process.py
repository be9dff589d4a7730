"""One engine in a process of its own on this machine: it computes and logs while the service's process talks HTTP.

A process that dies is started again at the next status call and continues from its folder and its log. It dies with
the service: nobody would send an answer.
Run as: python -m mergestream.serving.replicas.engine_process CONNECTION CONNECTION …
"""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from mergestream.runtime.errors import WorkerError
from mergestream.serving.log_lines import log_to_stderr
from mergestream.serving.options import ServeOptions
from mergestream.serving.replicas.replica import Replica, ReplicaGone, Reply

COMMAND = [sys.executable, "-m", "mergestream.serving.replicas.engine_process"]
log = logging.getLogger(__name__)


class EngineProcess:
    """The process with one connection per call that may be in progress, as a handle for `ReplicatedEngine`."""

    def __init__(self, options: ServeOptions, calls: int) -> None:
        self._options, self._calls, self._lock = options, calls, threading.Lock()
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._own_core = self._cores[os.getpid() % len(self._cores)] if self._cores else 0  # the same after a restart
        self._start()

    def _start(self) -> None:
        (self._first, _), *others = pairs = [Pipe() for _ in range(1 + self._calls)]
        theirs = [their.fileno() for _, their in pairs]
        self._process = subprocess.Popen([*COMMAND, *map(str, theirs)], pass_fds=theirs)  # noqa: S603
        for _, their in pairs:
            their.close()
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        for own, _ in others:
            self._idle.put(own)
        self._first.send(self._options)
        self._give_a_core()

    def _give_a_core(self) -> None:
        """One core for the engine, the others for the rest of the service, where PyTorch computes with one thread.

        The engine's threads share one interpreter; on two cores they would hand it back and forth.
        """
        if len(self._cores) > 1 and torch.get_num_threads() == 1:
            os.sched_setaffinity(self._process.pid, {self._own_core})
            for thread in Path("/proc/self/task").iterdir():  # later ones, and decoding processes, inherit it
                with contextlib.suppress(OSError):  # it has ended
                    os.sched_setaffinity(int(thread.name), {*self._cores} - {self._own_core})

    def call(self, method: str, *arguments: Any, **options: Any) -> Reply:
        with self._lock:
            if method == "status" and self._process.poll() is not None:
                log.error("the engine's process ended with %d and is started again", self._process.returncode)
                self._start()
            process, idle = self._process, self._idle
        connection = idle.get()
        try:
            connection.send((method, arguments, options))
            reply: Reply | Exception = connection.recv()
        except (OSError, EOFError) as error:
            process.wait()
            raise ReplicaGone("its process ended") from error
        finally:
            idle.put(connection)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        """Close the engine and wait for the end of the process: the next one needs its locks."""
        with contextlib.suppress(OSError):
            self._first.send("close")
        self._process.wait()


def main(*descriptors: int) -> None:
    """Open the engine, answer calls until the service closes it, and die at once if the service dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # those are for the service, which finishes accepted work
        signal.signal(number, signal.SIG_IGN)
    connections: list[Connection[Any, Any]] = [Connection(each) for each in descriptors]
    first, *others = connections
    options: ServeOptions = first.recv()
    log_to_stderr(as_json=options.json_log)
    replica = Replica(options, None)
    gc.collect()
    gc.freeze()
    for connection in others:
        threading.Thread(target=_serve, args=(replica, connection), daemon=True).start()
    try:
        first.recv()
    except EOFError:
        os._exit(1)  # as the service's own threads would have ended
    replica.close()


def _serve(replica: Replica, connection: Connection) -> None:
    while True:
        try:
            method, arguments, options = connection.recv()
        except EOFError:
            return
        reply: Reply | Exception
        try:
            reply = replica.call(method, *arguments, **options)
        except Exception as error:  # a bug: logged without its message, which may quote what a client sent
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s failed: %s\n%s", method, type(error).__name__, where)
            reply = WorkerError(f"The engine failed: {type(error).__name__}.")
        connection.send(reply)
        if isinstance(reply, Reply) and reply.status is None:  # it could not be opened: the next one tries again
            os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
