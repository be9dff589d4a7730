"""The dashboard in a real browser (Debian's chromium) over the real service, or over a stand-in for it."""

import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benching import command, pool_on_disk
from dashboard_standin import StandIn, served
from mergestream.data.datasets.standins.drawing import CLASSES, SITES

pytestmark = pytest.mark.slow

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CHARTS = ("encoder", "head", "entropy", "predictions", "latency")
# Experts that nobody trained are unsure of everything, and the guard rails would be right to say so of every batch.
CALM = ("--guard", "near_uniform=1", "--guard", "equal_within=0", "--guard", "saturated=1000")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>&amp;"
# Whether the encoder's chart is filled in the middle of each of the first steps' slots.
FILLED = """(steps) => {
  const plot = document.querySelector('#figure-encoder .u-over');
  const canvas = document.querySelector('#figure-encoder canvas');
  const y = (plot.offsetTop + plot.clientHeight * 0.47) * devicePixelRatio;
  const row = canvas.getContext('2d').getImageData(0, y, canvas.width, 1).data;
  const middle = (step) => Math.round((plot.offsetLeft + (step + 0.5) * plot.clientWidth / 24) * devicePixelRatio);
  return [...Array(steps).keys()].map((step) => row[4 * middle(step) + 3] > 0);
}"""
Pictures = Sequence[np.ndarray]


def gradients(seed: int, count: int = 4) -> Pictures:
    """Smooth pictures uint8 [16,16,3], in which no guard rail sees noise."""
    dice = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:16, 0:16] / 15
    slopes = dice.uniform(60, 120, (count, 3, 2))
    planes = slopes[..., :1, None] * rows + slopes[..., 1:, None] * columns
    return list(planes.transpose(0, 2, 3, 1).astype(np.uint8))


def black(count: int = 4) -> Pictures:
    return [np.zeros((16, 16, 3), np.uint8)] * count


def form_of(pictures: Pictures, folder: Path) -> tuple[bytes, str]:
    """A multipart form of PNG files."""
    boundary, parts = uuid.uuid4().hex, b""
    for picture in pictures:
        file = folder / "one.png"
        Image.fromarray(picture).save(file)
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="images"; filename="x.png"\r\n'
        parts += f"{head}Content-Type: image/png\r\n\r\n".encode() + file.read_bytes() + b"\r\n"
    return parts + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


