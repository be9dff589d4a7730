"""Make the pictures of docs/report.md and docs/dashboard.md: python scripts/docs_pictures.py DEMO

DEMO is a folder that `mergestream demo` wrote. Needs Debian's chromium (scripts/install_browser.sh).
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from playwright.sync_api import Browser, sync_playwright

import mergestream as ms

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
# File: screen, colours, and the element at the top of the picture.
REPORT = {
    "report-desktop-light": (DESKTOP, "light", "body"),
    "report-desktop-dark": (DESKTOP, "dark", "#streams"),
    "report-phone-light": (PHONE, "light", "#results"),
    "report-phone-dark": (PHONE, "dark", "#confidence figure"),
}
BATCH = 32


def photograph(browser: Browser, address: str, name: str, viewport: Any, colours: Any, top: str, whole: bool) -> None:
    page = browser.new_page(viewport=viewport, color_scheme=colours, reduced_motion="reduce")
    page.goto(address)
    page.wait_for_timeout(3000)  # the dashboard's charts come with its second update
    page.evaluate("(top) => document.querySelector(top).scrollIntoView()", top)
    if top != "body":
        page.evaluate("scrollBy(0, -70)")  # below the bar of tools
    page.screenshot(path=FIGURES / f"{name}.png", full_page=whole)
    page.close()


@contextmanager
def service(pool: Path) -> Iterator[str]:
    """The address of a real service over the pool."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        line = [sys.executable, "-m", "mergestream", "serve", str(pool), "--port", "0", "--state", f"{folder}/state"]
        with log.open("w") as output:
            process = subprocess.Popen(line, stdout=output, stderr=output)
        try:
            while not (ready := re.search(r"Ready: (http://[^ ]+)", log.read_text())):
                if process.poll() is not None:
                    sys.exit(log.read_text())
                time.sleep(0.2)
            yield f"{ready[1]}/"
        finally:
            process.terminate()
            process.wait()


def send(address: str, stream: str, images: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, images)
    files = {"images": ("batch.npy", buffer.getvalue())}
    httpx.post(f"{address}v1/streams/{stream}/batches", files=files, timeout=60).raise_for_status()


def fill(address: str) -> None:
    """Three streams; day-clinic changes hospital at steps 40 and 75, and after 75 one class does not come any more."""
    dataset, dice = ms.load_dataset("phantom", images=1000), np.random.default_rng(0)
    for stream, hospital, steps, first_class in (
        ("day-clinic", "lyon", 40, 0),
        ("day-clinic", "brest", 35, 0),
        ("day-clinic", "graz", 35, 1),
        ("emergency", "turin", 60, 0),
        ("ward-2", "lyon", 25, 0),
    ):
        data = dataset[hospital]
        candidates = np.flatnonzero(np.asarray(data.labels) >= first_class)
        for _ in range(steps):
            send(address, stream, data.images[dice.choice(candidates, BATCH)].numpy())


def main(demo: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver, service(demo / "pool") as address:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (viewport, colours, top) in REPORT.items():
            page = (demo / "report.html").resolve().as_uri()
            photograph(browser, page, name, viewport, colours, top, whole=False)
        fill(address)
        chosen = f"{address}#stream=day-clinic"
        photograph(browser, chosen, "dashboard-desktop-light", DESKTOP, "light", "body", whole=True)
        photograph(browser, chosen, "dashboard-phone-dark", PHONE, "dark", "body", whole=False)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
