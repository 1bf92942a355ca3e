"""Every error that fedcohort raises on purpose.

::

    FedcohortError
    ├── ConfigError          a configuration key or an option is wrong        (ValueError)
    ├── DataError            a data file is missing, damaged or misshapen     (ValueError)
    ├── NoClients            a round without any available client             (ValueError)
    ├── UnknownClient        a client id that is not registered                (KeyError)
    ├── PolicyError          a policy broke its contract                      (RuntimeError)
    ├── InvalidSketch        a truncated, altered or hostile sketch file      (ValueError)
    ├── IncompatibleSketches sketches that must not be compared or merged     (ValueError)
    ├── BudgetExceeded       a release would overspend the privacy budget     (ValueError)
    ├── InvalidCheckpoint    a checkpoint that is damaged or of another run   (ValueError)
    └── FolderInUse          another process is writing the folder            (RuntimeError)

Each message names the culprit, its value and, where there is one, the remedy.
"""

from __future__ import annotations


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
