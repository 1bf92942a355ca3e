"""A process that does the work of a job, and kills itself at a chosen moment of danger."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import sys
from multiprocessing import get_context

LIMIT = 300  # seconds that one process may take
FORK = get_context("fork")
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}


def watch(folder, moments, last, tear):
    """Count the moments in which this process touches files of a folder; end it at the last one.

    `moments` are shared: those so far, and those in which written data are about to be synced. It
    ends at moment `last` (0 for never), or at that sync, whose file it cuts where `tear` draws.
    """
    inside, synced, sync, connect = os.fspath(folder), {}, os.fsync, sqlite3.connect

    def moment():
        moments[0] += 1
        if moments[0] == last and tear is None:
            os.killpg(0, signal.SIGKILL)

    def hook(event, arguments):
        reads = event == "open" and not arguments[2] & os.O_ACCMODE
        if event in FILE_EVENTS and not reads and not isinstance(arguments[0], int):
            path = os.fsdecode(arguments[0])
            if path.startswith(inside):
                if event == "open" and os.path.isfile(path):
                    about = os.stat(path)
                    synced.setdefault(about.st_ino, about.st_size)
                moment()
        elif event == "fcntl.flock":
            moment()

    def traced(*arguments, **options):
        made = connect(*arguments, **options)
        made.set_trace_callback(lambda statement: moment())
        return made

    def counted_sync(handle):
        moment()
        about = os.fstat(handle)
        low = synced.get(about.st_ino, 0)
        if stat.S_ISREG(about.st_mode) and low < about.st_size:
            moments[1] += 1
            if moments[1] == last and tear is not None:
                os.ftruncate(handle, tear.randrange(low, about.st_size))
                os.killpg(0, signal.SIGKILL)
        sync(handle)
        synced[about.st_ino] = about.st_size
        moment()

    os.fsync, sqlite3.connect = counted_sync, traced
    sys.addaudithook(hook)


def enter(job, inputs, folder, moments, last, tear):
    """Do the work of a job; this runs in a process of its own."""
    os.setsid()
    log = folder.with_suffix(".log").open("w")
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout = sys.stderr = log
    sys.argv = ["fedcohort", *map(str, job.arguments(inputs, folder))]
    watch(folder, moments, last, tear)
    exec(compile(job.script, "job", "exec"), {"__name__": "__main__"})


class Process:
    """A process that does the work of a job, and ends itself at its `last` moment."""

    def __init__(self, job, inputs, folder, last=0, tear=None):
        self.log, self.moments = folder.with_suffix(".log"), FORK.RawArray("q", 2)
        arguments = job, inputs, folder, self.moments, last, tear
        self.process = FORK.Process(target=enter, args=arguments)
        self.process.start()

    def killed(self, after=LIMIT):
        """Wait; return whether the process was killed, at the latest after some seconds."""
        self.process.join(after)
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.join()
        return self.process.exitcode == -signal.SIGKILL

    def finish(self):
        """Wait for the end of a process that nobody kills."""
        self.killed()
        if self.process.exitcode != 0:
            output = self.log.read_text(errors="replace")[-2000:]
            raise AssertionError(f"exit status {self.process.exitcode}: {output}")
