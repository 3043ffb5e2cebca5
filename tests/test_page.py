"""docs/index.html in a real browser: its numbers are Python's, and its controls do what they say.

Chromium and its driver come from the system's packages (apt install chromium chromium-driver); they
are spoken to by HTTP (WebDriver). Clicks and keys are real. Without a browser they are skipped.
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
from tasks import NdRegression, closed_form

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"                 # how WebDriver names one
BACKSPACE, TAB, ENTER, END, HOME, RIGHT = "\ue003\ue004\ue007\ue010\ue011\ue014"     # its keys


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
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.url + path, data, method=method)
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
        self.settle()
        return self.run("document.querySelector(a[0]).textContent", css)

    def show(self, width, theme):
        """The screen's width, and what the reader's system prefers."""
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        media = dict(features=[dict(name="prefers-color-scheme", value=theme)])
        for command, values in dict(setDeviceMetricsOverride=size, setEmulatedMedia=media).items():
            self.ask("POST", "/goog/cdp/execute", cmd=f"Emulation.{command}", params=values)

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


# ------------------------------------------------------------------------------- the file, as built

def test_the_page_is_what_the_command_builds_now():
    assert page.PAGE.read_text(encoding="utf-8") == page.build(), \
        "docs/index.html is older than its template or the sources it shows: python figures.py page"


def test_the_page_is_one_small_file_that_asks_for_nothing():
    text = page.PAGE.read_text(encoding="utf-8")
    assert len(text.encode()) < 150_000
    assert "default-src 'none'" in text
    assert not re.search(r"<script .*src|<img|@import|fetch\(", text)
    shown = page.html.escape(page.inspect.getsource(gril.gril_loop).rstrip())
    assert shown in text and "<!-- source" not in text and "<!-- javascript" not in text


def test_a_function_that_was_renamed_is_said(monkeypatch, tmp_path):
    template = tmp_path / "page.html"
    template.write_text("<!-- source gril.windou -->")
    monkeypatch.setattr(page, "TEMPLATE", template)
    with pytest.raises(ValueError, match="page.html shows gril.windou, and gril.py has no windou"):
        page.build()


# ------------------------------------------------------------------------------------- its numbers

NUMBERS = """(() => {
  const layer = { variant: a[0], f: a[2][0].y.length };
  for (const name in a[1]) layer[name] = Float64Array.from(a[1][name]);
  const prompts = a[2].map(({ s, y }) => ({ s: s.map((x) => Float64Array.from(x)), y }));
  const { loss, grad } = lossAndGradient(layer, prompts);
  const outputs = prompts.map(({ s }) => {
    const { C, Z } = recur(layer, s);
    return C.slice(1).map((C_t, t) => Array.from(readOut(layer, Z[t + 1], C_t)));
  });
  const common = { ...layer, A: layer.A.map(() => 0.9) };
  const parts = lossParts(measure(common, prompts), 0.9);
  const N = (prompts[0].s.length - 1) / 2;
  return { loss, outputs, only: lossOf(layer, prompts), common: lossOf(common, prompts),
    parts: parts.at(layer.beta[0]), grad: Object.fromEntries(Object.entries(grad).map(
      ([name, values]) => [name, Array.from(values)])),
    gd: prompts.map(({ s }) => Array.from(gradientStep(s, N, closedForm(layer.f, N).eta / N))) };
})()"""


def same(found, wanted):
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted.detach(),
                               rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("f, N", [(10, 10), (2, 1)])
def test_forward_pass_loss_and_gradient_are_those_of_gril(browser, f, N):
    assert browser.run("VARIANTS") == gril.VARIANTS
    task, generator = NdRegression(f=f, n=N), torch.Generator().manual_seed(f)
    x, y, s = (part.double() for part in task.sample(6, generator))
    prompts = [dict(s=s_i.tolist(), y=y_i[-1].tolist()) for s_i, y_i in zip(s, y)]
    for variant in gril.VARIANTS:
        layer = gril.GRIL(f, variant).double()
        for p in layer.parameters():
            p.data = torch.randn(p.shape, generator=generator).double() / 2
        weights = {name: p.flatten().tolist() for name, p in layer.named_parameters()}
        js = browser.run(NUMBERS, variant, weights, prompts)
        loss = task.error(layer.query(s), y[:, -1])
        loss.backward()
        same(js["outputs"], layer(s))
        same([js["loss"], js["only"]], loss.expand(2))
        assert js["grad"].keys() == weights.keys()
        for name, p in layer.named_parameters():
            same(js["grad"][name], p.grad.flatten())
        layer.A.data.fill_(0.9)
        same([js["common"], js["parts"]], task.error(layer.query(s), y[:, -1]).expand(2))
    same(js["gd"], task.learner()(x[:, :-1], y[:, :-1], x[:, -1]))


def test_prompts_are_drawn_as_in_tasks_and_the_references_are_its(browser):
    for f, N, scale in ((10, 10, 1), (4, 30, 2)):
        js = browser.run("(({ eta, loss }) => [eta, loss])(closedForm(...a))", f, N, scale)
        assert js == pytest.approx(closed_form(f, N, scale), rel=1e-12)
    moments = browser.run("""(() => {
      const prompts = sample(4000, 10, 10, 5);
      const of = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;
      return [of(prompts.map(({ W }) => dot(W, W) / 100)),
        of(prompts.map(({ s }) => dot(s[20], s[20]) / 10)),
        mean(prompts, ({ s, y }) => squaredError(gradientStep(s, 10, ETA / 10), y)),
        mean(prompts, ({ y }) => squaredError(zeros(10), y))];
    })()""")
    assert moments == pytest.approx([1, 1 / 12, closed_form(10, 10)[1], 10 / 24], rel=0.03)


# --------------------------------------------------------------------------------- part 1, by hand

def loss(browser):
    """The layer's loss as the page shows it, and GD's and zero's."""
    return [float(number) for number in re.findall(r"[\d.]+", browser.text("#losses"))]


