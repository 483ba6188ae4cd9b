# SPDX-License-Identifier: Apache-2.0
"""A real browser for the tests of pages: the system's Chromium, without a window, driven by playwright."""

import contextlib
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = (1280, 900), (390, 844)


@contextlib.contextmanager
def open_browser():
    """The browser; the test is skipped, and says why, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="no browser test: playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no browser test: there is no Chromium (on Debian: apt-get install chromium)")
    with api.sync_playwright() as driver:
        # Without its sandbox, as tests may run as root; it opens nothing but pages of the tests.
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


class Tab:
    """A tab of the browser, with what went wrong in it and what it fetched.

    Attributes:
        page: playwright's page.
        errors: errors of its scripts.
        fetched: addresses of its requests, without data in the address.
    """

    def __init__(self, browser, size=WIDE, **options):
        self.page = browser.new_page(viewport=dict(zip(("width", "height"), size, strict=True)), **options)
        self.page.set_default_timeout(60_000)  # ms, for busy machines
        self.errors, self.fetched = [], []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.fetched.append(request.url))

    def outside(self, *allowed):
        """The addresses of requests that go elsewhere than the beginnings given."""
        return [url for url in self.fetched if not url.startswith((*allowed, "data:", "blob:"))]

    def slide(self, element_id, value):
        """Move a slider, as a hand would: its value and its event."""
        script = "([id, value]) => { const s = document.getElementById(id); s.value = value; s.dispatchEvent(new Event('input')) }"
        self.page.evaluate(script, [element_id, value])

    def texts(self, selector):
        return self.page.locator(selector).all_inner_texts()


def overflows(page):
    """Whether the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
