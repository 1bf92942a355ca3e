"""``fedcohort spec``: one spec for all sites, proposed from one table and checked at each site."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli.common import Format, FormatOption, show_facts, show_json
from fedcohort.cli.tables import (
    PRIVACY,
    BudgetDeltaOption,
    BudgetEpsilonOption,
    BudgetOption,
    DecimalOption,
    DelimiterOption,
    EncodingOption,
    ForceOption,
    HeaderOption,
    Neighbors,
    NeighborsOption,
    NullValuesOption,
    open_ledger,
    split,
)
from fedcohort.exceptions import ConfigError, DataError

if TYPE_CHECKING:
    from fedcohort.files.propose import Estimate

app = typer.Typer(
    help="State once how all sites make their sketches.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Data = Annotated[Path, typer.Argument(help="Parquet, CSV or Arrow file, or a folder of them.")]


@app.command("init")
def init(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="The spec, a TOML file.")],
    label: Annotated[str | None, typer.Option(help="Column of classes from 0.")] = None,
    null_values: NullValuesOption = None,
    delimiter: DelimiterOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    header: HeaderOption = None,
    bounds: Annotated[
        str | None,
        typer.Option(
            help="Public ranges of the columns to estimate, such as age=0:120,chol=50:600.",
            rich_help_panel=PRIVACY,
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Estimate centers and scales privately, with this budget for all of them.",
            rich_help_panel=PRIVACY,
        ),
    ] = None,
    neighbors: NeighborsOption = Neighbors.added,
    budget: BudgetOption = None,
    budget_epsilon: BudgetEpsilonOption = None,
    budget_delta: BudgetDeltaOption = 0.0,
    force: ForceOption = False,
) -> None:
    """Propose a spec from one site's table: types and roles of columns, none of their values.

    Centers, scales and levels are left open: they are public constants for people to fill in.
    With --epsilon and --bounds, centers and scales are estimated privately instead.

    Example: `fedcohort spec init patients.csv -o heart.toml`

    Example: `fedcohort spec init patients.csv -o heart.toml --bounds age=0:120 --epsilon 0.5`
    """
    from fedcohort.files import CsvOptions
    from fedcohort.files.propose import estimated_constants, propose_spec
    from fedcohort.files.publish import check_output, writing
    from fedcohort.storage import write_atomically

    check_output(out, [data], force)
    estimate = _estimate(epsilon, bounds, neighbors)
    if estimate is None and budget is not None:
        raise ConfigError("--budget needs --epsilon: without it nothing is spent")
    ledger = open_ledger(budget, budget_epsilon, budget_delta)
    csv, markers = CsvOptions(delimiter, decimal, encoding, header), split(null_values)
    propose_spec(data, label, csv, markers)  # reports what is wrong with the table before paying
    made: Any = nullcontext({})
    if estimate is not None:
        made = estimated_constants(data, estimate, csv, markers, ledger)
    with made as constants, writing(out):
        text = propose_spec(data, label, csv, markers, estimate, constants)
        write_atomically(out, text.encode())
    if estimate is not None:
        typer.echo(estimate.claim() + ("" if ledger else " It is in no ledger: note it."))
    typer.echo(
        f"Wrote {out}. Fill in the constants marked TODO, delete the columns that should not be "
        "compared, and give the file to all sites."
    )


def _estimate(epsilon: float | None, bounds: str | None, neighbors: Neighbors) -> Estimate | None:
    from fedcohort.files.propose import Estimate, read_bounds

    if epsilon is None:
        if bounds is not None:
            raise ConfigError("--bounds needs --epsilon, the budget of the estimation")
        return None
    return Estimate(epsilon, read_bounds(bounds), neighbors.value)


@app.command("check")
def check(
    data: Data,
    spec: Annotated[Path, typer.Option(help="The spec to check against.")],
    delimiter: DelimiterOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    header: HeaderOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Tell a site what does not fit the spec, before anything leaves.

    Example: `fedcohort spec check data.csv --spec heart.toml`
    """
    from fedcohort.files import CsvOptions
    from fedcohort.files.propose import check_data
    from fedcohort.files.spec import load_spec

    found = check_data(data, load_spec(spec), CsvOptions(delimiter, decimal, encoding, header))
    if format is Format.json:
        show_json(found)
    else:
        show_facts(found.facts(), f"{data} and {spec}")
    if found.problems:
        raise DataError(f"{data} does not fit {spec}: {'; '.join(found.problems)}")
