"""Make the pictures of docs/analysis.md and docs/dashboard.md: python scripts/docs_pictures.py DEMO [NAME ...]

DEMO is a folder that `mergestream demo` wrote; NAMEs are pictures, by default all. Needs Debian's chromium
(scripts/install_browser.sh).
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
# File: screen, colours, the element at the top of the picture, and whether it shows the whole page.
REPORT = {
    "report-desktop-light": (DESKTOP, "light", "body", False),
    "report-desktop-dark": (DESKTOP, "dark", "#adapting", False),
    "report-phone-light": (PHONE, "light", "#results", False),
    "report-phone-dark": (PHONE, "dark", "#adapting figure", False),
}
DASHBOARD = {
    "dashboard-desktop-light": (DESKTOP, "light", "body", True),
    "dashboard-phone-dark": (PHONE, "dark", "body", False),
}
BATCH = 32


def photograph(browser: Browser, address: str, name: str, viewport: Any, colours: Any, top: str, whole: bool) -> None:
    page = browser.new_page(viewport=viewport, color_scheme=colours, reduced_motion="reduce")
    page.goto(address)
    page.wait_for_timeout(3000)  # the dashboard's charts come with its second update
    page.evaluate("(top) => document.querySelector(top).scrollIntoView()", top)
    if "figure" in top:
        page.evaluate("scrollBy(0, -70)")  # below the bar of tools; sections have that margin themselves
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


def main(demo: Path, names: list[str]) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in REPORT.keys() & names:
            photograph(browser, (demo / "report.html").resolve().as_uri(), name, *REPORT[name])
        if DASHBOARD.keys() & names:
            with service(demo / "pool") as address:
                fill(address)
                for name in DASHBOARD.keys() & names:
                    photograph(browser, f"{address}#stream=day-clinic", name, *DASHBOARD[name])
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [*REPORT, *DASHBOARD])
