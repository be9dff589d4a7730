"""Methods and data sets of other packages: registration, entry points, plugins, provenance, and the contract."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import mergestream as ms
from benching import command
from conftest import NAMES, make_images, make_pool
from mergestream.bench.analysis.cost import costs
from mergestream.data.datasets import DATASETS, DatasetCard
from mergestream.data.datasets.dataset_sources import GeneratedSource
from mergestream.methods import METHODS
from mergestream.methods.listing import FORWARDS, summary_of
from mergestream.methods.mean import Mean
from mergestream.runtime import open_table, plugins
from mergestream.runtime.parallel import run_jobs

PLUGIN = '''
"""A file of a user."""
from dataclasses import dataclass
import mergestream as ms

@ms.register_method("{name}")
@dataclass(kw_only=True, eq=False, repr=False)
class Confident(ms.Method):
    """The expert with the largest logit answers."""
    scale: float = {scale}

    def advance(self, batch, state):
        logits = self.pool.logits_of_views(batch)["original"]
        return ms.Step(self.scale * logits.amax(dim=0)), state
'''


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Nothing that a test registers is left after it."""
    live = [METHODS._registered, DATASETS._registered, plugins._registering, plugins._loaded]
    before = [each.copy() for each in live]
    yield
    for table in (METHODS, DATASETS):
        vars(table).pop("_offered", None)
    for each, old in zip(live, before, strict=True):
        each.clear()
        each.update(old)


@dataclass(kw_only=True, eq=False, repr=False)
class Sharpest(ms.Method):
    """The mean of the experts' logits, sharpened."""

    name: ClassVar[str] = "sharpest"
    power: float = 2.0

    def advance(self, batch: Any, state: Any) -> tuple[ms.Step, Any]:
        return ms.Step(self.power * self.pool.logits_of_views(batch)["original"].mean(dim=0)), state


def write_plugin(path: Path, name: str = "confident", scale: float = 1.0) -> Path:
    path.write_text(PLUGIN.format(name=name, scale=scale))
    return path


# --- registration -----------------------------------------------------------------------------------------------


def test_a_registered_method_is_named_like_ours() -> None:
    assert ms.register_method(Sharpest) is Sharpest
    assert ms.list_methods()[-1] == "sharpest"
    pool = make_pool("vit")
    step = ms.create_method("corrected", pool, base="sharpest(power=3)").step(make_images())
    assert step.logits.shape == (6, 5)
    with pytest.raises(ms.MergestreamError, match="Did you mean 'power'"):
        ms.create_method("sharpest", pool, powr=1)


def test_names_that_are_taken_and_classes_that_are_none_are_refused() -> None:
    ms.register_method("sharpest", Sharpest)
    ms.register_method(Sharpest)  # the same definition again
    other = type("Other", (Sharpest,), {"__module__": __name__})
    for arguments, message in (
        (("sharpest", other), "already a method 'sharpest', of .*test_extension.py:Sharpest"),
        (("mean", type("Mine", (Mean,), {})), "of mergestream itself: choose another"),
        (("x", Sharpest), "calls itself 'sharpest', not 'x'"),
        (("x", print), "is no method: a class that inherits"),
        (("no name", type("Mine", (Mean,), {})), "letters, digits and underscores"),
        ((type("Mine", (ms.Method,), {}),), "is no method"),
        ((type("Mine", (Mean,), {}),), "of mergestream itself"),
    ):
        with pytest.raises(ms.MergestreamError, match=message):
            ms.register_method(*arguments)


def tiny(images: int = 12) -> ms.Dataset:
    generator = torch.Generator().manual_seed(0)
    domains: dict[str, ms.DomainData] = {}
    for domain in ("north", "south"):
        pixels = torch.randint(0, 256, (images, 3, 8, 8), dtype=torch.uint8, generator=generator)
        domains[domain] = ms.DomainData("tiny", domain, ("a", "b"), pixels, torch.arange(images) % 2)
    return ms.Dataset("tiny", ("a", "b"), tuple(domains), ("hflip",), True, domains.__getitem__)


