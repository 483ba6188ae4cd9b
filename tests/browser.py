# SPDX-License-Identifier: Apache-2.0
"""A real browser for the tests of pages: the system's Chromium, without a window, driven by playwright."""

import contextlib
import importlib.util
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = (1280, 900), (390, 844)


def find_chromium():
    """Its path; ``None`` if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def missing():
    """What the tests of pages lack here; empty where they run."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return "" if find_chromium() else "there is no Chromium (on Debian: apt-get install chromium)"


@contextlib.contextmanager
def open_browser():
    """The browser; the test is skipped, and says why, where there is none."""
    if missing():
        pytest.skip(f"no browser test: {missing()}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Without its sandbox, as tests may run as root; it opens nothing but pages of the tests.
        # Its camera is a drawn film.
        arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        opened = driver.chromium.launch(executable_path=find_chromium(), args=arguments)
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


if __name__ == "__main__":  # for the last line of make test
    print(f" Those in a browser did not run: {missing()}." if missing() else "")
