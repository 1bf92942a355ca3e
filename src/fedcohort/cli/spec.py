"""``fedcohort spec``: one spec for all sites, proposed from one table and checked at each site."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcohort.cli.common import ForceOption, FormatOption, argument, option, show
from fedcohort.cli.sketch import (
    FILES,
    BudgetDeltaOption,
    BudgetEpsilonOption,
    BudgetOption,
    CsvOption,
    NullValuesOption,
    SiteOption,
    TableOption,
    csv_options,
    open_ledger,
    privacy,
    split,
)
from fedcohort.exceptions import ConfigError, DataError

app = typer.Typer(
    help="State once how all sites make their sketches.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Data = Annotated[str, argument(f"{FILES}, or - for CSV from standard input.")]


@app.command("init")
def init(
    data: Data,
    out: Annotated[Path, option("The spec, a TOML file.", "--out", "-o")],
    label: Annotated[str | None, option("Column of classes from 0.")] = None,
    null_values: NullValuesOption = None,
    csv: CsvOption = None,
    table: TableOption = None,
    bounds: Annotated[
        str | None,
        privacy("Public ranges of the columns to estimate, such as age=0:120,chol=50:600."),
    ] = None,
    epsilon: Annotated[
        float | None,
        privacy("Estimate centers and scales privately, with this budget for all of them."),
    ] = None,
    budget: BudgetOption = None,
    budget_epsilon: BudgetEpsilonOption = None,
    budget_delta: BudgetDeltaOption = 0.0,
    force: ForceOption = False,
) -> None:
    """Propose a spec from one site's table: types and roles of columns, none of their values.

    Centers, scales and levels are left open: they are public constants for people to fill in.
    With `--epsilon` and `--bounds`, centers and scales are estimated with differential privacy, and
    no other column is looked at.

    Example: `fedcohort spec init data.csv --label num -o heart.toml`

    Example: `fedcohort spec init data.csv -o heart.toml --bounds age=0:120 --epsilon 0.5`
    """
    from fedcohort.files.propose import Estimate, estimated_constants, propose_spec, read_bounds
    from fedcohort.files.sketching import check_output
    from fedcohort.files.source import NULL_VALUES, Want, local_copy
    from fedcohort.storage import write_atomically

    check_output(out, [Path(data)], force)
    if epsilon is None and (bounds is not None or budget is not None):
        raise ConfigError("--bounds and --budget need --epsilon, the budget of the estimation")
    estimate = None if epsilon is None else Estimate(epsilon, read_bounds(bounds))
    ledger = open_ledger(budget, budget_epsilon, budget_delta)
    markers = (*NULL_VALUES, *split(null_values))
    path = local_copy(data)
    want = Want(null_values=markers, csv=csv_options(csv), table=table)
    propose_spec(path, label, want, estimate)  # reports what is wrong before anything is paid
    estimated: Any = nullcontext({})
    if estimate is not None:
        estimated = estimated_constants(path, estimate, want, ledger)
    with estimated as constants:
        proposal, left_open = propose_spec(path, label, want, estimate, constants)
        write_atomically(out, proposal.encode())
    if estimate is not None:
        typer.echo(estimate.claim() + ("" if ledger else " It is in no ledger: note it."))
    todo = ", ".join(left_open)
    typer.echo(
        f"Wrote {out}. " + (f"Fill in the public constants of {todo}. " if todo else "") + "Delete "
        "the columns that should not be compared, and give the file to all sites."
    )


@app.command("check")
def check(
    data: Data,
    spec: Annotated[Path, option("The spec to check against.")],
    site: SiteOption = None,
    csv: CsvOption = None,
    table: TableOption = None,
    format: FormatOption = "table",
) -> None:
    """Tell a site what does not fit the spec, before anything leaves.

    Example: `fedcohort spec check data.csv --spec heart.toml --site ours.toml`
    """
    from fedcohort.files.propose import check_data
    from fedcohort.files.source import local_copy
    from fedcohort.files.spec import load_spec

    recipe = load_spec(spec)
    want = recipe.want(site, csv=csv_options(csv), table=table)
    fit = check_data(local_copy(data), want, recipe)
    show(format, fit, fit.facts(), f"{data} and {spec}")
    if fit.problems:
        raise DataError(f"{data} does not fit {spec}: {'; '.join(fit.problems)}")
