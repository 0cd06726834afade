"""The one exception for bad input; and how to know a want of memory."""


class InputError(ValueError):
    """Something the user gave us is wrong: a file, a key, a checkpoint.

    The message is one sentence that names the thing and says what to do. The scripts print it without a
    traceback and exit with STOP, which the restart loop does not retry.
    """


def is_out_of_memory(error):
    """Whether an exception says that memory could not be had: Python's and numpy's own, and torch's on any device."""
    said = str(error)
    return isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(
        words in said for words in ("out of memory", "can't allocate memory", "not enough memory"))


def first_line(error):
    """What an exception says, as one line: torch adds whole stacks. Of one that says nothing, its name."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def attempt(what, function, *args):
    """What a function returns; or, where its input cannot be used or memory is too small, the sentence that says so.

    what: the name of the input. Other exceptions are raised as they are.
    """
    try:
        return function(*args)
    except InputError as error:
        return str(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return (f"{what}: there is not enough memory ({first_line(error)}); use a smaller volume, fewer workers, or a "
                "device or machine with more.")


DONE = 0
PLANNED_RESTART = 42
STOP = 43