def test_steps_prompts_and_sizes(browser):
    assert browser.text("#t-now") == "4 of 10"
    browser.click("#step")
    browser.click("#step")
    browser.click("#back")
    assert browser.text("#t-now") == "5 of 10"
    browser.type("#t", END)
    assert browser.text("#t-now") == "10 of 10"
    assert "after 10 examples" in browser.text("#answers-says")
    browser.click("#step")                                      # there is no further one
    assert browser.text("#t-now") == "10 of 10"
    browser.click("#play")                                      # from the start again
    browser.wait("one.t >= 2 && $('play').textContent === 'Pause'", 10)
    browser.click("#play")
    stopped = browser.text("#t-now")
    assert browser.text("#play") == "Play" and stopped != "10 of 10"
    before, losses = browser.text("#tokens"), loss(browser)
    browser.click("#new")
    assert browser.text("#tokens") != before and "Prompt 2" in browser.text("#tokens-caption")
    assert browser.text("#t-now") == stopped and loss(browser) == losses
    browser.type("#f", RIGHT)
    browser.type("#N", HOME)
    assert browser.run("[one.f, one.N, one.prompt.s.length, one.layer.A.length]") == [11, 1, 3, 121]
    assert browser.text("#f-now") == "11" and browser.text("#t-now") == "1 of 1"
    assert browser.run("one.layer.beta[0]") == pytest.approx(closed_form(11, 1)[0])     # η*/N again
    assert loss(browser)[0] == loss(browser)[1]


def test_buttons_for_weights(browser):
    ours, gd, zero = loss(browser)
    assert ours == gd and gd == pytest.approx(closed_form(10, 10)[1], rel=0.03)
    for name in ("no_window", "no_readout", "neither"):
        browser.click(f"[data-preset={name}]")
        assert loss(browser)[0] == pytest.approx(zero, rel=0.01)
        variant, true = browser.run("[one.layer.variant, lossOf(one.layer, one.prompts)]")
        assert variant == name and loss(browser)[0] == pytest.approx(true, rel=1e-3)
        cells = browser.run("$('Q').querySelectorAll('input').length")
        assert cells == gril.VARIANTS[name]["w"] ** 2
    browser.click("[data-preset=w2]")
    assert 1.25 * gd < loss(browser)[0] < 0.8 * zero
    weights = []
    for _ in range(2):
        browser.click("[data-preset=random]")
        weights.append(browser.run("Array.from(one.layer.Q)"))
    assert weights[0] != weights[1] and loss(browser)[0] > gd
    browser.click("[data-preset=full]")
    assert loss(browser) == [ours, gd, zero]
    assert browser.run("document.querySelector('[aria-pressed=true]').dataset.preset") == "full"


