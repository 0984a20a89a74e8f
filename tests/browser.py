"""A headless Chromium, driven over a pipe by its DevTools protocol."""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@contextlib.contextmanager
def served(folder):
    """The address on 127.0.0.1 where the files of a folder are served."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Browser:
    """One page of a browser of its own; what went wrong on it is in `errors`."""

    def __init__(self):
        self.errors = []
        self._ids = itertools.count(1)
        self._held = b""
        self._events = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._out = os.pipe()
        self._in, ours = os.pipe()
        read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs, ours))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
                 "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"]  # fmt: skip
        silent = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        # The browser reads descriptor 3 and writes descriptor 4.
        placed = [(os.POSIX_SPAWN_DUP2, read, 3), (os.POSIX_SPAWN_DUP2, write, 4)]
        self._pid = os.posix_spawn(
            CHROMIUM, [CHROMIUM, *flags], os.environ, file_actions=silent + placed, setsid=True
        )
        for fd in (theirs, ours, read, write):
            os.close(fd)
        self._session = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._out)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        self._folder.cleanup()

    def __call__(self, method, **params):
        """The result of one command of the protocol."""
        asked = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while (message := self._next()).get("id") != asked["id"]:
            pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _next(self):
        while b"\0" not in self._held:
            if not (more := os.read(self._in, 1 << 20)):
                raise RuntimeError("The browser has ended.")
            self._held += more
        one, _, self._held = self._held.partition(b"\0")
        message = json.loads(one)
        match message.get("method"), message.get("params"):
            case "Runtime.exceptionThrown", given:
                self.errors.append(given["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled", {"type": "error", "args": args}:
                self.errors.append(str([arg.get("value") for arg in args]))
            case "Log.entryAdded", {"entry": {"level": "error"} as entry}:
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.loadingFailed", {"canceled": False, "errorText": text}:
                self.errors.append(text)
            case "Page.loadEventFired", _:
                self._events.append("loaded")
        return message

    def open(self, address, width, *, dark=False):
        """Load a page in a window of this width, as somebody with this preference sees it."""
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self("Page.navigate", url=address)
        while not self._events:
            self._next()

    def resize(self, width):
        """Make the window so wide."""
        self("Emulation.setDeviceMetricsOverride",
             width=width, height=900, deviceScaleFactor=1, mobile=width < 600)  # fmt: skip

    def value(self, script):
        """What a script makes of the page."""
        given = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in given:
            raise RuntimeError(str(given["exceptionDetails"]))
        return given["result"].get("value")


ILLEGIBLE = r"""
(() => {
  const found = new Set(), paint = document.createElement("canvas").getContext("2d");
  const known = {}, colour = text => known[text] ??= (() => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = text;
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
    return {rgb: [r, g, b], a: a / 255};
  })();
  const over = (front, back) => front.rgb.map((c, i) => c * front.a + back[i] * (1 - front.a));
  const seen = new Map([[null, [255, 255, 255]]]);
  const behind = e => {
    if (!seen.has(e)) {
      seen.set(e, over(colour(getComputedStyle(e).backgroundColor), behind(e.parentElement)));
    }
    return seen.get(e);
  };
  const light = rgb => {
    const linear = rgb.map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !e.checkVisibility() || e.closest("svg, .headerlink")) continue;
    const back = behind(e), text = getComputedStyle(e).color;
    const [dark, bright] = [light(back), light(over(colour(text), back))].sort((a, b) => a - b);
    if (bright / dark < 4.5) found.add(`${text} on ${back}, as in ${e.outerHTML.slice(0, 60)}`);
  }
  const wide = document.documentElement.scrollWidth - innerWidth;
  if (wide > 0) found.add(`${wide} pixels wider than the window`);
  return [...found];
})()
"""
"""What of a page is wider than the window, or has a contrast below 4.5, the WCAG's level AA."""
