"""The exit codes, as listed in `fxskip.cli` and in `fxskip --help`."""

from enum import IntEnum

from fxskip.errors import CacheError, CaptureError, CheckpointError, FxskipError, PassError, ScheduleError


class ExitCode(IntEnum):
    FINE = 0
    NOT_INTACT = 1
    USAGE = 2
    MODEL = 3
    FILES = 4
    DEFECT = 70


def exit_code_of(error: FxskipError) -> ExitCode:
    if isinstance(error, CaptureError | PassError | ScheduleError):
        return ExitCode.MODEL
    if isinstance(error, CheckpointError | CacheError):
        return ExitCode.FILES
    return ExitCode.USAGE  # SpecError, and the plain errors about arguments and data