def test_cells_and_sliders(browser):
    ours = loss(browser)[0]
    browser.retype("#Q input:nth-of-type(4)", "0.5")            # half the write is half the step
    assert browser.run("one.layer.Q[3]") == 0.5
    half = loss(browser)[0]
    assert half > ours and "by hand" in browser.text("#preset-says")
    beta = browser.run("one.layer.beta[0]")
    browser.click("#best")
    assert browser.run("one.layer.beta[0]") == pytest.approx(2 * beta, rel=0.05)
    assert loss(browser)[0] <= ours
    browser.retype("#q input:nth-of-type(1)", "-1")
    q, true = browser.run("[one.layer.q[0], lossOf(one.layer, one.prompts)]")
    assert q == -1 and loss(browser)[0] == pytest.approx(true, rel=1e-3) and true > ours
    browser.retype("#beta input", "0")
    assert loss(browser)[0] == loss(browser)[2]
    browser.type("#beta-slider", RIGHT)
    assert browser.run("one.layer.beta[0]") > 0
    assert browser.run("Number($('beta').querySelector('input').value)") > 0
    browser.click("[data-preset=full]")
    browser.retype("#A input", "0.5")
    assert browser.run("one.layer.A.every((a) => a === 0.5)") and loss(browser)[0] > ours
    browser.type("#A-slider", END)
    assert browser.run("one.layer.A[0]") == 1.2 and loss(browser)[0] > ours
    browser.type("#N", RIGHT)                                   # weights by hand stay
    assert browser.run("[one.N, one.layer.A[0], one.layer.A.length]") == [11, 1.2, 100]


BAD = [("abc", "“abc” is not a number"), ("", "nothing is typed"),
       ("1e999", "1e999 is beyond what a number holds")]
BELOW = """(([cell, said]) => said.top - cell.bottom)(
    [...a].map((css) => document.querySelector(css).getBoundingClientRect()))"""


def test_a_bad_value_is_said_at_its_cell_and_the_page_goes_on(browser):
    before = loss(browser)
    for css, name in (("#Q input:nth-of-type(4)", "Q₂₁"), ("#q input", "q₁"), ("#A input", "A"),
                      ("#beta input", "β"), ("#rate input", "step size"), ("#seed input", "seed")):
        stays, message = browser.run("""((cell) => [cell.value, "#" + cell.getAttribute(
            "aria-describedby")])(document.querySelector(a[0]))""", css)
        for text, why in BAD if name == "Q₂₁" else BAD[:1] if name == "seed" else BAD[2:]:
            browser.retype(css, text)
            said = browser.text(message)
            assert said.startswith(f"{name}: {why}") and f"; it stays {stays[:5]}" in said
            assert browser.run("document.querySelector(a[0]).ariaInvalid", css) == "true"
            assert 0 <= browser.run(BELOW, css, message) < 100  # under the row of the cell
        assert browser.text("#losses b") == f"{before[0]}"
        browser.retype(css, stays)
        assert browser.text(message) == ""
        assert browser.run("document.querySelector(a[0]).ariaInvalid", css) == "false"
    browser.click("#step")
    assert browser.text("#t-now") == "5 of 10" and loss(browser) == before
    browser.retype("#beta input", "1e300")                      # numbers, but too large together
    browser.retype("#Q input:nth-of-type(4)", "1e300")
    assert "beyond what a number holds" in browser.text("#losses-say")
    browser.click("[data-preset=full]")
    assert loss(browser) == before


# --------------------------------------------------------------------------- parts 2 and 3, trained

def ranges(browser):
    """Losses of the trained layer on other lengths and scales ÷ those of GD with the same step."""
    return browser.run("""["lengths", "scales"].flatMap((id) => run[id].map(
        ([value, loss], i) => [value, loss / references[id][i].same]))""")


def test_training_stops_goes_on_and_falls_onto_gradient_descent(browser):
    browser.retype("#seed input", "3")
    browser.click("#train")
    browser.wait("run.step >= 10")
    browser.click("#stop")
    step, weights = browser.run("[run.step, Array.from(run.layer.Q)]")
    assert "Stopped" in browser.text("#training") and browser.run("run.seed") == 3
    assert browser.run("[run.step, Array.from(run.layer.Q)]") == [step, weights]
    browser.click("#go")
    browser.wait("run.reached !== null")
    browser.click("#stop")
    assert "Within 1% of it after" in browser.text("#training")
    assert browser.run("run.losses.at(-1)[1] / GD") < 1.02
    Q = torch.tensor(browser.run("Array.from(run.layer.Q)")).abs()
    assert Q.argmax() == 3 and Q.sort().values[-2] < 0.25 * Q[3]
    browser.run("$('ranges').scrollIntoView()")                 # measured when it is looked at
    browser.wait("run.scales !== undefined")
    assert all(0.8 < ratio < 1.25 for value, ratio in ranges(browser) if value not in (2, 30, 40))
    browser.click("#take")
    assert browser.run("one.layer.Q.every((x, i) => x === run.layer.Q[i])")
    assert loss(browser)[0] < 1.1 * loss(browser)[1] and "part 2" in browser.text("#preset-says")


def test_variants_step_sizes_and_seeds_are_those_chosen(browser):
    browser.retype("#rate input", "0.01")
    browser.retype("#seed input", "7")
    for keys, variant in (("no w", "no_window"), ("no r", "no_readout"), ("win", "w2")):
        browser.type("#variant", keys)
        browser.click("#train")                                 # the one before is still training
        chosen = browser.run("[run.layer.variant, run.rate, run.seed, Boolean(run.layer.u)]")
        assert chosen == [variant, 0.01, 7, variant == "no_readout"]
    browser.retype("#rate input", "1e200")
    browser.click("#train")
    browser.wait("!run.going")
    assert re.search("run away.*smaller step size", browser.text("#training"))


