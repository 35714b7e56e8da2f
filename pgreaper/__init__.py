"""
pgreaper: every overdue hold of your own Postgres tables expires once.

The decisions are made by SQL functions in schema ``pgreaper``; this package
installs them, calls them and shows what they did.  Importing it is cheap: the
public names below are loaded when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgreaper.api import Reaper
    from pgreaper.errors import (
        AccessDenied,
        DatabaseBusy,
        DatabaseUnavailable,
        InvalidInput,
        LeaseLost,
        NotInstalled,
        QueryCancelled,
        ReaperError,
        RegistrationRefused,
        UnknownPolicy,
        UntrustedSchema,
        VersionMismatch,
        WrongTransaction,
    )

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "DatabaseBusy",
    "DatabaseUnavailable",
    "InvalidInput",
    "LeaseLost",
    "NotInstalled",
    "QueryCancelled",
    "Reaper",
    "ReaperError",
    "RegistrationRefused",
    "UnknownPolicy",
    "UntrustedSchema",
    "VersionMismatch",
    "WrongTransaction",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "pgreaper.api" if name == "Reaper" else "pgreaper.errors"
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
