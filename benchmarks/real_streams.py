"""Methods on streams of real images: every domain of a data set is the target once, the others' experts answer.

    mergestream train --dataset pacs --root pacs.zip ... --out POOL
    python3 benchmarks/real_streams.py --pool POOL --dataset pacs --root pacs.zip --out RECORD.json
    python3 benchmarks/real_streams.py ... --sources    # pairs of domains left out: for choices that no target may see

Pools, methods, streams and metrics are the product's. What methods share is computed once: the experts' answers, and
the mean encoder's features, which are all that most methods read of the merged model. So two cores are enough.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from torch import Tensor, nn

import mergestream as ms
from mergestream.bench.choice.candidates import CANDIDATES, OWN, RARE, REFERENCE
from mergestream.bench.choice.candidates import STREAMS as PSEUDO_STREAMS
from mergestream.bench.choice.pseudo_targets import with_rare_class
from mergestream.data.datasets.domain_data import DomainData, concatenate
from mergestream.data.streams import create_stream
from mergestream.functional.metrics import summarise
from mergestream.functional.nested_bootstrap import NestedRun, hierarchical_difference
from mergestream.methods.recommendation import METRICS as CHOICE_METRICS
from mergestream.methods.recommendation import ChoiceEvidence, SitePart, choose
from mergestream.methods.spelling import parse_variant

SHOWN = 256  # images of a pseudo-target for `auto`
CHUNK = 128  # images of one forward
USUAL = 32  # images per batch
STREAMS = {
    "pacs": (
        "iid", "dirichlet:0.05", "note:0.1", "sorted", "recurrence", "missing:1", "missing:3",
        "prevalence:0.02:0", "prevalence:0.5:0",
    ),
    "midog": (
        "iid", "dirichlet:0.05", "slides", "recurrence", "prevalence:0.02", "prevalence:0.05", "prevalence:0.1",
        "prevalence:0.2", "prevalence:0.5", "lone",
    ),
}  # fmt: skip
MAIN_STREAMS = ("iid", "dirichlet:0.05")  # with all methods
RULES = ("merge_and_fit", "merge_once(ask_first=256)", "auto")
RIVALS = (
    "mean", "ensemble(views=hflip)", "entropy_adaptive", "corrected", "lame(ensemble(views=hflip))", "t3a(mean)",
    "corrected(mean)",
)  # fmt: skip
OTHERS = (
    "ensemble", "entropy_adaptive(momentum=0.9)", "label_shift(ensemble(views=hflip))",
    "prior_roid(ensemble(views=hflip))", "image_weights", "merge_and_fit(correct=False)",
    "merge_and_fit(temperature=1)", "merge_and_fit(views=())", "merge_and_fit(ask_first=256, ask_every=4)",
)  # fmt: skip
# Methods that merge encoders in another way than by their mean; only they need the whole network.
OTHER_ENCODERS = ("entropy_adaptive", "paper", "tent", "sar", "dawin", "t3_js", "ties", "task_arithmetic")
COMPARED = ("accuracy", "balanced_accuracy", "auroc")
METRICS = ("accuracy", "balanced_accuracy", "auroc", "nll", "brier", "ece", "calibration_in_the_large")


class LastLayer(nn.Module):
    """An expert's last layer, on features [B,D,1,1] of another network."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(weight.shape[1], weight.shape[0])
        self.head.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features[:, :, 0, 0])


def last_layers(pool: ms.ExpertPool) -> ms.ExpertPool:
    """The experts' last layers as a pool with the same cards."""
    assert pool.last_layer is not None
    modules = {name: LastLayer(*pool.last_layer.of_weights(pool.bank[k])) for k, name in enumerate(pool.names)}
    result = ms.ExpertPool.from_modules(modules, classes=pool.classes, head="head")
    for card in pool.cards:
        details = {"class_counts": card.class_counts, "temperature": card.temperature}
        result = result.annotate(card.name, **details, metrics=card.metrics, recipe=card.recipe)
    return result.to(dtype=pool.bank.dtype)


@dataclass(frozen=True)
class Subject:
    """Images of one target as the experts of a pool see them."""

    pool: ms.ExpertPool
    last_layers: ms.ExpertPool
    data: DomainData
    domains: Sequence[str]  # of each image
    features: Tensor  # of the mean encoder [N,D,1,1]
    logits: Mapping[str, Tensor]  # of the experts by view [K,N,C]

    def only(self, chosen: Tensor) -> "Subject":
        return replace(
            self,
            data=self.data.subset(chosen),
            domains=[self.domains[i] for i in chosen.tolist()],
            features=self.features[chosen],
            logits={view: values[:, chosen] for view, values in self.logits.items()},
        )

    def batches(self, spec: str, size: int, seed: int) -> Any:
        columns = {"groups": self.data.groups, "domains": list(self.domains)}
        return create_stream(spec, self.data.labels, batch_size=size, seed=seed, classes=self.pool.classes, **columns)

    def run(self, text: str, batches: Any) -> tuple[Tensor, float]:
        """Probabilities in the order of the stream, and forwards per image."""
        variant, whole = parse_variant(text), any(name in text for name in OTHER_ENCODERS)
        method = ms.create_method(variant.method, self.pool if whole else self.last_layers, **dict(variant.options))
        answers, forwards = [], 0.0
        for indices in batches:
            picked = torch.as_tensor(indices)
            images = self.data.batch(picked) if whole else self.features[picked]
            own = {view: values[:, picked] for view, values in self.logits.items()}
            step = method.step(images, expert_logits=own)
            answers.append(torch.softmax(step.logits.float(), dim=-1))
            forwards += len(picked) * (step.expert_forwards + step.merged_forwards)
        return torch.cat(answers), forwards / sum(map(len, batches))