class Running:
    """A real `mergestream serve` at a free port."""

    def __init__(self, folder: Path, pool: Path, *arguments: str) -> None:
        self.folder = folder
        line = [
            sys.executable,
            "-m",
            "mergestream",
            "serve",
            str(pool),
            "--port",
            "0",
            "--state",
            str(folder / "state"),
        ]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = (folder / "serve.log").open("w")
        self.process = subprocess.Popen([*line, *arguments], stderr=log, stdout=log, env=variables)
        log.close()
        self.address = self._when_ready() + "/"

    def _when_ready(self) -> str:
        for _ in range(600):
            log = (self.folder / "serve.log").read_text()
            if ready := re.search(r"Ready: (http://[^ ]+)", log):
                return ready[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        self.stop()
        raise AssertionError(log)

    def send(self, stream: str, pictures: Pictures, token: str | None = None) -> None:
        body, kind = form_of(pictures, self.folder)
        headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(f"{self.address}v1/streams/{stream}/batches", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


pool = pool_on_disk


@pytest.fixture(scope="module")
def service(browser: Any, pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Without tokens, at loopback. Each test has streams of its own. Without a browser it is not started."""
    running = Running(tmp_path_factory.mktemp("service"), pool, *CALM)
    yield running
    running.stop()


@contextmanager
def opened(
    browser: Any,
    address: str,
    viewport: dict[str, int] = DESKTOP,
    scheme: str = "light",
    expected: str = "^$",
    is_cut_off: bool = False,
) -> Iterator[Any]:
    """A page on which nothing goes wrong but what is expected, and which asks no other host for anything.

    A page that is cut off gets its own files but no data.
    """
    context = browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
    troubles: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    origin = re.match(r"http://[^/]+/", address)[0]  # type: ignore[index]
    page.on("request", lambda request: troubles.append(request.url) if not request.url.startswith(origin) else None)
    if is_cut_off:
        page.route("**/v1/**", lambda route: route.abort())
    page.goto(address)
    yield page
    context.close()
    assert not [each for each in troubles if not re.search(expected, each)]


def drawn(page: Any, chart: str = "encoder") -> str:
    page.wait_for_selector(f"#figure-{chart} .chart")
    return page.locator(f"#figure-{chart} .chart").get_attribute("aria-label")


def until(page: Any, condition: str) -> None:
    page.wait_for_function(f"() => {condition}")  # a bare expression would be eval'ed, which the page's policy forbids


def wait_for_step(page: Any, step: int) -> None:
    until(page, f"document.querySelector('#step ~ output')?.textContent.startsWith('{step} (newest)')")


def grave_findings(page: Any) -> list[tuple[str, str]]:
    from axe_playwright_python.sync_playwright import Axe

    report = Axe().run(page).response
    assert report["passes"]
    grave = [each for each in report["violations"] if each["impact"] in ("serious", "critical")]
    return [(each["id"], node["html"][:200]) for each in grave for node in each["nodes"]]


def test_from_the_first_batch_to_an_alarm(browser: Any, service: Running) -> None:
    with opened(browser, service.address) as page:
        page.wait_for_selector("text=No stream yet")
        shown = page.locator("#panel pre").inner_text()
        assert shown.startswith("curl -F images=@")
        assert shown.endswith(f"{service.address}v1/streams/my-scanner/batches")
        assert page.locator("#state-text").inner_text() == "Live"
        assert page.locator("#experts .name").all_inner_texts() == sorted(SITES)

        for number in range(3):
            service.send("north", gradients(number))
        service.send("south", gradients(9, count=6))
        wait_for_step(page, 2)
        for chart in CHARTS:
            assert "At step 2" in drawn(page, chart)
        assert all(site in drawn(page) for site in SITES)
        answers = page.locator("#figure-predictions .legend b").all_inner_texts()
        assert len(answers) == len(CLASSES)
        assert sum(map(int, answers)) == 4
        assert page.locator("#alarm-list li").all_inner_texts() == []
        assert page.locator("#no-alarms").inner_text() == "None on the last batch of any stream."

        service.send("north", gradients(4))
        wait_for_step(page, 3)
        assert "steps 0 to 3" in drawn(page)
        until(page, "document.querySelector('#numbers [data-key=Images] b').textContent === '22'")
        assert float(page.locator("#numbers [data-key='Latency p50'] b").inner_text()) > 0

        service.send("south", black())
        alarm = page.locator("#alarm-list li")
        alarm.wait_for()
        assert "Warning" in alarm.inner_text()
        assert "blank_pictures" in alarm.inner_text()
        assert page.title() == "(1) mergestream"
        assert page.locator("#tabs [data-key=south]").inner_text().count("Warning") == 1
        alarm.locator("button.link").click()
        until(page, "document.querySelector('#stream-title').textContent === 'south'")
        page.wait_for_selector("#findings-title ~ .scroll tbody tr")
        service.send("south", black())
        until(page, "document.querySelector('#findings-title ~ .scroll td').textContent === '1 to 2'")
        assert page.locator("#figure-encoder .finding-mark").count() == 2


def test_streams_are_chosen_by_keyboard(browser: Any, service: Running) -> None:
    for stream in ("a-one", "a-two"):
        service.send(stream, gradients(1))
    with opened(browser, f"{service.address}#stream=a-one") as page:
        drawn(page)
        title = page.locator("#stream-title")
        assert title.inner_text() == "a-one"
        page.locator("[role=tab][aria-selected=true]").focus()
        page.keyboard.press("ArrowDown")
        assert title.inner_text() == "a-two"
        assert page.evaluate("document.activeElement.dataset.key") == "a-two"
        page.keyboard.press("ArrowLeft")
        assert title.inner_text() == "a-one"
        page.keyboard.press("End")
        assert title.inner_text() == page.locator("[role=tab]").last.get_attribute("data-key")
        page.keyboard.press("ArrowRight")  # round to the first
        assert title.inner_text() == page.locator("[role=tab]").first.get_attribute("data-key")
        assert page.locator("[role=tab][tabindex='0']").count() == 1
        page.reload()
        drawn(page)
        assert title.inner_text() == page.locator("[role=tab]").first.get_attribute("data-key")


def test_the_keyboard_reaches_everything(browser: Any, service: Running) -> None:
    for number in range(2):
        service.send("b-keys", gradients(number))
    with opened(browser, f"{service.address}#stream=b-keys") as page:
        drawn(page)
        reached = []
        for _ in range(45):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert {"pause", "token-open", "theme", "stream", "step", "reload", "Reset averages"} <= set(reached)
        assert sum(each.startswith("Show as table") for each in set(reached)) == len(CHARTS)


def test_a_chart_is_a_table_too(browser: Any, service: Running) -> None:
    for number in range(3):
        service.send("c-table", gradients(number))
    with opened(browser, f"{service.address}#stream=c-table") as page:
        sentence = drawn(page)
        button = page.locator("#figure-encoder button")
        button.press("Enter")
        assert button.get_attribute("aria-expanded") == "true"
        assert page.locator("#encoder-table thead th").all_inner_texts() == ["Step", "Time", *sorted(SITES)]
        newest = page.locator("#encoder-table tbody tr").first.locator("th, td").all_inner_texts()
        assert newest[0] == "2"
        assert sum(map(float, newest[2:])) == pytest.approx(1, abs=0.02)
        assert all(value in sentence for value in newest[2:])
        assert not page.locator("#figure-encoder .picture").is_visible()
        service.send("c-table", gradients(7))
        until(page, "document.querySelector('#encoder-table tbody th').textContent === '3'")
        button.click()
        assert "At step 3" in drawn(page)


def test_earlier_steps_are_looked_at(browser: Any, service: Running) -> None:
    for number in range(4):
        service.send("d-steps", gradients(number))
    with opened(browser, f"{service.address}#stream=d-steps") as page:
        wait_for_step(page, 3)
        page.locator("#step").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        step_text = page.locator("#step ~ output")
        assert step_text.inner_text().startswith("1, ")
        assert page.locator("#figure-head .picked").is_visible()
        service.send("d-steps", gradients(8))
        until(page, "document.querySelector('#step').max === '4'")
        assert step_text.inner_text().startswith("1, ")  # stays where the reader looks
        page.keyboard.press("End")
        assert step_text.inner_text().startswith("4 (newest)")
        page.locator("#figure-entropy").scroll_into_view_if_needed()
        box = page.locator("#figure-entropy .chart").bounding_box()
        page.mouse.move(box["x"] + 50, box["y"] + 80)
        until(page, "document.querySelector('#step ~ output').textContent.startsWith('0, ')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button(browser: Any, service: Running, scheme: str) -> None:
    with opened(browser, service.address, scheme=scheme) as page:

        def is_light() -> bool:
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            return sum(int(part) for part in colour.strip("rgb()").split(",")[:3]) > 765 / 2

        assert is_light() == (scheme == "light")
        page.locator("#theme").click()
        assert is_light() == (scheme == "dark")
        page.reload()
        until(page, "document.documentElement.dataset.theme")
        assert is_light() == (scheme == "dark")  # it is remembered


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, service: Running, viewport: dict[str, int], scheme: str) -> None:
    service.send("e-axe", gradients(3))
    service.send("e-axe", black())
    with opened(browser, f"{service.address}#stream=e-axe", viewport, scheme) as page:
        drawn(page)
        page.locator("#figure-head button").click()
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        page.locator("#token-open").click()
        assert not grave_findings(page)
        page.locator("#reload").click()
        page.wait_for_selector("#confirm[open]")
        assert not grave_findings(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_what_an_administrator_does(browser: Any, service: Running) -> None:
    service.send("f-admin", gradients(3))
    first = sorted(SITES)[0]
    with opened(browser, f"{service.address}#stream=f-admin") as page:
        card = page.locator(f"#experts [data-key={first}]")
        card.locator("button").click()
        page.keyboard.press("Escape")
        assert card.locator(".onoff").inner_text() == "on"
        card.locator("button").click()
        page.locator("#confirm-yes").click()
        until(page, f"document.querySelector('#experts [data-key={first}] .onoff').textContent === 'off'")
        assert page.locator("#announcement").inner_text() == f"{first} was switched off."
        service.send("f-admin", gradients(4))
        until(page, f"document.querySelector('#figure-encoder .chart').ariaLabel.includes('{first} 0.00')")
        card.locator("button").click()
        page.locator("#confirm-yes").click()
        until(page, f"document.querySelector('#experts [data-key={first}] .onoff').textContent === 'on'")
        for name, announcement in (("Reset averages", "f-admin was reset."), ("Delete stream", "f-admin was deleted.")):
            page.locator("#panel").get_by_role("button", name=name).click()
            page.locator("#confirm-yes").click()
            until(page, f"document.querySelector('#announcement').textContent === '{announcement}'")
        until(page, "!document.querySelector('#tabs [data-key=f-admin]')")
        page.locator("#reload").click()
        page.locator("#confirm-yes").click()
        until(page, "document.querySelector('#announcement').textContent === 'The pool was reloaded.'")


def test_a_pause_holds_the_page(browser: Any, service: Running) -> None:
    service.send("g-pause", gradients(3))
    with opened(browser, f"{service.address}#stream=g-pause") as page:
        wait_for_step(page, 0)
        page.locator("#pause").click()
        service.send("g-pause", gradients(4))
        page.wait_for_timeout(1800)
        assert page.locator("#step ~ output").inner_text().startswith("0 ")
        assert page.locator("#state-text").inner_text().startswith("Paused at ")
        page.locator("#pause").click()
        wait_for_step(page, 1)


def test_tokens_roles_and_a_lost_connection(browser: Any, pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    tokens = {
        role: command("serve-token", "--name", role, "--role", role, "--tokens", str(file)).stdout.strip()
        for role in ("client", "administrator")
    }
    running = Running(tmp_path, pool, *CALM, "--tokens", str(file))
    try:
        running.send("ward", gradients(0), tokens["client"])
        with opened(browser, running.address, expected="40[13]|ERR_CONNECTION_REFUSED|Failed to fetch|503") as page:
            page.wait_for_selector("#token:visible")
            assert page.locator("#state-text").inner_text() == "Not signed in."
            page.keyboard.type(tokens["client"])  # the field has the focus
            page.keyboard.press("Enter")
            drawn(page)
            assert not page.locator("#token").is_visible()
            until(page, "document.querySelector('#reload').hidden")  # a client is offered nothing it may not do
            page.locator("#token-open").click()
            page.wait_for_selector("#token:visible")
            page.keyboard.type(tokens["administrator"])
            page.keyboard.press("Enter")
            page.wait_for_selector("#reload:visible")
            page.locator("#reload").click()
            page.locator("#confirm-yes").click()
            until(page, "document.querySelector('#announcement').textContent === 'The pool was reloaded.'")
            assert page.locator("#messages [role=alert]").count() == 0
            assert page.evaluate("Object.keys(localStorage)") == []
            running.stop()
            page.wait_for_selector("[data-state=lost]")
            until(page, "/lost since \\d\\d:\\d\\d:\\d\\d/.test(document.querySelector('#state-text').textContent)")
            assert "At step 0" in drawn(page)  # what was there stays
    finally:
        running.stop()


# --- what the page knows, and what it does not ----------------------------------------------------------------

BLANK = {"code": "blank_pictures", "severity": "warning", "sentence": "4 of 4 images are blank."}
DRIFT = {"code": "entropy_drift", "severity": "alarm", "sentence": "The entropies have changed."}
STATES = [(viewport, scheme) for viewport in (DESKTOP, PHONE) for scheme in ("light", "dark")]


def alarmed(*findings: dict[str, str], **options: Any) -> StandIn:
    """Two wards: one with these findings on its last batch, the other without any."""
    standin = StandIn(["lyon", "brest"], ["a", "b"], **options)
    standin.add_step("calm-ward")
    standin.add_step("ward", findings=list(findings))
    return standin


def assert_fits(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not grave_findings(page)


@pytest.mark.parametrize(("viewport", "scheme"), STATES)
def test_before_sign_in_nothing_is_claimed(browser: Any, viewport: dict[str, int], scheme: str) -> None:
    with (
        served(alarmed(DRIFT, token="right")) as address,
        opened(browser, address, viewport, scheme, expected="401") as page,
    ):
        page.wait_for_selector("#token:visible")
        text = page.locator("body").inner_text()
        assert "None" not in text
        assert not any(part in text for part in ("Alarms\n", "Pool\n", "Streams\n", "No stream"))
        assert page.locator("#state-text").inner_text() == "Not signed in."
        assert page.locator("#no-data-title").inner_text() == "Not signed in"
        assert page.title() == "(not signed in) mergestream"
        assert_fits(page)


def test_a_wrong_or_expired_token_is_not_signed_in(browser: Any) -> None:
    standin = alarmed(DRIFT, token="right")
    with served(standin) as address, opened(browser, address, expected="401") as page:
        page.wait_for_selector("#token:visible")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#token:visible")
        assert "None" not in page.locator("body").inner_text()
        until(page, "document.querySelector('#state-text').textContent === 'Not signed in: the token was refused.'")
        page.locator("#token").fill("right")
        page.keyboard.press("Enter")
        page.wait_for_selector("#alarm-list li.alarm")
        assert "At step 0" in drawn(page)
        standin.token = "another"  # this one has expired
        page.wait_for_selector("[data-state=signed-out]")
        assert not page.locator("#content").is_visible()
        assert "ward" not in page.locator("body").inner_text()
        standin.token = "right"
        page.wait_for_selector("#alarm-list li.alarm")
        assert not page.locator("#token").is_visible()
        page.locator("#token-open").click()
        page.locator("#token-forget").click()
        page.wait_for_selector("[data-state=signed-out]")
        assert "entropy_drift" not in page.locator("body").inner_text()


@pytest.mark.parametrize(("viewport", "scheme"), STATES)
def test_alarms_that_are_unknown_are_not_none(browser: Any, viewport: dict[str, int], scheme: str) -> None:
    standin = alarmed(unknown={"ward"})
    with served(standin) as address, opened(browser, address, viewport, scheme) as page:
        line = page.locator("#alarm-list li")
        line.wait_for()
        assert "Unknown since the service was restarted" in line.inner_text()
        assert page.locator("#no-alarms").inner_text() == ""
        assert "Unknown" in page.locator("#tabs [data-key=ward]").inner_text()
        assert "Unknown" not in page.locator("#tabs [data-key=calm-ward]").inner_text()
        assert_fits(page)
        standin.unknown.clear()  # after its next batch
        until(page, "document.querySelector('#no-alarms').textContent === 'None on the last batch of any stream.'")


@pytest.mark.parametrize(("viewport", "scheme"), STATES)
def test_an_alarm_is_acknowledged_by_a_person(browser: Any, viewport: dict[str, int], scheme: str) -> None:
    standin = alarmed(BLANK, DRIFT)
    with served(standin) as address, opened(browser, address, viewport, scheme) as page:
        first = page.locator("#alarm-list li").first
        first.wait_for()
        assert "entropy_drift" in first.inner_text()  # an alarm comes before a warning
        assert "Since 16 Nov 2026, " in first.inner_text() or "Since 08:15:00" in first.inner_text()
        assert "step 0. What to do: Check the scanner." in first.inner_text()
        assert "Not acknowledged." in first.inner_text()
        first.get_by_role("button", name="Acknowledge").click()
        page.wait_for_selector("#confirm[open]")
        assert page.evaluate("document.activeElement.id") == "person"
        assert "all 2 alarms of ward" in page.locator("#confirm-title").inner_text()
        assert_fits(page)
        page.keyboard.press("Enter")
        assert page.locator("#confirm").is_visible()  # not without a name
        page.keyboard.type("Dr. Grace")
        page.locator("#note").fill("scanner 2 is stopped")
        page.locator("#confirm-yes").click()
        until(
            page,
            "document.querySelectorAll('.acknowledgement')[1].textContent.startsWith('Acknowledged by Dr. Grace, ')",
        )
        assert standin.changes == [
            ("POST", "/v1/streams/ward/acknowledge", {"name": "Dr. Grace", "note": "scanner 2 is stopped"})
        ]
        assert page.title() == "(2) mergestream"  # an acknowledged alarm is still there
        assert page.get_by_role("button", name="Acknowledge").count() == 0
        assert_fits(page)


def test_only_administrators_may_acknowledge(browser: Any) -> None:
    with served(alarmed(DRIFT, extra={"administrator": False})) as address, opened(browser, address) as page:
        page.wait_for_selector("#alarm-list li")
        assert "Not acknowledged." in page.locator("#alarm-list").inner_text()
        assert not page.locator("#alarm-list [data-administrator]").is_visible()


@pytest.mark.parametrize(("viewport", "scheme"), STATES)
def test_without_a_connection_the_data_are_marked_as_old(browser: Any, viewport: dict[str, int], scheme: str) -> None:
    with served(alarmed()) as address, opened(browser, address, viewport, scheme, "ERR_FAILED|Failed") as page:
        until(page, "document.querySelector('#no-alarms').textContent === 'None on the last batch of any stream.'")
        page.route("**/v1/**", lambda route: route.abort())
        page.wait_for_selector("[data-state=lost]")
        assert re.search(
            r"^None at the last update, \d\d:\d\d:\d\d\. What happened since then is unknown\.$",
            page.locator("#no-alarms").inner_text(),
        )
        assert re.search(r"Not current. Last update: \d\d:\d\d:\d\d", page.locator("#stale").inner_text())
        assert page.title() == "(not current) mergestream"
        assert_fits(page)
        page.unroute("**/v1/**")
        page.wait_for_selector("[data-state=live]")
        assert not page.locator("#stale").is_visible()


def test_a_page_that_was_never_answered_claims_nothing(browser: Any) -> None:
    with (
        served(alarmed()) as address,
        opened(browser, address, expected="ERR_FAILED", is_cut_off=True) as page,
    ):
        page.wait_for_selector("[data-state=lost]")
        assert page.locator("#no-data-title").inner_text() == "No data"
        assert "None" not in page.locator("body").inner_text()


def test_alarms_and_their_acknowledgement_outlive_a_restart(browser: Any, pool: Path, tmp_path: Path) -> None:
    running = Running(tmp_path, pool, *CALM)
    running.send("ward", gradients(1))
    running.send("ward", black())
    for acknowledged in (False, True):
        running.stop()
        running = Running(tmp_path, pool, *CALM)
        with opened(browser, running.address) as page:
            line = page.locator("#alarm-list li")
            line.wait_for()
            assert "blank_pictures" in line.inner_text()
            assert "step 1. What to do: " in line.inner_text()
            assert ("Acknowledged by Dr. Grace, " in line.inner_text()) == acknowledged
            assert "At step 1" in drawn(page)  # its steps are restored too
            if not acknowledged:
                line.get_by_role("button", name="Acknowledge").click()
                page.locator("#person").fill("Dr. Grace")
                page.locator("#confirm-yes").click()
                until(page, "document.querySelector('#alarm-list').textContent.includes('Acknowledged by Dr. Grace')")
    running.stop()


# --- names, numbers and streams beyond the usual --------------------------------------------------------------


def test_names_are_text(browser: Any) -> None:
    standin = StandIn([HOSTILE, "__proto__", "constructor"], [HOSTILE, "toString"])
    finding = {"code": HOSTILE, "severity": HOSTILE, "sentence": HOSTILE}
    standin.add_step(HOSTILE, findings=[finding])
    standin.refusal = (409, {"title": HOSTILE, "detail": HOSTILE, "code": HOSTILE})
    with served(standin) as address, opened(browser, address, expected="409") as page:
        drawn(page)
        assert page.locator("#stream-title").inner_text() == HOSTILE
        assert page.locator("#alarm-list .sentence").inner_text() == HOSTILE
        assert page.locator("#experts .name").all_inner_texts() == standin.experts
        page.locator("#experts button").first.click()
        page.locator("#confirm-yes").click()
        page.wait_for_selector("#messages [role=alert]")
        assert HOSTILE in page.locator("#messages").inner_text()
        page.locator("#figure-predictions button").click()
        assert page.locator("img, main script").count() == 0
        assert "owned" not in page.title()
        method, path, body = standin.changes[0]
        assert (method, body) == ("PUT", {"on": False})
        assert path.startswith("/v1/pool/experts/%3Cimg%20")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_many_of_everything(browser: Any, viewport: dict[str, int]) -> None:
    standin = StandIn([f"hospital-{k}" for k in range(19)], [f"class-{k}" for k in range(65)])
    for number in range(40):
        standin.add_step(f"scanner-{number}", seed=number)
    for _ in range(230):
        standin.add_step("scanner-7")
    with served(standin) as address, opened(browser, f"{address}#stream=scanner-7", viewport) as page:
        assert "steps 31 to 230" in drawn(page)
        assert page.locator("#figure-predictions .legend li").count() == 8
        assert "58 other classes" in page.locator("#figure-predictions .legend").inner_text()
        page.locator("#figure-predictions button").click()
        assert page.locator("#predictions-table tbody tr").count() == 200
        assert page.locator("#predictions-table thead th").count() == 2 + len(standin.classes)
        page.locator("#figure-predictions button").click()  # axe takes long over 13,000 cells
        page.locator("#filter").fill("scanner-3")
        assert page.locator("[role=tab]:visible").count() == 12  # 3, 30 to 39, and the chosen one
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        assert not grave_findings(page)


def test_a_batch_without_a_merged_model_is_told(browser: Any) -> None:
    standin = StandIn(["lyon", "brest"], ["a", "b"])
    for _ in range(3):
        standin.add_step("ward")
    standin.streams["ward"][1].update(
        encoder_coefficients={}, head_coefficients={}, entropies={"lyon": None, "brest": 0.2}
    )
    with served(standin) as address, opened(browser, address) as page:
        assert "At step 2" in drawn(page)
        assert page.evaluate(FILLED, 4) == [True, False, True, False]  # a gap, not a zero
        standin.add_step("ward")
        standin.streams["ward"][-1].update(encoder_coefficients={}, head_coefficients={})
        until(page, "document.querySelector('#figure-encoder .chart').ariaLabel.includes('there are none')")


def test_a_stream_begun_again_is_not_mixed_with_the_old_one(browser: Any) -> None:
    standin = StandIn(["lyon", "brest"], ["a", "b"])
    for _ in range(9):
        standin.add_step("ward")
    with served(standin) as address, opened(browser, address) as page:
        assert "steps 0 to 8" in drawn(page)
        standin.streams["ward"] = []
        standin.add_step("ward", seed=5)
        until(page, "document.querySelector('#figure-encoder .chart').ariaLabel.includes('steps 0 to 0')")


ESTIMATED = {
    "images": 1234,
    "accuracy": {
        "by_confidence": {"value": 0.912, "low": 0.897, "high": 0.927, "assumes": "Assumes calibration."},
        "by_threshold": {"value": 0.874, "low": 0.855, "high": 0.892, "assumes": "Assumes a threshold."},
    },
    "classes": [
        {"name": "benign", "value": 0.8, "low": 0.78, "high": 0.82, "declared": 0.98, "far": True},
        {"name": HOSTILE, "value": 0.2, "low": 0.18, "high": 0.22, "declared": 0.2, "far": False},
    ],
    "prevalence_assumes": "Assumes that the declared shares hold.",
    "prediction_sets": {"coverage": 0.9, "mean_size": 1.31, "prevalence": "declared", "assumes": "Assumes a lot."},
}
NODE = {
    "ae_title": "MERGESTREAM", "port": 11112, "failed": False, "objects_waiting": 3, "bytes_waiting": 3 * 2**20,
    "oldest_waiting_seconds": 4.0, "streams": [], "sources": [],
    **{f"associations{name}": 7 for name in ("", "_accepted", "_rejected", "_aborted")},
    **{f"objects_{name}": 8 for name in ("received", "refused", "answered", "unanswerable")},
}  # fmt: skip
PACS = {
    "name": "pacs", "waiting": 2, "sent": 9, "failed": 1, "held": 0,
    "oldest_seconds": 700.0, "last_error": "Refused: out of resources.",
}  # fmt: skip


@pytest.mark.parametrize(("viewport", "scheme"), STATES)
def test_estimates_node_outbox_and_signers_are_drawn_where_they_are(
    browser: Any, viewport: dict[str, int], scheme: str
) -> None:
    standin = StandIn(["lyon", "brest"], ["benign", HOSTILE])
    standin.add_step("ward")
    with served(standin) as address, opened(browser, address, viewport, scheme) as page:
        drawn(page)
        assert not page.locator("#quality, #systems, .signer, .expert .trouble").filter(visible=True).count()
        standin.quality = ESTIMATED
        standin.extra = {"dicom": NODE, "outbox": {"shadow": False, "held_bytes": 0, "destinations": [PACS]}}
        standin.trust = {"lyon": {"signed_by": HOSTILE}, "brest": {"signed_by": "brest", "revoked": "A wrong label."}}
        page.wait_for_selector("#quality")
        text = page.locator("#quality").inner_text()
        assert "91.2 % (89.7 % to 92.7 %)" in text
        assert text.count("Assumes") == 4
        assert page.locator("#quality tr", has_text="far from declared").count() == 1
        systems = page.locator("#systems").inner_text()
        assert "MERGESTREAM, port 11112" in systems
        assert "Alarm: 1 failed report" in systems
        assert "Last error: Refused: out of resources." in systems
        cards = page.locator("#experts").inner_text()
        assert f"Signed by {HOSTILE}" in cards
        assert "Revoked A wrong label." in cards
        assert not grave_findings(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        standin.quality, standin.extra = None, {}
        page.wait_for_selector("#quality", state="hidden")
        page.wait_for_selector("#systems", state="hidden")
