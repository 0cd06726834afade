"""Modules that keep a run alive. Every program imports this first; an outdated Python gets one sentence and exits."""
import os
import sys

__version__ = "1.13.5"  # results of another version are made again: raise it when results change
PROCESS = os.getpid()  # of the process that imported this; a forked one has another PID
OLDEST = (3, 11)

if sys.version_info < OLDEST:
    # Must parse under Python 3.6, which clusters still call python3.
    sys.stderr.write("error: Python %d.%d or newer is needed, and %s is %d.%d: use .venv/bin/python, which `make venv "
                     "PYTHON=python3.11` sets up.\n" % (OLDEST + (sys.executable,) + tuple(sys.version_info[:2])))
    sys.exit(43)
