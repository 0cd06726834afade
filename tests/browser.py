"""A headless Chromium that tests open pages in, by its DevTools protocol over two pipes.

    with browser(width=390, height=844, touch=True) as tab:
        tab.open(path)
        tab.press("g")
        assert tab.ask("document.title") == "Registrations"
    assert tab.complaints == [] and tab.requests == []

Events are those of a person: the browser itself turns them into clicks, keys and pointers.
"""
import base64
import contextlib
import json
import os
import select
import shutil
import time
from pathlib import Path

from tests import launching

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 60
CODES = {"ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


@contextlib.contextmanager
def browser(folder, width=1280, height=900, touch=False, scripts=True, features=()):
    """A `Tab` of a new browser. folder: for its profile. touch: it is a phone. features: media features, as pairs."""
    (read_commands, write_commands), (read_answers, write_answers) = os.pipe(), os.pipe()
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
               f"--user-data-dir={folder}", "--disable-background-networking", "about:blank"]
    # The protocol is spoken on the file descriptors 3 and 4.
    pipes = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
    with open(Path(folder) / "chromium.log", "w") as log, launching.running(
            ["bash", "-c", pipes, "bash", *command], pass_fds=(read_commands, write_answers), stdout=log, stderr=log):
        os.close(read_commands)
        os.close(write_answers)
        tab = Tab(write_commands, read_answers)
        tab.attach(width, height, touch, scripts, features)
        try:
            yield tab
        finally:
            os.close(write_commands)
            os.close(read_answers)


class Tab:
    """One page. complaints: errors and warnings of the console, and exceptions. requests: addresses of the network."""

    def __init__(self, commands, answers):
        self.commands, self.answers, self.session, self.number = commands, answers, None, 0
        self.pending, self.complaints, self.requests, self.loads = b"", [], [], 0

    def attach(self, width, height, touch, scripts, features):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if touch else 1,
                  mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": name, "value": value} for name, value in features])

    def call(self, method, **parameters):
        """Send one command; returns its result. What the page reports meanwhile is noted."""
        return self.result(self.send(method, **parameters))

    def send(self, method, **parameters):
        """Send one command; returns the number under which it is answered."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        return self.number

    def result(self, number):
        while True:
            answer = self.read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def read(self):
        """The next message of the browser; events are noted by `note`."""
        until = time.monotonic() + DEADLINE_S
        while b"\0" not in self.pending:
            assert select.select([self.answers], [], [], max(until - time.monotonic(), 0))[0], "Chromium is silent"
            read = os.read(self.answers, 1 << 20)
            assert read, "Chromium has ended"
            self.pending += read
        line, _, self.pending = self.pending.partition(b"\0")
        message = json.loads(line)
        self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, event, details):
        if event == "Runtime.exceptionThrown":
            self.complaints.append(details["exceptionDetails"])
        elif event == "Runtime.consoleAPICalled" or event == "Log.entryAdded":
            self.complaints.append(details)
        elif event == "Network.requestWillBeSent":
            address = details["request"]["url"]
            self.requests += [address] if not address.startswith(("data:", "file:")) else []
        elif event == "Page.loadEventFired":
            self.loads += 1

    def open(self, path):
        before = self.loads
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while self.loads == before:
            self.read()

    def ask(self, expression):
        """The value of an expression in the page, promises awaited, as plain JSON."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression):
        """Ask until it is true. Raises AssertionError with the expression if it does not become so."""
        until = time.monotonic() + DEADLINE_S
        while not self.ask(expression):
            assert time.monotonic() < until, expression
            time.sleep(0.05)

    def press(self, key):
        text = {"text": key} if len(key) == 1 else {}
        code = {"key": key, "windowsVirtualKeyCode": CODES.get(key, ord(key[0].upper()))}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def place(self, selector, across=0.5, down=0.5):
        """A point in the window, inside of an element that is scrolled into view, once the scrolled page is drawn."""
        return self.ask(f"""(async () => {{ const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{ block: "center", behavior: "instant" }});
            for (const frame of [1, 2]) await new Promise(requestAnimationFrame);
            const box = element.getBoundingClientRect();
            return {{ x: box.left + {across} * box.width, y: box.top + {down} * box.height }}; }})()""")

    def drag(self, selector, start, end):
        """Move a held mouse button over an element; start, end: (across, down) as shares of it. A click if they are
        the same."""
        at = self.place(selector, *start)
        self.call("Input.dispatchMouseEvent", type="mousePressed", button="left", buttons=1, clickCount=1, **at)
        if start != end:
            at = self.place(selector, *end)
            self.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **at)

    def click(self, selector):
        self.drag(selector, (0.5, 0.5), (0.5, 0.5))

    def swipe(self, selector, start, end, steps=8):
        """The same with a finger."""
        places = [[a + (b - a) * step / steps for a, b in zip(start, end)] for step in range(steps + 1)]
        for number, place in enumerate(places):
            kind = "touchMove" if number else "touchStart"
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[self.place(selector, *place)])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def tap(self, selector):
        at = self.place(selector)
        # Both at once: a finger that rests for long, because the machine is busy, is not a tap.
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[at])
        self.result(self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[]))

    def screenshot(self, path, **options):
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **options)["data"]))
