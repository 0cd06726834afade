"""Tasks on several processes of one machine. The processes never outlive the one that started them. Needs no torch."""
import concurrent.futures
import contextlib
import errno
import multiprocessing
import os
import queue
import signal
import sys
import threading
from concurrent.futures.process import BrokenProcessPool

from tqdm import tqdm

from Runtime.errors import InputError, Unbreakable, keep_freed_memory, take_all_names

POLL_S = 0.3
WORKER = {}  # in each process: its function
MOST_ON_WINDOWS = 61  # processes of a pool


def run_tasks(function, tasks, workers, what, begin=None, arguments=(), meanwhile=None):
    """Yield (task, function(*task)) in the order in which the tasks end.

    function, begin: module-level functions, since new processes import them; what a functools.partial holds is sent to
    each process once. tasks: list of tuples of plain data.
    workers: number of processes, at most one per task. what: beginning of the error, such as the results folder.
    begin(*arguments) is called once in each process before its first task. meanwhile() is called here about three
    times a second while tasks run.
    Raises InputError if a process was killed, ended or ran out of memory, and whatever a task raises.
    """
    processes = min(workers, len(tasks), MOST_ON_WINDOWS if os.name == "nt" else workers)
    context = multiprocessing.get_context("spawn")
    with starts_processes(what):
        pool = concurrent.futures.ProcessPoolExecutor(processes, context, _begin, (function, begin, arguments))
    ended = queue.SimpleQueue()  # to wait for all of thousands of futures takes long after each
    waiting = None  # until all processes have been started
    try:
        with starts_processes(what):
            waiting = {pool.submit(_do, task): task for task in tasks}
        for future in waiting:
            future.add_done_callback(ended.put)
        while waiting:
            future = None
            with contextlib.suppress(queue.Empty):
                future = ended.get(timeout=POLL_S)
            if meanwhile:
                meanwhile()
            if future:
                yield waiting.pop(future), future.result()
    except (BrokenProcessPool, MemoryError):
        started = list((pool._processes or {}).values())
        for process in started:
            process.kill()
        pool.shutdown(wait=True, cancel_futures=True)  # then each has its exit code, negative after a signal
        if status := next((process.exitcode for process in started if (process.exitcode or 0) > 0), None):
            raise InputError(f"{what}: a worker process ended with exit status {status}; the lines above may say why. "
                             "Run the same command again, and it continues where it stopped.") from None
        way = f"with fewer --workers than {processes}" if processes > 1 else "on a machine with more memory"
        raise InputError(f"{what}: a worker process was killed, most likely because memory ran out; run the same "
                         f"command again {way}, and it continues where it stopped.") from None
    finally:
        # After Ctrl-C or an error the tasks that have begun end at once: their results would be lost.
        for process in list((pool._processes or {}).values()) if waiting != {} else ():
            process.kill()
        # Without processes the pool's thread may not have been started, and cannot be waited for.
        pool.shutdown(wait=waiting is not None, cancel_futures=True)


def shared_counter(what):
    """A number that processes share, 0 at first. what: beginning of the error, such as the results folder."""
    with starts_processes(what):
        return multiprocessing.get_context("spawn").Value("q", 0)


@contextlib.contextmanager
def starts_processes(what, fewer="give fewer --workers"):
    """Context for starting processes and threads, and for making semaphores, which Linux keeps in /dev/shm: an OSError
    becomes an InputError about those, not about the results folder. fewer: how to do with fewer processes."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) in (errno.EAGAIN, errno.ENOMEM) or "can't start new thread" in str(error):
            raise InputError(f"{what}: no more worker processes can be started ({reason}); {fewer}, or raise the "
                             "limit of this user (ulimit -u) or container.") from None
        if isinstance(error, (RuntimeError, ConnectionError)) or error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise InputError(f"{what}: no worker processes can be started ({reason}); they need /dev/shm, a "
                         "writable folder in memory with free space: mount a tmpfs there.") from error


def _begin(function, begin, arguments):
    """Set up a new process: it ignores Ctrl-C, ends with its parent, keeps freed memory and survives a full log."""
    WORKER["function"] = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    keep_freed_memory()
    take_all_names()
    sys.stdout, sys.stderr = map(Unbreakable, (sys.stdout, sys.stderr))
    tqdm.set_lock(threading.RLock())  # instead of a semaphore, of which Python says that a killed process leaks it
    if begin:
        begin(*arguments)


def _do(task):
    return WORKER["function"](*task)


def _end_with_parent():
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has the latter, which kills
