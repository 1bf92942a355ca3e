"""Options of the commands that read tables and spend privacy budgets: ``sketch`` and ``spec``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from fedcohort.privacy.budget import BudgetLedger

DATA, PRIVACY = "What to read", "Privacy"


class Neighbors(StrEnum):
    """Data sets that a private release must not tell apart."""

    added = "add-remove"
    replaced = "replace"


ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Replace files that exist; an input is never replaced."),
]
NullValuesOption = Annotated[
    str | None,
    typer.Option(
        "--null-values",
        help="Comma-separated markers of missing values, besides ?, NA and the empty text.",
        rich_help_panel=DATA,
    ),
]
DelimiterOption = Annotated[
    str | None,
    typer.Option("--delimiter", help="CSV: what separates cells [detected].", rich_help_panel=DATA),
]
DecimalOption = Annotated[
    str | None,
    typer.Option("--decimal", help="CSV: decimal mark [detected].", rich_help_panel=DATA),
]
EncodingOption = Annotated[
    str | None,
    typer.Option("--encoding", help="CSV: encoding, such as cp1252 [UTF-8].", rich_help_panel=DATA),
]
HeaderOption = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="CSV: whether the first row names the columns; without names they are c1, c2, ... "
        "[detected].",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
NeighborsOption = Annotated[
    Neighbors,
    typer.Option(
        "--neighbors", help="A record added or removed, or replaced.", rich_help_panel=PRIVACY
    ),
]
BudgetOption = Annotated[
    Path | None,
    typer.Option(
        "--budget",
        help="Ledger of the holder of the data: adds up all releases, refuses too many.",
        rich_help_panel=PRIVACY,
    ),
]
BudgetEpsilonOption = Annotated[
    float | None,
    typer.Option(
        "--budget-epsilon",
        help="Budget of all releases, for a new ledger.",
        rich_help_panel=PRIVACY,
    ),
]
BudgetDeltaOption = Annotated[
    float,
    typer.Option("--budget-delta", help="Delta of that budget.", rich_help_panel=PRIVACY),
]


def open_ledger(path: Path | None, epsilon: float | None, delta: float) -> BudgetLedger | None:
    """Open the ledger with the budget that it holds, or begin one with the budget given."""
    from fedcohort.files.spec import user_values
    from fedcohort.privacy.budget import BudgetLedger

    if path is None:
        if epsilon is not None:
            raise ConfigError("--budget-epsilon needs --budget")
        return None
    if epsilon is None and not path.exists():
        raise ConfigError(f"--budget {path}: a new ledger needs --budget-epsilon")
    with user_values():
        return BudgetLedger.open(path) if epsilon is None else BudgetLedger(path, epsilon, delta)


def split(names: str | None) -> tuple[str, ...]:
    """Read comma-separated names.

    Examples
    --------
    >>> split("age, height")
    ('age', 'height')
    """
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())
