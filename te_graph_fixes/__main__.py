"""The entry point of ``te-graph-fixes`` and ``python -m te_graph_fixes``."""

import contextlib
import os
import signal
import sys

from .commands import NOT_USABLE
from .text import print_stderr


def main() -> int:
    """Run one command and return its exit status, even if its output cannot be written.

    If ``run --print-env`` fails, print ``exit 1``, which ends the script that passes the output to `eval`.
    """
    status = 1
    try:
        with contextlib.suppress(FileNotFoundError):
            _forget_current_folder()
        status = _start()
        if sys.stdout:  # None if standard output is closed
            sys.stdout.flush()
    except ImportError as error:
        print_stderr(f"te-graph-fixes: {error}")
        status = NOT_USABLE
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so Python's flush at exit does not fail
        status = 1
        if isinstance(error, BrokenPipeError):
            status = 128 + signal.SIGPIPE
        else:
            print_stderr(f"te-graph-fixes: {error}")
    finally:
        if status and sys.argv[1:2] == ["run"] and "--print-env" in sys.argv:
            print("exit 1", flush=True)
    return status


def _forget_current_folder() -> None:
    """Remove the current folder from `sys.path`, unless PYTHONPATH names it.

    Python adds it for ``python -m`` and for empty entries of PYTHONPATH. Files in it could shadow installed modules.
    """
    folder, entries = os.getcwd(), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in map(os.path.realpath, filter(None, entries)):
        first = [entry for entry in sys.path[: 1 + len(entries)] if entry not in ("", folder)]
        sys.path[: 1 + len(entries)] = first


def _start() -> int:
    from .activation import require_wrapt
    from .settings import is_off

    if not is_off():
        require_wrapt()
    if sys.argv[1:2] == ["run"]:  # `run` must start fast, so the other commands are not imported
        from .commands.run import main as run

        return run(sys.argv[2:])
    from .commands.cli import main as others

    return others()


if __name__ == "__main__":
    sys.exit(main())
