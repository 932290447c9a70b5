"""The one exception that users see, and the exit codes of the command line."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USER = 2
EXIT_LOCKED = 3
EXIT_STALE = 4
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """A mistake that the user can mend: the message is one line naming the file, row or key and the mend."""

    exit_code = EXIT_USER


class StageFailed(UserError):
    """A stage could not finish for a reason outside the configuration (an engine died, a disk is full)."""

    exit_code = EXIT_FAILED


class Locked(UserError):
    """Another live process is writing here."""

    exit_code = EXIT_LOCKED


class Stale(UserError):
    """Committed artifacts were made with other values than the pipeline names now."""

    exit_code = EXIT_STALE


class Interrupted(UserError):
    """The user or the scheduler asked to stop; everything committed so far is kept."""

    exit_code = EXIT_INTERRUPTED


def first_line(error: BaseException) -> str:
    """The first line of an exception's text that says something, or its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