CARD = DatasetCard("tiny", "Two sites of noise", "nothing", "public domain", "this test")


def test_a_registered_data_set_is_named_like_ours() -> None:
    ms.register_dataset(CARD)(tiny)
    assert len(ms.load_dataset("tiny", images=10)["north"]) == 10
    listed = command("data", "list")
    assert "Two sites of noise" in listed.stdout
    assert "test_extension.py:tiny" in listed.stdout
    with pytest.raises(ms.MergestreamError, match="already a data set"):
        ms.register_dataset(GeneratedSource(CARD, lambda: tiny()))
    with pytest.raises(ms.MergestreamError, match="no source of a data set"):
        ms.register_dataset(tiny)  # type: ignore[arg-type]


# --- entry points -----------------------------------------------------------------------------------------------


def offer(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(open_table, "entry_points", lambda group: [p for p in points if p.group == group])
    for table in (METHODS, DATASETS):
        vars(table).pop("_offered", None)


def test_a_broken_package_gives_one_sentence_and_breaks_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = "mergestream.methods"
    offer(
        monkeypatch,
        EntryPoint("sharpest", f"{__name__}:Sharpest", group),
        EntryPoint("gone", "no_such_package:Method", group),
        EntryPoint("twice", f"{__name__}:Sharpest", group),
        EntryPoint("twice", "other:Method", group),
        EntryPoint("mean", "impostor:Mean", group),
    )
    assert {"gone", "sharpest", "twice"} <= set(ms.list_methods())
    assert ms.create_method("sharpest", make_pool("vit")).name == "sharpest"
    assert METHODS["mean"] is Mean
    assert "The method 'mean' of impostor:Mean is ignored" in caplog.text
    with pytest.raises(ms.MergestreamError, match="'gone' of no_such_package:Method cannot be used: ModuleNotFound"):
        ms.create_method("gone", make_pool("vit"))
    with pytest.raises(ms.MergestreamError, match="Several packages offer the method 'twice'"):
        METHODS["twice"]
    assert "sharpest" in METHODS.usable()
    assert not {"gone", "twice"} & set(METHODS.usable())
    listed = command("methods")
    assert listed.returncode == 0
    assert "gone [plugin: no_such_package:Method]: The method 'gone' of no_such_package:Method" in listed.stdout
    assert command("methods", "gone").returncode == 1


def test_packages_are_imported_only_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: EntryPoint) -> None:
        raise AssertionError("imported")

    offer(monkeypatch, EntryPoint("lazy", "somewhere:Lazy", "mergestream.methods"))
    monkeypatch.setattr(EntryPoint, "load", refuse)
    assert "lazy" in METHODS
    assert "lazy" in ms.list_methods()
    assert ms.create_method("mean", make_pool("vit")).name == "mean"


# --- plugins ----------------------------------------------------------------------------------------------------


