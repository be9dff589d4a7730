"""The report in a real browser: Debian's chromium, headless, without a network."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benching import bench_arguments, command, write_consortium
from mergestream.bench.drift.pool_drift import analyse_drift
from mergestream.bench.report.report_page import make_report
from mergestream.runtime.parallel import quiet

pytestmark = pytest.mark.slow

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
METHODS = "entropy_adaptive(head=entropy_gap|shared), mean, ensemble, ties"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of a tiny benchmark, or of REPORT_UNDER_TEST where that names a page."""
    if "REPORT_UNDER_TEST" in os.environ:
        return Path(os.environ["REPORT_UNDER_TEST"]).resolve().as_uri()
    folder = tmp_path_factory.mktemp("browser")
    write_consortium(folder)
    done = command(*bench_arguments(folder, folder / "runs", "--methods", METHODS, "--seeds", "0"))
    assert done.returncode == 0, done.stderr
    analyse_drift(folder / "pool").save(folder / "drift.json")
    make_report(folder / "runs", folder / "report.html", quiet, command="again", drift=folder / "drift.json")
    return (folder / "report.html").as_uri()


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Any]:
    contexts, troubles = [], []

    def opened(viewport: dict[str, int] = DESKTOP, scheme: str = "light") -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: troubles.append(request.url) if request.url != address else 0)
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not [each for each in troubles if not each.startswith("data:")]


def column(page: Any, table: str, number: int) -> list[str]:
    return page.locator(f"{table} tbody tr:visible > :nth-child({number})").all_inner_texts()


def test_clicking_a_heading_sorts(open_page: Any) -> None:
    page = open_page()
    table = page.locator(".table").first.get_attribute("id")
    before = column(page, f"#{table}", 1)
    heading = page.locator(f"#{table} thead th").nth(1)
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    numbers = [float(text.split()[0]) for text in column(page, f"#{table}", 2)]
    assert numbers == sorted(numbers, reverse=True)
    heading.locator("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    numbers = [float(text.split()[0]) for text in column(page, f"#{table}", 2)]
    assert numbers == sorted(numbers)
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "none"
    assert column(page, f"#{table}", 1) == before


def test_a_hidden_method_is_hidden_everywhere(open_page: Any) -> None:
    page = open_page()
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    mine = page.locator('[data-method="mean"]')
    rows, lines = (
        page.locator('tr[data-method="mean"]:visible').count(),
        page.locator('svg [data-method="mean"]').count(),
    )
    assert rows >= 5
    assert lines >= 3
    box = page.locator('#methods input[value="mean"]')
    box.uncheck()
    assert mine.locator("visible=true").count() == 0
    assert "of" in page.locator("#shown").inner_text()
    assert page.locator('tr[data-method="entropy_adaptive"]:visible').count() >= 5
    box.press("Space")
    assert page.locator('tr[data-method="mean"]:visible').count() == rows
    page.locator('[data-choose="plain"]').click()
    assert page.locator('tr[data-method="entropy_adaptive(head=shared)"]:visible').count() == 0
    page.locator('[data-choose="none"]').click()
    assert page.locator("tr[data-method]:visible").count() == 0
    page.locator('[data-choose="all"]').click()
    assert page.locator('tr[data-method="mean"]:visible').count() == rows


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button(open_page: Any, scheme: str) -> None:
    page = open_page(scheme=scheme)

    def brightness() -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.strip("rgb()").split(",")[:3]) / 765

    assert (brightness() > 0.5) == (scheme == "light")
    page.locator("#theme").click()
    assert (brightness() > 0.5) == (scheme == "dark")
    page.reload()
    assert (brightness() > 0.5) == (scheme == "dark")  # it is remembered
    page.locator("#theme").click()
    assert (brightness() > 0.5) == (scheme == "light")


def test_every_figure_is_drawn_and_told(open_page: Any) -> None:
    page = open_page()
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    figures = page.locator("svg, img").all()
    assert len(figures) >= 6
    for figure in figures:
        box = figure.bounding_box()
        assert box["width"] > 100
        assert box["height"] > 60
        text = figure.get_attribute("aria-label") or figure.get_attribute("alt")
        assert len(text) > 40
    drawn = "[...document.querySelectorAll('svg')].every((each) => each.getBBox().width > 50)"
    assert page.evaluate(drawn)
    assert page.locator("figure").count() == page.locator("figure > figcaption").count()


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page: Any, viewport: dict[str, int], scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(viewport, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    report = Axe().run(page).response
    assert report["passes"]
    grave = [
        (each["id"], each["nodes"][0]["html"][:200])
        for each in report["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert not grave


def test_the_page_fits_a_phone(open_page: Any) -> None:
    page = open_page(PHONE)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    wide = "[...document.querySelectorAll('.scroll')].some((each) => each.scrollWidth > each.clientWidth)"
    assert page.evaluate(wide)  # inside their own boxes


def test_the_keyboard_reaches_the_tools_and_the_tables(open_page: Any) -> None:
    page = open_page()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "print", "SUMMARY", "BUTTON", "A"} <= set(reached)


def test_tables_are_copied(open_page: Any) -> None:
    page = open_page()
    page.locator(".export").first.locator("summary").click()
    button = page.locator(".copy").first
    button.click()
    page.wait_for_function("['Copied', 'Selected: press Ctrl+C'].includes(document.querySelector('.copy').textContent)")


def test_on_paper_it_is_light_and_open(open_page: Any) -> None:
    page = open_page(scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".tools").is_visible()
    page.set_viewport_size({"width": 690, "height": 980})  # A4 within its margins
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details.fold:not([open])").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 690
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.pdf()[:5] == b"%PDF-"


def test_the_contents_stay_in_view_and_variants_are_folded(open_page: Any) -> None:
    page = open_page()
    variant = page.locator('#results tr[data-method="entropy_adaptive(head=shared)"]').first
    assert not variant.is_visible()
    page.locator("#results .unfold").first.click()
    assert variant.is_visible()
    assert page.locator("#ablation tr.variant").first.is_visible()
    page.locator("#provenance").scroll_into_view_if_needed()
    assert page.locator("nav a").first.bounding_box()["y"] >= 0


def test_a_wide_table_says_so(open_page: Any) -> None:
    page = open_page(PHONE)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.wait_for_function("document.querySelectorAll('.scroll.wide').length > 0")
    wide = page.locator(".table:has(.scroll.wide)").first
    assert wide.locator(".hint").is_visible()
    assert wide.locator(".scroll").get_attribute("tabindex") == "0"