@pytest.mark.slow
def test_every_seed_is_within_one_per_cent_of_gradient_descent_in_15_seconds(browser):
    for seed in range(20):
        browser.retype("#seed input", str(seed))
        browser.click("#train")
        browser.wait(f"run.seed === {seed} && !run.going", 300)
        reached, ratio, beta, Q, q = browser.run("""[run.reached, run.losses.at(-1)[1] / GD,
            run.layer.beta[0], run.layer.Q[3], run.layer.q[2]]""")
        gain = 10 * beta * Q * q
        print(f"seed {seed}: {ratio:.4f} of GD, within 1% after {reached}, gain {gain:.2f}")
        assert ratio < 1.01 and reached["seconds"] < 15 and 5 < gain < 7
    browser.run("$('ranges').scrollIntoView()")
    browser.wait("run.scales !== undefined")
    print([(value, round(ratio, 3)) for value, ratio in ranges(browser)])
    assert all(0.7 < ratio < 1.4 for _, ratio in ranges(browser))


# ---------------------------------------------------------------------------------- how it looks

CROWDED = """(() => {
  const found = [];
  const box = (element) => element.getBoundingClientRect();
  const apart = (p, q) => p.right <= q.left + 1 || q.right <= p.left + 1
    || p.bottom <= q.top + 2 || q.bottom <= p.top + 2;
  for (const svg of document.querySelectorAll("svg.wide")) {
    const texts = [...svg.querySelectorAll("text")].filter((t) => !/[●×◯]/.test(t.textContent));
    texts.forEach((p, i) => texts.slice(i + 1).forEach((q) => {
      if (!apart(box(p), box(q))) found.push(`${svg.id}: ${p.textContent} on ${q.textContent}`);
    }));
    if (svg.id !== "tokens" && texts.filter((text) => /[a-z]/i.test(text.textContent)).length !== 2)
      found.push(`${svg.id}: an axis without a name`);
  }
  for (const card of document.querySelectorAll(".card")) {
    for (const inner of card.querySelectorAll("*")) {
      const [p, q] = [box(card), box(inner)];
      if (q.width && (q.right > p.right + 1 || q.left < p.left - 1))
        found.push(`${inner.id} leaves its card`);
    }
  }
  const controls = [...document.querySelectorAll("button, select, input, .row > figure")].map(box);
  controls.forEach((p, i) => controls.slice(i + 1).forEach((q) => {
    const inside = p.left <= q.left && p.right >= q.right && p.top <= q.top && p.bottom >= q.bottom;
    if (p.width && q.width && !inside && !apart(p, q)) found.push(`controls at ${p.x}, ${p.y}`);
  }));
  if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the screen");
  return found;
})()"""


@pytest.mark.parametrize("width, theme", [(1400, "light"), (390, "dark")])
def test_nothing_overlaps_and_every_axis_has_its_name(chromium, width, theme):
    chromium.show(width, theme)
    chromium.open(page.PAGE)
    assert chromium.text("#theme") == ("Light" if theme == "dark" else "Dark")
    chromium.run("$('ranges').scrollIntoView()")
    chromium.wait("references !== null")
    assert chromium.run(CROWDED) == []
    chromium.type("#N", END)
    chromium.click("[data-preset=no_readout]")
    chromium.settle()
    assert chromium.run(CROWDED) == []
    colour = chromium.run("getComputedStyle(document.body).backgroundColor")
    chromium.click("#theme")
    assert chromium.run("getComputedStyle(document.body).backgroundColor") != colour
    assert chromium.errors() == []
    chromium.show(1400, "light")


def test_the_keyboard_reaches_every_control(browser):
    browser.type("#theme", ENTER)
    assert browser.text("#theme") == "Light"
    wanted = browser.run("""(() => {
      window.controls = [...document.querySelectorAll("button, select, input, summary")]
        .filter((control) => !control.disabled);
      window.reached = [];
      addEventListener("focusin", ({ target }) => reached.push(controls.indexOf(target)));
      return controls.length;
    })()""")
    browser.type("#theme", TAB * (wanted - 1))
    assert browser.run("reached") == list(range(1, wanted))
    browser.type("#step", ENTER)
    assert browser.text("#t-now") == "5 of 10"
    browser.type("summary", ENTER)
    assert browser.run("document.querySelector('details').open")
    assert "Z[t][i] = A[i] * Z[t - 1][i] + CQC[i]" in browser.text("[data-functions*=recur]")
