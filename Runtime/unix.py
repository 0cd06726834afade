"""Imported first by programs that need file locks; on a system without them, one sentence and exit code 43."""
import importlib.util
import sys

if importlib.util.find_spec("fcntl") is None:  # Windows, where the other programs run
    sys.stderr.write("error: preparing, training and exporting need the file locks of Linux or macOS: on Windows use "
                     "WSL 2; OM_register.py, OM_study.py, OM_augment.py and OM_evaluate.py also run without it.\n")
    sys.exit(43)
