"""Methods on streams of real images, from what `real_pools.py` stored: two cores are enough.

    python3 benchmarks/real_streams.py --pool pacs-shared-0.npz --out RECORD.json
    python3 benchmarks/real_streams.py --pool pacs-shared-0.npz --out RECORD.json --sources   # for choices: no target

Every domain is the target once, the other domains' experts answer. Methods, streams and metrics are the product's; what
methods share was computed once. With `--sources` one more domain is left out in turn: sites as pseudo-targets.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain, permutations, product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from provenance import provenance
from real_pools import (
    MAIN_STREAMS,
    PAPER,
    USUAL,
    VIEWS,
    WHOLE,
    WITH_BATCHNORM,
    Setting,
    features_key,
    next_domain,
    settings_of,
    stream_of,
)
from torch import Tensor, nn

import mergestream as ms
from mergestream.bench.choice.candidates import CANDIDATES, OWN, RARE, REFERENCE
from mergestream.bench.choice.candidates import STREAMS as PSEUDO_STREAMS
from mergestream.bench.choice.pseudo_targets import with_rare_class
from mergestream.functional.metrics import summarise
from mergestream.functional.nested_bootstrap import NestedRun, hierarchical_difference
from mergestream.methods import Method, Step
from mergestream.methods.recommendation import METRICS as CHOICE_METRICS
from mergestream.methods.recommendation import ChoiceEvidence, SitePart, choose
from mergestream.methods.spelling import parse_variant
from mergestream.methods.state import State
from mergestream.pool.runner import Batch

RULES = ("merge_and_fit", "merge_once(ask_first=256)", "auto")
RIVALS = (
    "mean", "ensemble(views=hflip)", PAPER, "corrected", "lame(ensemble(views=hflip))", "t3a(mean)", "corrected(mean)",
)  # fmt: skip
# On the main streams only.
OTHERS = (
    "ensemble", "entropy_adaptive(momentum=0.9)", "entropy_adaptive(score_images=8)",
    "label_shift(ensemble(views=hflip))", "prior_roid(ensemble(views=hflip))", "image_weights", "surgery",
    "corrected(entropy_adaptive)", "merge_and_fit(correct=False)", "merge_and_fit(temperature=card)",
    "merge_and_fit(views=())", "merge_and_fit(ask_first=256, ask_every=4)",
)  # fmt: skip
SINGLE = ("mean", "ensemble(views=hflip)", PAPER, "corrected", "lame(ensemble(views=hflip))", *RULES[:2])  # other sizes
COMPARED = ("accuracy", "balanced_accuracy", "auroc")
PARTS_OF_LONG = 10
METRICS = ("accuracy", "balanced_accuracy", "auroc", "nll", "brier", "ece", "calibration_in_the_large")


class StoredAnswers(Method[State]):
    """Answers that were stored, as a base of wrappers: those of the batch at hand."""

    name: ClassVar[str] = "stored"
    asks_experts = True
    at_hand: ClassVar[Tensor]  # probabilities [B,C]

    def advance(self, batch: Batch, state: State) -> tuple[Step, State]:  # noqa: ARG002
        return Step(self.at_hand.clamp_min(1e-7).log()), state


class LastLayer(nn.Module):
    """An expert's last layer, on features [B,D,1,1] of the mean encoder."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0])
        self.head.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features[:, :, 0, 0])


