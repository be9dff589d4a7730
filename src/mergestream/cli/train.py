"""`mergestream train`: train the experts of a pool."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mergestream.cli.shared_options import AllowMissingClasses, DataOption, Engine, Plugin, SkipBad
from mergestream.cli.terminal import echo, progress

if TYPE_CHECKING:
    from mergestream.pool.expert_card import ExpertCard
    from mergestream.training.training_run import Candidate


def train(
    dataset: Annotated[str, typer.Option(help="A data set by its name in 'data list'.")],
    network: Annotated[str, typer.Option(help="A timm name, 'torchvision:NAME' or 'transformers:CLASS'.")],
    out: Annotated[Path, typer.Option(help="The pool's folder, which also holds the base.")],
    root: Annotated[Path | None, typer.Option(help="The data set's folder or zip.")] = None,
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
    argument: Annotated[
        list[str] | None, typer.Option("--arg", help="An argument of the network, as in 'img_size=126'; repeatable.")
    ] = None,
    data_option: DataOption = None,
    keep_candidates: Annotated[
        bool, typer.Option("--keep-candidates", help="Keep the expert of every recipe, for DiWA's averages.")
    ] = False,
    statistics: Annotated[
        int, typer.Option(help="Training images per site for Gram and Fisher statistics; 0 measures none.")
    ] = 0,
    skip_bad: SkipBad = 0,
    allow_missing_classes: AllowMissingClasses = False,
    accelerator: Annotated[str, typer.Option("--device", "--accelerator", help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option(help="32-true, bf16-mixed or 16-mixed.")] = "32-true",
    compile_: Annotated[
        str, typer.Option("--compile", help="Compile on a GPU: auto (where it pays), always or never.")
    ] = "auto",
    keep_every: Annotated[
        float, typer.Option(help="Seconds between saved states: a killed run loses at most this much work.")
    ] = 30.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard files to OUT.work/tensorboard.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(help="Processes on this machine.", show_default="one per core, or one per GPU")
    ] = None,
    engine: Engine = "local",
    plugin: Plugin = None,  # noqa: ARG001
) -> None:
    """Train every domain's expert from one shared base; the recipe with the lowest validation loss wins.

    Each expert sees only its own domain. Finished work is not repeated, also after a kill.
    """
    from mergestream.runtime.parallel import default_workers
    from mergestream.training.python_calls import train as train_experts

    trained = train_experts(
        dataset,
        network,
        out,
        root=root,
        domain=domain,
        init=init,
        recipe=recipe,
        head_init=head_init,
        loss=loss,
        criterion=criterion,
        settings=settings,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        augmentation=augmentation,
        validate_every=validate_every,
        seed=seed,
        arg=argument,
        data_option=data_option,
        keep_candidates=keep_candidates,
        statistics=statistics,
        skip_bad=skip_bad,
        allow_missing_classes=allow_missing_classes,
        device=accelerator,
        precision=precision,
        compile=compile_,
        keep_every=keep_every,
        tensorboard=tensorboard,
        jobs=jobs if jobs is not None else default_workers(accelerator),
        engine=engine,
        track=progress(Console()),
    )
    echo(*describe_training(trained.experts, out))
    for sentence in trained.warnings:
        echo(f"Warning: {sentence}", err=True)


def describe_training(trained: Sequence[tuple["ExpertCard", Sequence["Candidate"]]], out: Path) -> list[str]:
    """Describe every expert in a sentence, and why recipes failed."""
    lines = []
    for card, candidates in trained:
        report = card.metrics["validation"]
        scores = f"accuracy {100 * report['accuracy']:.1f} %, balanced {100 * report['balanced_accuracy']:.1f} %"
        lines.append(
            f"{card.domain}: {scores}, cross-entropy {report['nll']:.3f} on its own validation split; step "
            f"{card.metrics['best_step']}, temperature {card.temperature:.2f}, best of {len(candidates)}."
        )
        reasons = dict.fromkeys(candidate.failed for candidate in candidates if candidate.failed)
        lines += [f"  a setting failed: {reason}" for reason in reasons]
    return [*lines, f"Pool: {out}"]
