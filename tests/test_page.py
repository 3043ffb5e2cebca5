"""docs/index.html in a real browser: its numbers are Python's, and its controls do what they say.

Chromium and its driver come from the system's packages (apt install chromium chromium-driver); they
are spoken to by HTTP (WebDriver). Clicks and keys are real ones. Without them the tests are skipped.
"""
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

import gril
from pictures import page
from tasks import Task, as_learner, closed_form, zero

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"                 # how WebDriver names one
END, LEFT, RIGHT, HOME, TAB = "\ue010", "\ue012", "\ue014", "\ue011", "\ue004"
BACKSPACE = "\ue003"


class Browser:
    """Chromium with an empty profile, through chromedriver's HTTP interface."""

    def __init__(self, profile):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for line in self.driver.stdout:
            if port := re.search(r"started successfully on port (\d+)", line):
                break
        self.url = f"http://127.0.0.1:{port[1]}/session"
        options = dict(args=[*FLAGS, f"--user-data-dir={profile}"], binary=shutil.which("chromium"))
        session = self.ask("POST", "", capabilities=dict(alwaysMatch={
            "browserName": "chrome", "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"}}))
        self.url += "/" + session["sessionId"]

    def ask(self, method, path, **body):
        request = urllib.request.Request(self.url + path, method=method,
                                         data=json.dumps(body).encode() if method == "POST" else None)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, path):
        self.ask("POST", "/url", url=path.as_uri())

    def run(self, script, *args):
        """The value of a JavaScript expression in which `a` are the arguments."""
        return self.ask("POST", "/execute/sync", script=f"const a = arguments; return {script}",
                        args=args)

    def find(self, css):
        return self.ask("POST", "/element", using="css selector", value=css)[ELEMENT]

    def click(self, css):
        self.ask("POST", f"/element/{self.find(css)}/click")

    def type(self, css, text):
        self.ask("POST", f"/element/{self.find(css)}/value", text=text)

    def retype(self, css, text):
        """Into a cell, in place of what stands there."""
        self.click(css)
        old = self.run("document.querySelector(a[0]).value", css)
        self.type(css, END + BACKSPACE * len(old) + text)
        self.settle()

    def text(self, css):
        return self.run("document.querySelector(a[0]).textContent", css)

    def settle(self):
        """Until the page has drawn what was changed."""
        self.wait("!waiting")

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"after {seconds} s it is not so that {condition}"
            time.sleep(0.05)

    def errors(self):
        log = self.ask("POST", "/se/log", type="browser")
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def close(self):
        try:
            self.ask("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}: apt install chromium chromium-driver")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    """The page, newly opened; what a test does with it may leave no error on the console."""
    chromium.open(page.PAGE)
    chromium.settle()
    yield chromium
    assert chromium.errors() == []