@dataclass(frozen=True)
class Subject:
    """Images of one target as the experts that may answer there see them."""

    key: str  # of the answers that were stored
    pool: ms.ExpertPool  # the experts' last layers
    labels: Tensor
    groups: Sequence[str]
    domains: Sequence[str]
    features: Tensor  # of the mean encoder [N,D,1,1]
    logits: Mapping[str, Tensor]  # of the experts by view [K,N,C]
    answers: Mapping[str, np.ndarray]
    passes: Mapping[str, float]  # forwards per image of methods whose answers were stored

    def stream(self, setting: Setting) -> Any:
        return stream_of(setting, self.labels, self.pool.classes, groups=self.groups, domains=self.domains)

    def stored(self, setting: Setting, method: str) -> Tensor | None:
        """Probabilities in the order of the stream, if they were stored."""
        values = self.answers.get(f"answers/{self.key}/{setting}/{method}")
        return None if values is None else torch.from_numpy(np.asarray(values)).float()

    def only(self, chosen: Tensor, key: str) -> "Subject":
        logits = {view: values[:, chosen] for view, values in self.logits.items()}
        rows = chosen.tolist()
        groups, domains = [self.groups[i] for i in rows], [self.domains[i] for i in rows]
        features, labels = self.features[chosen], self.labels[chosen]
        return Subject(key, self.pool, labels, groups, domains, features, logits, self.answers, self.passes)

    def run(self, text: str, setting: Setting, batches: Any) -> tuple[Tensor, float] | None:
        """Probabilities in the order of the stream, and forwards per image; None where they were not stored."""
        experts = len(self.pool)
        paper = experts * len(VIEWS) + 1.0
        sizes = [len(batch) for batch in batches]
        if (own := self.stored(setting, text)) is not None and len(own) == sum(sizes):
            if "score_images" in text:
                paper = 1 + experts * len(VIEWS) * sum(min(8, size) for size in sizes) / sum(sizes)
            return own, paper if text.startswith(PAPER) else self.passes.get(text, np.nan)
        base = self.stored(setting, PAPER)
        base = None if base is None or len(base) != sum(sizes) else base
        if any(name in text for name in (PAPER, *WHOLE)) or text in WITH_BATCHNORM:
            if base is None or not text.startswith(f"corrected({PAPER}"):
                return None
            text = "corrected(stored)"
        variant = parse_variant(text)
        method = ms.create_method(variant.method, self.pool, **dict(variant.options))
        answers, forwards, place = [], 0.0, 0
        for indices in batches:
            picked = torch.as_tensor(indices)
            if "stored" in text and base is not None:
                StoredAnswers.at_hand = base[place : place + len(indices)]
                place += len(indices)
            own_logits = {view: values[:, picked] for view, values in self.logits.items()}
            step = method.step(self.features[picked], expert_logits=own_logits)
            answers.append(torch.softmax(step.logits.float(), dim=-1))
            forwards += len(picked) * (step.expert_forwards + step.merged_forwards)
        return torch.cat(answers), paper if "stored" in text else forwards / sum(sizes)


@dataclass
class StoredPool:
    """All that was stored of one pool."""

    name: str
    about: dict[str, Any]
    arrays: Mapping[str, np.ndarray]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.names = tuple(card["name"] for card in self.about["cards"])

    @classmethod
    def load(cls, path: Path) -> "StoredPool":
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return cls(path.stem, json.loads(arrays.pop("about").tobytes()), arrays)

    def subject(self, target: Sequence[str], left_out: Sequence[str]) -> Subject:
        """As many images of the target's domains as were stored for it, and the experts but those left out."""
        rows = [k for k, name in enumerate(self.names) if name not in left_out]
        features = [torch.from_numpy(self.arrays[features_key(name, set(left_out))]).float() for name in target]
        counts = [len(part) for part in features]
        logits = [
            torch.from_numpy(self.arrays[f"{name}/logits"])[:, rows, :count]
            for name, count in zip(target, counts, strict=True)
        ]
        together = dict(zip(VIEWS, torch.cat(logits, dim=2), strict=True))
        parts = list(zip(target, counts, strict=True))
        labels = torch.cat([torch.from_numpy(self.arrays[f"{name}/labels"])[:count] for name, count in parts])
        groups = [f"{name}/{group}" for name, count in parts for group in self.arrays[f"{name}/groups"][:count]]
        domains = [name for name, count in parts for _ in range(count)]
        key = "+".join(target)
        pool, every = self._last_layers(rows), torch.cat(features)[:, :, None, None]
        passes = self.about["passes"]
        return Subject(key, pool, labels, groups, domains, every, together, self.arrays, passes)

    def _last_layers(self, rows: Sequence[int]) -> ms.ExpertPool:
        """The experts' last layers as a pool with their cards."""
        weight, bias = (torch.from_numpy(self.arrays[f"heads/{part}"]) for part in ("weight", "bias"))
        modules = {self.names[k]: LastLayer(weight[k], bias[k]) for k in rows}
        pool = ms.ExpertPool.from_modules(modules, classes=tuple(self.about["classes"]), head="head")
        for k in rows:
            card = self.about["cards"][k]
            details = {key: card[key] for key in ("class_counts", "temperature", "metrics", "recipe")}
            pool = pool.annotate(card["name"], **details)
        return pool


def part_of(site: str, target: str, subject: Subject, shown: int) -> SitePart:
    """A source as pseudo-target, as `mergestream choose` measures it: the others' experts answer its images."""
    runs: dict[str, dict[str, Any]] = {}
    few = torch.arange(len(subject.labels))[:shown]
    mixes = {OWN: few, RARE: with_rare_class(subject.labels[few])}
    for text, (mix, chosen), spec in product(CANDIDATES, mixes.items(), PSEUDO_STREAMS):
        own, setting = subject.only(chosen, f"{site}<{target}<{mix}"), Setting(spec)
        batches = own.stream(setting)
        result = own.run(text, setting, batches)
        assert result is not None, f"{text} was not stored for {own.key}"
        report = summarise(result[0], in_order(own.labels, batches), subject.pool.classes)
        runs.setdefault(text, {})[f"{spec}, {mix}"] = {name: report[name] for name in CHOICE_METRICS}
    names = {name: name for name in subject.pool.names}
    return SitePart(site, names, {mix: len(rows) for mix, rows in mixes.items()}, runs)


