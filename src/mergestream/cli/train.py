"""`mergestream train`: parse, call one function, print."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergestream.cli.shared_options import AllowMissingClasses, DataOption, Engine, SkipBad
from mergestream.cli.terminal import progress


def train(
    dataset: Annotated[str, typer.Option(help="A data set by its name in 'data list'.")],
    network: Annotated[str, typer.Option(help="A timm name, 'torchvision:NAME' or 'transformers:CLASS'.")],
    out: Annotated[Path, typer.Option(help="The pool's folder; the base lies in it.")],
    root: Annotated[Path | None, typer.Option(help="The data set's folder or zip.")] = None,
    domain: Annotated[
        str | None,
        typer.Option(help="One site alone, from the base in --out.", show_default="all domains"),
    ] = None,
    init: Annotated[
        str, typer.Option(help="The encoder's first weights: pretrained (timm's), a safetensors file, or random.")
    ] = "pretrained",
    head_init: Annotated[
        str, typer.Option(help="Where heads start: shared, linear_probe, independent (the paper's text) or zero.")
    ] = "shared",
    loss: Annotated[str, typer.Option(help="plain, or weighted by class.")] = "plain",
    criterion: Annotated[
        str,
        typer.Option(help="The validation split chooses by cross-entropy: plain, or balanced over its classes."),
    ] = "plain",
    settings: Annotated[
        str, typer.Option(help="one, diwa, domainbed:20, or a grid: 'learning_rate=1e-5|5e-5, dropout=0|0.1'.")
    ] = "one",
    steps: Annotated[int, typer.Option(help="Steps of every fit.")] = 5001,
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Of the optimiser.")] = 5e-5,
    augmentation: Annotated[float, typer.Option(help="Strength of crop and colour: 0 none, 1 DomainBed's.")] = 1.0,
    validate_every: Annotated[int, typer.Option(help="Steps between two looks at the validation split.")] = 100,
    seed: Annotated[int, typer.Option(help="Of start, split, shuffles and augmentation.")] = 0,
    argument: Annotated[
        list[str] | None, typer.Option("--arg", help="An argument of the network, as in 'img_size=126'.")
    ] = None,
    data_option: DataOption = None,
    keep_candidates: Annotated[
        bool, typer.Option("--keep-candidates", help="Keep every setting's expert, for DiWA's averages.")
    ] = False,
    statistics: Annotated[
        int, typer.Option(help="Measure Gram and Fisher statistics on so many training images of each site.")
    ] = 0,
    skip_bad: SkipBad = 0,
    allow_missing_classes: AllowMissingClasses = False,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="Lightning's: 32-true, bf16-mixed, 16-mixed.")] = "32-true",
    compile_: Annotated[
        str, typer.Option("--compile", help="On a GPU: auto (where it pays), always or never.")
    ] = "auto",
    keep_every: Annotated[
        float, typer.Option(help="Seconds of work that a kill may cost, rounded up to a look at the validation split.")
    ] = 30.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard files to OUT.work/tensorboard.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Processes on this machine.", show_default="one a core, or one a GPU")
    ] = None,
    engine: Engine = "local",
) -> None:
    """Train every domain's expert from one shared start; the setting with the lowest validation loss stays.

    Each expert sees its own domain alone. What is done already is not done again, also after a kill.
    """
    from mergestream.cli.training_text import describe_training
    from mergestream.runtime.parallel import default_workers
    from mergestream.training import Recipe
    from mergestream.training.training_plan import plan_from
    from mergestream.training.training_run import run_training

    console = Console()
    plan = plan_from(
        dataset=dataset,
        root=root,
        data_options=data_option or [],
        skip_bad=skip_bad,
        allow_missing_classes=allow_missing_classes,
        network=network,
        arguments=argument or [],
        init=init,
        settings=settings,
        start=Recipe(
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            augmentation=augmentation,
            loss=loss,
            criterion=criterion,
            validate_every=validate_every,
            seed=seed,
            accelerator=accelerator,
            precision=precision,
            compile=compile_,
        ),
        head_init=head_init,
        domain=domain,
        keep_candidates=keep_candidates,
        statistics=statistics,
        keep_every=keep_every,
        tensorboard=tensorboard,
    )
    workers = jobs if jobs is not None else default_workers(accelerator)
    trained = run_training(plan, out, progress(console), jobs=workers, engine=engine)
    told = [(card, [candidate.failed for candidate in candidates]) for card, candidates in trained]
    for sentence in describe_training(told, out):
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)
