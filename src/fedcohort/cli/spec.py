"""``fedcohort spec``: one spec for all sites, proposed from one table and checked at each site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, show, show_json
from fedcohort.cli.sketch import ForceOption
from fedcohort.exceptions import DataError

app = typer.Typer(
    help="State once how all sites make their sketches.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Delimiter = Annotated[str | None, typer.Option(help="CSV: what parts the cells [found out].")]
Decimal = Annotated[str | None, typer.Option(help="CSV: decimal mark [found out].")]
Encoding = Annotated[str | None, typer.Option(help="CSV: encoding, such as cp1252 [UTF-8].")]
Data = Annotated[Path, typer.Argument(help="Parquet, CSV or Arrow file, or a folder of them.")]


@app.command("init")
def init(
    data: Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="The spec, a TOML file.")],
    label: Annotated[str | None, typer.Option(help="Column of classes from 0.")] = None,
    delimiter: Delimiter = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    force: ForceOption = False,
) -> None:
    """Propose a spec from one site's table: types and roles of columns, none of their values.

    Centers, scales and levels are left open: they are public constants for people to fill in.

    Example: `fedcohort spec init patients.csv -o heart.toml`
    """
    from fedcohort.atomic import write_atomically
    from fedcohort.files import CsvOptions
    from fedcohort.files.propose import propose_spec
    from fedcohort.files.publish import check_output, writing

    check_output(out, [data], force)
    text = propose_spec(data, label, CsvOptions(delimiter, decimal, encoding))
    with writing(out):
        write_atomically(out, text.encode())
    typer.echo(
        f"Wrote {out}. Fill in the constants marked TODO, delete the columns that should not be "
        "compared, and give the file to all sites."
    )


@app.command("check")
def check(
    data: Data,
    spec: Annotated[Path, typer.Option(help="The spec to check against.")],
    delimiter: Delimiter = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    format: FormatOption = Format.table,
) -> None:
    """Tell a site what does not fit the spec, before anything leaves.

    Example: `fedcohort spec check data.csv --spec heart.toml`
    """
    from fedcohort.files import CsvOptions
    from fedcohort.files.propose import check_data
    from fedcohort.files.spec import load_spec
    from fedcohort.report.sketches import facts_table

    found = check_data(data, load_spec(spec), CsvOptions(delimiter, decimal, encoding))
    if format is Format.json:
        show_json(found)
    else:
        show(facts_table(found.facts(), f"{data} and {spec}"))
    if found.problems:
        raise DataError(f"{data} does not fit {spec}: {'; '.join(found.problems)}")
