"""`rft config`: a recipe looked at before it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli_options import Sets, print_json

config_app = typer.Typer(help="Look at a recipe before running it.", no_args_is_help=True)


@config_app.command("check")
def config_check(recipe: str, sets: Sets = None) -> None:
    """Say whether a recipe is valid."""
    from rft_core.recipes import load_recipe, recipe_digest

    print(f"ok  {recipe}  {recipe_digest(load_recipe(recipe, sets or []))[:12]}")


@config_app.command("show")
def config_show(recipe: str, sets: Sets = None) -> None:
    """Print a recipe with all defaults filled in."""
    from rft_core.recipes import load_recipe, resolved_yaml

    print(resolved_yaml(load_recipe(recipe, sets or [])), end="")


@config_app.command("schema")
def config_schema(
    recipe: Annotated[str | None, typer.Argument(help="Ignored; all recipes share one schema.")] = None,
) -> None:
    """Print the JSON schema of recipes."""
    from rft_core.recipes import json_schema

    print_json(json_schema())