@dataclass(frozen=True)
class RealPool:
    """All experts, a sample of every domain, and the folder for what is computed once."""

    pool: ms.ExpertPool
    domains: Mapping[str, DomainData]
    work: Path

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> "RealPool":
        dataset = ms.load_dataset(arguments.dataset, root=arguments.root)
        pool, domains = ms.ExpertPool.load(arguments.pool).to(dtype=torch.bfloat16), {}
        for card in pool.cards:
            data = dataset[card.domain or card.name]
            chosen = np.sort(np.random.RandomState(0).permutation(len(data))[: arguments.images])
            domains[card.name] = data.subset(torch.from_numpy(chosen))
        work = arguments.work / f"{pool.fingerprint()[:16]}-{arguments.images}"
        work.mkdir(parents=True, exist_ok=True)
        return cls(pool, domains, work)

    def subject(self, target: Sequence[str], left_out: Sequence[str]) -> Subject:
        """Images of the target's domains, and the experts but those that are left out."""
        parts = [self.domains[name] for name in target]
        data, of_domain = concatenate(parts) if len(parts) > 1 else (parts[0], [target[0]] * len(parts[0]))
        pool = self.pool.without(*left_out)
        rows = [self.pool.index(name) for name in pool.names]
        views = {}
        for view in ("original", "hflip"):
            of_parts = [self._logits(name, view)[rows] for name in target]
            views[view] = torch.cat(of_parts, dim=1)
        features = torch.cat([self._features(name, pool, left_out) for name in target])
        return Subject(pool, last_layers(pool), data, of_domain, features[:, :, None, None], views)

    @torch.no_grad()
    def _logits(self, domain: str, view: str) -> Tensor:
        """All experts' logits [K,N,C]."""
        shown = None if view == "original" else view
        return self._once(
            f"logits-{view}-{domain}", domain, lambda images: self.pool.logits(images, shown).transpose(0, 1)
        ).transpose(0, 1)

    @torch.no_grad()
    def _features(self, domain: str, pool: ms.ExpertPool, left_out: Sequence[str]) -> Tensor:
        """The mean encoder's features [N,D]."""
        weights = pool.merge(torch.full((len(pool),), 1 / len(pool)))
        return self._once(
            f"features-{domain}-without-{'-'.join(sorted(left_out))}",
            domain,
            lambda images: pool.forward_with_inputs(weights, pool.prepare(images))[1],
        )

    def _once(self, name: str, domain: str, compute: Any) -> Tensor:
        """A value per image [N,...], read from the work folder if it was computed before."""
        file, data = self.work / f"{name.replace(' ', '_')}.pt", self.domains[domain]
        if not file.exists():
            torch.save(torch.cat([compute(data.batch(part)) for part in torch.arange(len(data)).split(CHUNK)]), file)
        return torch.load(file)


def part_of(site: str, subject: Subject) -> SitePart:
    """A source as pseudo-target, as `mergestream choose` measures it: the others' experts answer its images."""
    runs: dict[str, dict[str, Any]] = {}
    mixes = {OWN: torch.arange(len(subject.data)), RARE: with_rare_class(subject.data.labels)}
    for text, (mix, chosen), spec in product(CANDIDATES, mixes.items(), PSEUDO_STREAMS):
        own = subject.only(chosen)
        batches = own.batches(spec, USUAL, 0)
        report = summarise(own.run(text, batches)[0], in_order(own.data.labels, batches), subject.pool.classes)
        runs.setdefault(text, {})[f"{spec}, {mix}"] = {name: report[name] for name in CHOICE_METRICS}
    names = {name: name for name in subject.pool.names}
    return SitePart(site, names, {mix: len(rows) for mix, rows in mixes.items()}, runs)


def auto_of(real: RealPool, target: str, dataset: str) -> dict[str, Any]:
    """The method that `mergestream choose` takes for a target's sources: no image, label or expert of the target."""
    parts = []
    for site in real.pool.names:
        if site != target:
            subject = real.subject((site,), (site, target))
            parts.append(part_of(site, subject.only(torch.arange(len(subject.data))[:SHOWN])))
    evidence = ChoiceEvidence(dataset, 0, dict.fromkeys(CANDIDATES, 0), REFERENCE, tuple(parts))
    return asdict(choose(evidence, parts))