def auto_of(stored: StoredPool, target: str) -> dict[str, Any]:
    """The method that `mergestream choose` takes for a target's sources: no image, label or expert of the target."""
    sites = [site for site in stored.names if site != target]
    shown = stored.about["shown"]
    parts = [part_of(site, target, stored.subject((site,), (site, target)), shown) for site in sites]
    evidence = ChoiceEvidence(stored.about["dataset"], 0, dict.fromkeys(CANDIDATES, 0), REFERENCE, tuple(parts))
    return asdict(choose(evidence, parts))


@lru_cache(maxsize=4)
def stored_pool(path: Path) -> StoredPool:
    return StoredPool.load(path)


def in_order(labels: Tensor, batches: Any) -> Tensor:
    return labels[torch.as_tensor(np.concatenate(list(batches)))]


@dataclass(frozen=True)
class Place:
    """What is streamed: domains, the experts that are left out, and 'one' domain or 'two' for a recurrence."""

    domains: tuple[str, ...]
    left_out: tuple[str, ...]
    name: str
    kind: str

    def subject(self, stored: StoredPool) -> Subject:
        own = stored.subject(self.domains, self.left_out)
        if self.kind == "two" or len(self.left_out) == 1:
            return own
        shown = torch.arange(min(len(own.labels), stored.about["shown"]))  # the paper's answers are for these
        return own.only(shown, f"{self.domains[0]}<{self.left_out[1]}<{OWN}")


def places_of(names: Sequence[str], *, sources: bool) -> Iterator[Place]:
    if sources:
        for site, target in permutations(names, 2):
            yield Place((site,), (site, target), f"{site} without {target}", "one")
            # Recurrences of pairs that no target's stream has.
            if next_domain(names, site) != target and next_domain(names, target) != site:
                yield Place((site, target), (site, target), f"{site}+{target}", "two")
        return
    for target in names:
        both = (target, next_domain(names, target))
        yield Place((target,), (target,), target, "one")
        yield Place(both, both, "+".join(both), "two")


def methods_for(setting: Setting, arguments: argparse.Namespace) -> Sequence[str]:
    if arguments.methods:
        return tuple(arguments.methods)
    if setting.size != USUAL:
        return SINGLE
    usual = setting.stream in MAIN_STREAMS and not setting.seed
    return (*RIVALS, *(OTHERS if usual else ()), *(WHOLE + WITH_BATCHNORM if usual else ()), *RULES)


def chosen_settings(dataset: str, arguments: argparse.Namespace) -> list[Setting]:
    settings = settings_of(dataset, every_size=False)
    if arguments.other_sizes:
        settings = [each for each in settings_of(dataset, every_size=True) if each not in settings]
    if arguments.streams:
        more = [name for name in arguments.streams if all(each.stream != name for each in settings)]
        settings = [each for each in settings if each.stream in arguments.streams]
        settings += [Setting(name, size) for name in more for size in arguments.sizes or (USUAL,)]
    return [each for each in settings if not arguments.sizes or each.size in arguments.sizes]


