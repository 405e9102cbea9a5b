#!/usr/bin/env python3
"""The status page and the documentation site in a browser, at the width of a desktop and of a phone:

    deploy/look.py --out DIR [--site DIR] [--chromium FILE]

Writes a PNG of the beginning of each page to DIR, for a person to look at, and fails where a page is wider than its window, is
bright for a reader who wants it dark, says something in the browser's console, or asks another host. Chromium is Debian's package chromium, or --chromium. Without --site only the
status page: of a server with tiers, prefixes and a disk that answers while it is looked at. The site is what
`mkdocs build` makes ("deploy/check.sh" has the command's environment).
"""
import argparse
import base64
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request

SOURCE = pathlib.Path(__file__).resolve().parents[1]
WINDOWS = {"desktop": (1280, 900, False), "phone": (390, 844, True)}  # width, height, touch
TALLEST = 2400  # pixels of a page that a picture has
# Resolves when the page was drawn five times: it has rates then, and a plot.
DRAWN = """new Promise(done => { let draws = 0; new MutationObserver(() => { if (++draws == 5) done(); }).observe(
  document.getElementById("when"), {childList: true}); })"""


class Browser:
    """Chromium, told what to do over two pipes in the DevTools protocol: JSON, a zero byte after each message."""

    def __init__(self, program, directory):
        from_us, to_browser = os.pipe()
        from_browser, to_us = os.pipe()

        # The browser reads from 3 and writes to 4. A shell that gets both at higher numbers puts them there.
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (from_us, to_us)]
        self.process = subprocess.Popen(
            ["bash", "-c", 'exec "${@:3}" 3<&"$1" 4>&"$2"', "bash", *map(str, given), program, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--hide-scrollbars", f"--user-data-dir={directory}"], pass_fds=given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (from_us, to_us, *given):
            os.close(end)
        self.write, self.read, self.last, self.buffer, self.events = to_browser, from_browser, 0, b"", []

    def receive(self):
        while b"\0" not in self.buffer:
            more = os.read(self.read, 1 << 20)
            if not more:
                sys.exit("look.py: the browser ended")
            self.buffer += more
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, session=None, **params):
        self.last += 1
        body = {"id": self.last, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(body).encode() + b"\0"
        while data:
            data = data[os.write(self.write, data):]
        while True:
            message = self.receive()
            if message.get("id") == self.last:
                if "error" in message:
                    sys.exit(f"look.py: {method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def await_load(self, session, loader):
        """Until the document of that loader is loaded: the tab's blank one says so, too."""
        def is_loaded(event):
            return (event.get("sessionId") == session and event["method"] == "Page.lifecycleEvent" and event["params"]["name"] == "load" and
                    event["params"]["loaderId"] == loader)

        while not any(is_loaded(event) for event in self.events):
            self.events.append(self.receive())

    def close(self):
        os.close(self.write)
        self.process.kill()  # its profile goes, too
        self.process.wait()
        os.close(self.read)


def evaluate(browser, session, expression):
    done = browser.call("Runtime.evaluate", session, expression=expression, awaitPromise=True, returnByValue=True)
    if "exceptionDetails" in done:
        sys.exit(f"look.py: {expression}: {done['exceptionDetails']}")
    return done["result"].get("value")


def look(browser, url, window, dark, until, path):
    """What is wrong with a page: writes its picture to `path`."""
    width, height, touch = WINDOWS[window]
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
        browser.call(f"{domain}.enable", session)
    browser.call("Emulation.setDeviceMetricsOverride", session, width=width, height=height, deviceScaleFactor=2 if touch else 1, mobile=touch)
    browser.call("Emulation.setEmulatedMedia", session, features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
                                                                       {"name": "prefers-reduced-motion", "value": "reduce"}])
    browser.call("Page.setLifecycleEventsEnabled", session, enabled=True)
    browser.await_load(session, browser.call("Page.navigate", session, url=url)["loaderId"])
    if until:
        evaluate(browser, session, until)
    evaluate(browser, session, "document.fonts.ready.then(() => true)")
    widest, tall = evaluate(browser, session, "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    paper = evaluate(browser, session, "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)")
    shot = browser.call("Page.captureScreenshot", session, captureBeyondViewport=True,
                        clip={"x": 0, "y": 0, "width": width, "height": min(tall, TALLEST), "scale": 1})
    path.write_bytes(base64.b64decode(shot["data"]))
    browser.call("Target.closeTarget", targetId=target)
    wrong = [f"{widest} pixels wide in a window of {width}"] if widest > width else []
    if (sum(paper) < 3 * 128) != dark:
        wrong.append(f"its paper is {paper} where the reader wants {'dark' if dark else 'light'}")
    own = url.split("/")[2]
    for event in browser.events:
        if event.get("sessionId") != session:
            continue
        params = event["params"]
        if event["method"] == "Runtime.exceptionThrown" or (event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning")):
            wrong.append(f"its console: {json.dumps(params)[:300]}")
        if event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            wrong.append(f"its log: {params['entry']['text']} {params['entry'].get('url', '')}")
        if event["method"] == "Network.requestWillBeSent":
            asked = params["request"]["url"]
            if not asked.startswith("data:") and asked.split("/")[2] != own:
                wrong.append(f"asks another host: {asked}")
    browser.events = [event for event in browser.events if event.get("sessionId") != session]
    return wrong


@contextlib.contextmanager
def answering_server(directory):
    """The address of a server's HTTP port while clients ask it under several policies."""
    sys.path.insert(0, str(SOURCE / "tests/e2e"))
    import harness
    stop = threading.Event()
    document = "The river runs past the old mill and the green house. " * 120
    policies = ["dense", "pca:k=2%,from=0", "lsh:k=2%,from=0"]

    def ask(url, client):
        turn = client
        while not stop.is_set():
            turn += 1
            body = {"prompt": document[client:] + f" Question {turn}?", "max_tokens": 24, "winnow": {"policy": policies[turn % len(policies)]}}
            with contextlib.suppress(urllib.error.HTTPError):
                with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", json.dumps(body).encode()), timeout=120) as answer:
                    answer.read()

    with harness.Server("--index", "pca,lsh:128", "--probe-interval", "4", "--kv-bytes", "16MiB", "--disk-bytes", "256MiB", "--store-dir",
                        directory / "store", "--max-running", "4", "--max-context", "4096", "--retrieval-from", "0") as server:
        url = f"http://127.0.0.1:{server.http_port}"
        threads = [threading.Thread(target=ask, args=(url, client)) for client in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield url
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@contextlib.contextmanager
def served_site(site):
    import functools
    import http.server

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--site", type=pathlib.Path)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    args = parser.parse_args()
    if not args.chromium:
        sys.exit("look.py: Chromium is not there: Debian's package chromium, or --chromium FILE")
    args.out.mkdir(parents=True, exist_ok=True)
    faults, pictures = [], 0

    def see(browser, url, name, until=None, schemes=(False,)):
        nonlocal pictures
        for window in WINDOWS:
            for dark in schemes:
                path = args.out / f"{name}-{window}{'-dark' if dark else ''}.png"
                faults.extend(f"{path.name}: {wrong}" for wrong in look(browser, url, window, dark, until, path))
                pictures += 1

    with tempfile.TemporaryDirectory(prefix="winnow-look-") as directory, contextlib.ExitStack() as stack:
        browser = Browser(args.chromium, pathlib.Path(directory, "profile"))
        stack.callback(browser.close)
        url = stack.enter_context(answering_server(pathlib.Path(directory)))
        see(browser, url + "/status", "status", DRAWN, schemes=(False, True))
        if args.site:
            root = stack.enter_context(served_site(args.site))
            for page in sorted(args.site.rglob("*.html")):
                name = page.relative_to(args.site)
                if str(name) in ("index.html", "404.html"):  # the first one leads to start.html
                    continue
                see(browser, f"{root}/{name}", str(name.with_suffix("")).replace("/", "-"), schemes=(False, True) if str(name) == "start.html" else (False,))
    print(f"{pictures} pictures in {args.out}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