def in_order(labels: Tensor, batches: Any) -> Tensor:
    return labels[torch.as_tensor(np.concatenate(list(batches)))]


def targets_of(names: Sequence[str], specs: Sequence[str], *, sources: bool) -> Iterator[tuple[Any, Any, list[str]]]:
    """Domains that are streamed, experts that are left out, and streams.

    `recurrence` goes to the next domain and comes back. `sources`: one more domain is left out in turn.
    """
    alone = [spec for spec in specs if "recurrence" not in spec]
    together = [spec for spec in specs if "recurrence" in spec]
    if sources:
        for site, target in permutations(names, 2):
            yield (site,), (site, target), alone
        return
    for target, following in zip(names, (*names[1:], names[0]), strict=True):
        yield (target,), (target,), alone
        if together:
            yield (target, following), (target, following), together


def measured(real: RealPool, arguments: argparse.Namespace, choices: list[Any]) -> Iterator[tuple[Any, NestedRun]]:
    """Every method at every target on every stream: scores and answers."""
    specs = arguments.streams or STREAMS[arguments.dataset]
    for streamed, left_out, own_specs in targets_of(real.pool.names, specs, sources=arguments.sources):
        methods = arguments.methods or (*RIVALS, *OTHERS, *RULES)
        subject, target = real.subject(streamed, left_out), "+".join(streamed)
        setting = {"dataset": arguments.dataset, "pool": arguments.pool.name, "target": target}
        if arguments.sources:
            setting["also_left_out"] = left_out[1]
        choice = None
        if "auto" in methods and len(left_out) == 1:
            choice = auto_of(real, target, arguments.dataset)
            choices.append({**setting, **choice})
        for spec, size, seed in product(own_specs, arguments.batch_sizes, arguments.seeds):
            batches = subject.batches(spec, size, seed)
            truth = in_order(subject.data.labels, batches)
            units = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
            for text in methods:
                if (text == "auto" and choice is None) or (
                    text in OTHERS and not arguments.methods and (spec not in MAIN_STREAMS or size != USUAL)
                ):
                    continue
                began = time.process_time()
                name = choice["method"] if choice is not None and text == "auto" else text
                answers, forwards = subject.run(name, batches)
                report = summarise(answers, truth, subject.pool.classes)
                row = {**setting, "stream": spec, "batch": size, "seed": seed, "method": text, "images": len(truth)}
                row |= {"forwards": round(forwards, 3), "cpu_seconds": round(time.process_time() - began, 2)}
                row |= {metric: round(report[metric], 5) for metric in METRICS}
                chances, predictions = answers.half().numpy(), answers.argmax(dim=1).numpy()
                yield row, NestedRun(target, "0", seed, truth.numpy(), predictions, chances, units)


def differences(runs: Mapping[tuple[Any, ...], list[NestedRun]]) -> Iterator[dict[str, Any]]:
    """Our rules less each rival wherever both ran: mean over targets with its interval, and the worst target."""
    for (stream, size, ours), mine in runs.items():
        for rival, metric in product((*RIVALS, "merge_and_fit") if ours in RULES else (), COMPARED):
            other = runs.get((stream, size, rival))
            result = None if other is None or rival == ours else hierarchical_difference(mine, other, metric)
            if result is not None:
                low, high = result.interval
                worst = min(result.by_target, key=result.by_target.__getitem__)
                yield {"stream": stream, "batch": size, "ours": ours, "rival": rival, "metric": metric,
                       "mean": round(result.mean, 5), "low": round(low, 5), "high": round(high, 5),
                       "worst": round(result.by_target[worst], 5), "worst_target": worst}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("--pool", "--root", "--out", "--work"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--dataset", choices=STREAMS, required=True)
    parser.add_argument("--sources", action="store_true", help="leave one more domain out, in turn")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[USUAL])
    parser.add_argument("--images", type=int, default=700, help="per domain, at most")
    parser.add_argument("--streams", nargs="+", help="instead of those of the table")
    parser.add_argument("--methods", nargs="+", help="instead of those of the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of streams")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    real = RealPool.load(arguments)
    rows, choices = list[dict[str, Any]](), list[Any]()
    runs: dict[tuple[Any, ...], list[NestedRun]] = defaultdict(list)
    for row, nested in measured(real, arguments, choices):
        rows.append(row)
        runs[row["stream"], row["batch"], row["method"]].append(nested)
        text = f"{row['target']} {row['stream']} {row['batch']} {row['seed']} {row['method']}"
        print(f"{text}: {100 * row['accuracy']:.1f} in {row['cpu_seconds']} s", flush=True)
    compared = [] if arguments.sources else list(differences(runs))
    record = {"about": provenance(), "rows": rows, "choices": choices, "differences": compared}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
