"""Every error a user can meet; each message says what happened, the value seen and what to do."""

import difflib
from collections.abc import Iterable


class NemotritonError(Exception):
    """Base of all errors raised on purpose by nemotriton."""


class ConfigError(NemotritonError):
    """A configuration key is missing, contradictory or impossible."""


class CheckpointError(NemotritonError):
    """A checkpoint has missing, unknown, misshaped or corrupt tensors."""


class CapacityError(NemotritonError):
    """The work asked for does not fit the memory there is."""


class RequestError(NemotritonError):
    """A request's prompt or sampling parameters cannot be served."""


class UnsupportedError(NemotritonError):
    """A shape, dtype or feature that this build or this device cannot do."""


class RankError(NemotritonError):
    """A process of a run on several GPUs has failed, has gone, or runs something else."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like one that is not known, if any is."""
    return next(iter(difflib.get_close_matches(name, [*known], 1)), None)


def require(condition: bool, message: str, error: type[NemotritonError] = UnsupportedError) -> None:
    """Raise `error` with `message` unless `condition` holds."""
    if not condition:
        raise error(message)
