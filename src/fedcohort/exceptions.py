"""Every error that fedcohort raises on purpose; messages name the culprit, value and remedy."""


class FedcohortError(Exception):
    """Base class of all errors raised on purpose."""


class ConfigError(FedcohortError, ValueError):
    """A configuration key or an option is wrong."""


class DataError(FedcohortError, ValueError):
    """A data file is missing, damaged or of the wrong shape."""


class NoClients(FedcohortError, ValueError):
    """A round was begun without any available client."""


class UnknownClient(FedcohortError, KeyError):
    """A client id that is not registered."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class PolicyError(FedcohortError, RuntimeError):
    """A policy broke its contract."""


class InvalidSketch(FedcohortError, ValueError):
    """A truncated, altered or hostile sketch file."""


class IncompatibleSketches(FedcohortError, ValueError):
    """Sketches of different family, size, seed or preprocessing."""


class BudgetExceeded(FedcohortError, ValueError):
    """A release would overspend the privacy budget."""


class InvalidCheckpoint(FedcohortError, ValueError):
    """A checkpoint that is damaged or belongs to another run."""


class FolderInUse(FedcohortError, RuntimeError):
    """Another process is writing the folder."""