def test_a_file_is_a_plugin_and_its_methods_are_listed(tmp_path: Path) -> None:
    file = write_plugin(tmp_path / "mine.py")
    listed = command("methods", "confident", "--plugin", str(file))
    assert listed.returncode == 0, listed.stderr
    place = f"confident [plugin: {file}:Confident]"
    assert listed.stdout.splitlines() == [
        f"{place}: The expert with the largest logit answers.",
        "    scale=1.0",
    ]
    assert json.loads(command("methods", "confident", "--json").stdout)[0]["options"] == {"scale": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "cannot be loaded. ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 +", "cannot be loaded. SyntaxError: invalid syntax (bad.py, line 1)"),
        ("raise SystemExit(3)", "cannot be loaded. SystemExit: 3"),
        ("x = 1", "registers nothing"),
        (PLUGIN.format(name="mean", scale=1.0), "of mergestream itself"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_wrong_usage(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(text)
    done = command("data", "list", "--plugin", str(tmp_path / "bad.py"))
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_a_plugin_that_is_not_there_is_wrong_usage() -> None:
    for name in ("no_such_module", "nowhere.py"):
        done = command("data", "list", "--plugin", name)
        assert done.returncode == 2
        assert name in done.stderr
    assert "mergestream: There is no plugin file " in done.stderr


def named(name: str) -> tuple[str, bool]:
    """A job: the module of a method, in the process that runs it."""
    return METHODS[name].__module__, name in ms.list_methods()


@pytest.mark.slow
def test_worker_processes_load_the_same_plugins(tmp_path: Path) -> None:
    plugins.load_plugins([str(write_plugin(tmp_path / "mine.py"))])
    results = run_jobs(named, [("confident",), ("confident",)], workers=2, on_done=lambda: None)
    assert results == [(METHODS["confident"].__module__, True)] * 2


# --- provenance -------------------------------------------------------------------------------------------------


def provenance_of(file: Path) -> dict[str, Any]:
    for name in [name for name in sys.modules if name.startswith(f"plugin_{file.stem}")]:
        del sys.modules[name]
    plugins._loaded.clear()
    METHODS._registered.pop("confident", None)
    plugins.load_plugins([str(file)])
    return ms.create_method("confident", make_pool("vit"), scale=1.0).provenance


def test_another_source_is_another_provenance(tmp_path: Path) -> None:
    file = write_plugin(tmp_path / "mine.py")
    first, again = provenance_of(file), provenance_of(file)
    assert first == again
    assert first["plugin"]["package"] == "mine"
    file.write_text(file.read_text().replace("amax", "amin"))
    assert provenance_of(file) != first
    wrapped = ms.create_method("corrected", make_pool("vit"), base="confident").provenance["wrapped"]
    assert wrapped["plugin"] == provenance_of(file)["plugin"]


def test_our_own_methods_have_the_provenance_they_had() -> None:
    assert all("plugin" not in ms.create_method(name, make_pool("vit")).provenance for name in ("mean", "ensemble"))


def test_a_method_that_was_typed_in_is_never_taken_for_an_earlier_one() -> None:
    kinds = []
    for _ in range(2):
        space: dict[str, Any] = {"ms": ms, "__name__": "typed_in"}
        exec("class Typed(ms.Method):\n    def advance(self, b, s):\n        return 1, s\n", space)
        kinds.append(plugins.plugin_provenance(space["Typed"]))
    assert kinds[0] != kinds[1]
    assert plugins.plugin_provenance(space["Typed"]) == kinds[1]


def test_listed_forwards_are_those_that_are_counted() -> None:
    pools = {count: make_pool("vit", NAMES[:count], base=True, statistics=True) for count in (2, 3)}
    assert set(FORWARDS) == set(METHODS.own)
    for name, text in FORWARDS.items():
        first = text.partition("(at first ")[2].rstrip(")") or text
        for count, pool in pools.items():
            step = ms.create_method(name, pool, **({"expert": "brest"} if name == "single_expert" else {})).step(
                make_images()
            )
            listed = eval(first.replace("2K", "2*K"), {"K": count})
            assert step.expert_forwards + step.merged_forwards == listed, name
        assert len(summary_of(name).summary) > 20
    with pytest.raises(ms.MergestreamError, match="Did you mean 'mean'"):
        summary_of("meen")


def test_a_plugin_is_charged_what_was_counted_and_its_memory_is_not_made_up() -> None:
    step = {"images": 4, "expert_forwards": 3.0, "merged_forwards": 2.0, "backwards": 0.0}
    arguments = {"method": "mine", "plugin": {}, "options": {}, "pool": {"experts": ["a", "b"]}}
    run: Any = SimpleNamespace(label="mine", is_single=False, arguments=arguments, steps=[step])
    (cost,) = costs([run])
    assert cost.forwards == 5
    assert cost.at_start == "memory is not measured: one merged model is assumed"