@dataclass
class Measured:
    """Scores and answers of every method at one place, and what `auto` took there."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[NestedRun] = field(default_factory=list)
    choice: dict[str, Any] | None = None


def measured(path: Path, place: Place, arguments: argparse.Namespace) -> Measured:
    """Every method on every stream of one place."""
    torch.set_num_threads(1)
    stored, result = stored_pool(path), Measured()
    subject, recipe = place.subject(stored), stored.about["cards"][0]["recipe"]
    base = {"dataset": stored.about["dataset"], "pool": stored.name, "heads": stored.name.split("-")[-2]}
    base["training_seed"] = recipe["seed"]
    if place.kind == "one" and not arguments.sources and (not arguments.methods or "auto" in arguments.methods):
        result.choice = {**base, "target": place.name, **auto_of(stored, place.name)}
    for setting in chosen_settings(stored.about["dataset"], arguments):
        if (setting.stream == "recurrence") != (place.kind == "two"):
            continue
        batches = subject.stream(setting)
        truth = in_order(subject.labels, batches)
        units = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        for text in methods_for(setting, arguments):
            if text == "auto" and result.choice is None:
                continue
            began = time.process_time()
            ran = subject.run(result.choice["method"] if result.choice and text == "auto" else text, setting, batches)
            if ran is None:
                continue
            answers, forwards = ran
            report = summarise(answers, truth, subject.pool.classes)
            row = {**base, "target": place.name, "stream": setting.stream, "batch": setting.size, "seed": setting.seed}
            row |= {"method": text, "images": len(truth), "forwards": round(forwards, 3)}
            row |= {"cpu_seconds": round(time.process_time() - began, 2)}
            row |= {metric: None if report[metric] is None else round(report[metric], 5) for metric in METRICS}
            predictions = answers.argmax(dim=1)
            if "long:" in setting.stream:
                parts = (predictions == truth).float().tensor_split(PARTS_OF_LONG)
                row["parts"] = [round(float(part.mean()), 5) for part in parts]
            result.rows.append(row)
            seed, chances = str(recipe["seed"]), answers.half().numpy()
            own = place.name, seed, setting.seed, truth.numpy(), predictions.numpy(), chances, units
            result.runs.append(NestedRun(*own))
    return result


def differences(setting: tuple[str, int], runs: Mapping[str, Sequence[NestedRun]]) -> list[dict[str, Any]]:
    """Our rules less each rival wherever both ran: mean over targets with its interval, and the worst target."""
    by_place = {
        method: {(run.target, run.training_seed, run.stream_seed): run for run in own} for method, own in runs.items()
    }
    rows = []
    for ours, rival, metric in product(RULES, (*RIVALS, "merge_and_fit"), COMPARED):
        mine, other = by_place.get(ours, {}), by_place.get(rival, {})
        both = [place for place in mine if place in other]
        if not both or rival == ours:
            continue
        result = hierarchical_difference([mine[p] for p in both], [other[p] for p in both], metric)
        if result is not None:
            low, high = result.interval
            worst = min(result.by_target, key=result.by_target.__getitem__)
            rows.append({"stream": setting[0], "batch": setting[1], "ours": ours, "rival": rival, "metric": metric,
                         "mean": round(result.mean, 5), "low": round(low, 5), "high": round(high, 5),
                         "worst": round(result.by_target[worst], 5), "worst_target": worst})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pool", type=Path, nargs="+", required=True, help="files of real_pools.py: training seeds")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sources", action="store_true", help="leave one more domain out, in turn")
    parser.add_argument("--other-sizes", action="store_true", help="only the batch sizes that are left out without it")
    parser.add_argument("--sizes", type=int, nargs="+", help="of these sizes only")
    parser.add_argument("--streams", nargs="+", help="these only, or any others")
    parser.add_argument("--methods", nargs="+", help="these only")
    parser.add_argument("--targets", nargs="+", help="these only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before processes are forked
    tasks = [
        (path, place)
        for path in arguments.pool
        for place in places_of(stored_pool(path).names, sources=arguments.sources)
        if not arguments.targets or place.name in arguments.targets
    ]
    rows, choices = list[dict[str, Any]](), list[Any]()
    runs: dict[tuple[str, int], dict[str, list[NestedRun]]] = defaultdict(lambda: defaultdict(list))
    with ProcessPoolExecutor(arguments.jobs, initializer=ms.register_method, initargs=(StoredAnswers,)) as workers:
        for own in measured_places(workers, tasks, arguments):
            rows += own.rows
            choices += [own.choice] if own.choice else []
            for row, nested in zip(own.rows, own.runs, strict=True):
                runs[row["stream"], row["batch"]][row["method"]].append(nested)
        asked = [] if arguments.sources else [dict(own) for own in runs.values()]
        compared = list(chain.from_iterable(workers.map(differences, runs, asked)))
    abouts = {path.stem: stored_pool(path).about for path in arguments.pool}
    described = {
        name: {k: v for k, v in about.items() if k not in ("cards", "passes")} for name, about in abouts.items()
    }
    head = json.dumps({"about": provenance(), "pools": described}, indent=1).removesuffix("\n}")
    tables = {"rows": rows, "choices": choices, "differences": compared}
    written = [f'"{name}": {as_table(values)}' for name, values in tables.items()]
    arguments.out.write_text(",\n".join([head, *written]) + "\n}\n", encoding="utf-8")


def measured_places(
    workers: Executor, tasks: Sequence[tuple[Path, Place]], arguments: argparse.Namespace
) -> Iterator[Measured]:
    """The results of all places in their order."""
    futures = [workers.submit(measured, *task, arguments) for task in tasks]
    for (path, place), future in zip(tasks, futures, strict=True):
        own = future.result()
        yield own
        seconds = sum(row["cpu_seconds"] for row in own.rows)
        print(f"{path.stem} {place.name}: {len(own.rows)} rows, {seconds:.0f} s of CPU", flush=True)


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """JSON with the names of the columns once; a row lacks its last values where it has none."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [json.dumps([row.get(name) for name in columns], separators=(",", ":")) for row in rows]
    return f'{{"columns": {json.dumps(columns)}, "rows": [\n' + ",\n".join(lines) + "\n]}"


if __name__ == "__main__":
    main()
