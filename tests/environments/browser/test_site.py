"""The site is built without a warning, and a browser shows it: no error, no other host, no sideways scrolling."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import lightning_lockstep
from lightning_lockstep import callbacks, strategies

ROOT = Path(__file__).parents[3]
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install -e '.[dev]'"
)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as scripts/docs does: a warning ends it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # with ruff, which formats signatures
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def pages_of(site: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(site)) for path in site.rglob("index.html"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    timeout = 10  # seconds, for a connection that the browser opens and never uses

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def browsing(site: Path, problems: list[str]) -> Iterator[tuple[Any, str]]:
    """A page of a browser, and the address of the site; what the page complains about goes to `problems`."""
    from playwright.sync_api import sync_playwright

    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport=DESK)
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
        page.on("console", lambda said: said.type == "error" and problems.append(f"{page.url}: {said.text}"))
        page.on("requestfailed", lambda asked: failed(asked) and problems.append(f"{page.url}: no {asked.url}"))
        page.on(
            "request",
            lambda asked: asked.url.startswith((address, "data:", "blob:")) or problems.append(asked.url),
        )
        try:
            yield page, address
        finally:
            browser.close()


def failed(request: Any) -> bool:
    """Whether a request failed, other than by the page that was left."""
    return "ERR_ABORTED" not in (request.failure or "")


def test_the_site_has_a_page_for_each_strategy_and_callback(site: Path) -> None:
    wanted = {f"callbacks/{name}" for name in callbacks.__all__}
    wanted |= {f"strategies/{name}" for name in strategies.__all__ if name.startswith("Lockstep")}
    assert wanted <= set(pages_of(site))


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    folders = [site / name for name in ("reference", "strategies", "callbacks")]
    text = "".join(path.read_text() for folder in folders for path in folder.rglob("index.html"))
    assert [name for name in lightning_lockstep.__all__ if f'.{name}"' not in text] == []


@in_a_browser
def test_every_page_loads_without_an_error_and_fits_a_phone(site: Path) -> None:
    problems: list[str] = []
    with browsing(site, problems) as (page, address):
        for name in pages_of(site):
            page.set_viewport_size(DESK)
            page.goto(f"{address}{name}/".replace("/./", "/"), wait_until="load")
            page.set_viewport_size(PHONE)
            width = page.evaluate("document.documentElement.scrollWidth")
            if width > PHONE["width"]:
                problems.append(f"{name} is {width} wide")
    assert problems == []


@in_a_browser
def test_the_search_finds_a_callback(site: Path) -> None:
    problems: list[str] = []
    with browsing(site, problems) as (page, address):
        page.goto(address, wait_until="load")
        page.click("input.md-search__input")
        page.fill("input.md-search__input", "OverflowDetector")
        # The theme reads the field when its worker is ready, on a change of focus and when a key is released. `fill`
        # releases none, so it is read only if the worker was not ready before.
        page.press("input.md-search__input", "End")
        found = page.locator(".md-search-result__link").first
        found.wait_for(state="visible")
        links = [link.get_attribute("href") for link in page.locator(".md-search-result__link").all()]
    assert problems == []
    assert any("callbacks/OverflowDetector/" in (link or "") for link in links)
