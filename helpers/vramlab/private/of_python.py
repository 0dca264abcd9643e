"""Private parts of Python's own library."""

import atexit


def run_exit_functions() -> None:
    """Call what was registered with `atexit`, for a process that ends by `os._exit`."""
    atexit._run_exitfuncs()
