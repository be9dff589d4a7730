"""`mergestream train`: train the experts of a pool."""

from pathlib import Path
from typing import Annotated

import typer

from mergestream.cli import shared_options
from mergestream.cli.terminal import echo, progress


def train(
    dataset: shared_options.DatasetName,
    network: Annotated[str, typer.Option(help="A timm name, 'torchvision:NAME' or 'transformers:CLASS'.")],
    out: Annotated[Path, typer.Option(help="The pool's folder, which also holds the base.")],
    root: shared_options.Root = None,
    domain: Annotated[
        str | None, typer.Option(help="Train only this site, from the base in --out.", show_default="all domains")
    ] = None,
    init: Annotated[
        str, typer.Option(help="Initial encoder weights: pretrained (timm's), a safetensors file, or random.")
    ] = "pretrained",
    recipe: Annotated[
        str, typer.Option(help="default, paper (its sweep, heads from scratch) or domainbed; options replace its own.")
    ] = "default",
    head_init: Annotated[
        str | None,
        typer.Option(help="Initial heads: shared, linear_probe, independent or zero.", show_default="the recipe's"),
    ] = None,
    loss: Annotated[str, typer.Option(help="Training loss: plain, or weighted by class.")] = "plain",
    criterion: Annotated[
        str, typer.Option(help="Validation cross-entropy that chooses the step: plain, or balanced over classes.")
    ] = "plain",
    settings: Annotated[
        str | None,
        typer.Option(
            help="Settings: one, diwa, paper:20, domainbed:20, or a grid: 'learning_rate=1e-5|5e-5, dropout=0|0.1'.",
            show_default="the recipe's",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps per fit.", show_default="5001, or 5000 in 'paper'")] = None,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 32,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the optimiser.", show_default="the recipe's")
    ] = None,
    augmentation: Annotated[float, typer.Option(help="Strength of crop and colour: 0 none, 1 DomainBed's.")] = 1.0,
    validate_every: Annotated[int, typer.Option(help="Steps between validations.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of start, split, shuffles and augmentation.")] = 0,
    arg: shared_options.Arg = None,
    data_option: shared_options.DataOption = None,
    keep_candidates: Annotated[
        bool, typer.Option("--keep-candidates", help="Keep the expert of every recipe, for DiWA's averages.")
    ] = False,
    statistics: Annotated[
        int, typer.Option(help="Training images per site for Gram and Fisher statistics; 0 measures none.")
    ] = 0,
    skip_bad: shared_options.SkipBad = 0,
    allow_missing_classes: shared_options.AllowMissingClasses = False,
    device: Annotated[str, typer.Option("--device", "--accelerator", help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="32-true, bf16-mixed or 16-mixed.")] = "32-true",
    compile: Annotated[str, typer.Option(help="Compile on a GPU: auto (where it pays), always or never.")] = "auto",
    keep_every: Annotated[
        float, typer.Option(help="Seconds between saved states: a killed run loses at most this much work.")
    ] = 30.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard files to OUT.work/tensorboard.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Fits at a time, but one per GPU: fits that share a GPU take turns.")
    ] = None,
    engine: shared_options.Engine = "local",
    plugin: shared_options.Plugin = None,
) -> None:
    """Train every domain's expert from one shared base; the recipe with the lowest validation loss wins.

    Each expert sees only its own domain. Finished work is not repeated, also after a kill.
    """
    options = dict(locals())  # named as in the function for Python
    del options["plugin"]
    from mergestream.runtime.parallel import default_workers
    from mergestream.training.python_calls import train as train_experts

    options["jobs"] = default_workers(device) if jobs is None else jobs
    trained = train_experts(**options, track=progress())
    echo(*trained.sentences)
    for sentence in trained.warnings:
        echo(f"Warning: {sentence}", err=True)
