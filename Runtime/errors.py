"""The one exception for bad input."""


class InputError(ValueError):
    """Something the user gave us is wrong: a file, a key, a checkpoint.

    The message is one sentence that names the thing and says what to do. The scripts print it without a
    traceback and exit with STOP, which the restart loop does not retry.
    """


DONE = 0
PLANNED_RESTART = 42
STOP = 43
