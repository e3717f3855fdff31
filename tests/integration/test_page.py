"""The page in a browser, with fake servers that are slow, fail or send hostile text, and with a real one."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_transport import FakeTransport, echo
from page_browser import PATIENCE_MS, Opened, chromium, opened, serving
from PIL import Image
from playwright.sync_api import Browser, expect
from playwright.sync_api import Error as BrowserError
from running import Server, Serving, free_ports
from shown_server import METRICS, PIXELS, ROLLOUT, Shown, config, counted, encoded, responses
from starlette.applications import Starlette
from starlette.routing import Mount
from task_outputs import DETECTION, detector_outputs

from graphkiln.page.app import build_app
from graphkiln.page.security import BODY_LIMIT
from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.errors import ServerError
from graphkiln_backend.system.admin_key import find_key
from graphkiln_client.transports.base import InferRequest, InferResponse

pytestmark = pytest.mark.slow

HOSTILE = '"><img src=x onerror=alert(1)><script>alert(2)</script>'
VIEWS = ("try", "models", "traffic")
LOADED = 'graphkiln_load_seconds{{model="m",version="1",instance="m_0"}} {}\n'
# In one reading: of several, Chromium complains.
ALPHAS = """(places) => {
  const canvas = document.querySelector('.shown canvas');
  const { data, width } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const scale = canvas.width / document.querySelector('.shown img').naturalWidth;
  return places.map(([x, y]) => data[4 * (Math.round(y * scale) * width + Math.round(x * scale)) + 3]);
}"""
NAMED_FILES = """([name, kind, type, bytes]) => {
    const files = new DataTransfer();
    files.items.add(new File([new Uint8Array(bytes)], name, { type }));
    const options = { bubbles: true, cancelable: true };
    const event = kind === "paste" ? new ClipboardEvent("paste", { ...options, clipboardData: files })
                                   : new DragEvent("drop", { ...options, dataTransfer: files });
    document.querySelector("main").dispatchEvent(event);
}"""
COPY = """async (bytes) => {
    const image = new Blob([new Uint8Array(bytes)], { type: "image/png" });
    await navigator.clipboard.write([new ClipboardItem({ "image/png": image })]);
}"""
expect.set_options(timeout=PATIENCE_MS)


class Held(FakeTransport):
    """Delays inference requests until `released` is set."""

    def __init__(self) -> None:
        super().__init__(responses())
        self.released = threading.Event()

    async def send(self, call: Any, deadline: Any) -> Any:
        while call.request.name == "infer" and not self.released.is_set():
            await asyncio.sleep(0.01)
        return await super().send(call, deadline)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    shown = Shown(tmp_path)
    publish(shown, *(f"class {index}" for index in range(2)))
    return shown


@pytest.fixture
def url(shown: Shown) -> Iterator[str]:
    with serving(build_app(shown.server())) as url:
        yield url


def publish(shown: Shown, *labels: str) -> None:
    """Publish two versions of a classifier with labels; their counters increase at each reading."""
    contract = Contract(preprocess=PIXELS, labels=labels, output="Y" if labels else "")
    text = Contracts.of({"1": contract, "2": contract}).to_json()
    readings = iter(range(1, 1_000_000))

    def statistics(model: str, version: str) -> dict[str, Any]:
        del model, version
        (row,) = counted(next(readings))["model_stats"]
        return {"model_stats": [row, {**row, "version": "2"}]}

    shown.transport.responses |= {
        "model_config": {"max_batch_size": 4, "parameters": {"contracts": {"string_value": text}}},
        "model_statistics": statistics,
        "infer": lambda request, _: scores_of(request, max(2, len(labels))),
    }


def scores_of(request: InferRequest, classes: int) -> InferResponse:
    """Return decreasing scores from 1."""
    scores = np.linspace(1, 0, classes, dtype=np.float32)[np.newaxis]
    return InferResponse(model="m", version=request.version, outputs={"Y": scores})


def give(it: Opened, kind: str, name: str = "seven.png") -> None:
    """Dispatch a drop or paste event with an image."""
    it.page.evaluate(NAMED_FILES, [name, kind, "image/png", list(encoded(8, 8))])


def file(name: str) -> dict[str, Any]:
    return {"name": name, "mimeType": "image/png", "buffer": encoded(8, 8)}


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_image_is_dropped_or_pasted(browser: Browser, url: str, kind: str) -> None:
    with opened(browser, url) as it:
        give(it, kind)
        expect(it.wait_for(".bars tbody tr:first-child th", "class 0")).to_be_visible()
        expect(it.page.locator(".bars td.n").first).to_have_text("100.0%")
        expect(it.page.locator(".times dl")).to_contain_text("compute5 ms")
        expect(it.page.locator("#said")).to_have_text("seven.png: class 0, 100.0%")


def drop_from_disk(it: Opened, path: Path) -> None:
    """Let Chromium create the events of a file drop."""
    chromium = it.page.context.new_cdp_session(it.page)
    dragged = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        chromium.send("Input.dispatchDragEvent", {"type": kind, "x": 500, "y": 400, "data": dragged})


def test_file_drop_from_disk(browser: Browser, url: str, tmp_path: Path) -> None:
    (tmp_path / "seven.png").write_bytes(encoded(8, 8))
    with opened(browser, url) as it:
        drop_from_disk(it, tmp_path / "seven.png")
        expect(it.wait_for(".bars tbody tr:first-child th", "class 0")).to_be_visible()
        expect(it.page.locator("figcaption")).to_contain_text("seven.png")
        expect(it.page.locator("body.dragging")).to_have_count(0)


def test_dropped_folder_is_refused(browser: Browser, url: str, tmp_path: Path, shown: Shown) -> None:
    (tmp_path / "photos").mkdir()
    with opened(browser, url) as it:
        it.page.click("#tab-traffic")
        drop_from_disk(it, tmp_path / "photos")
        it.wait_for("#results .error", "photos is a folder")
        expect(it.page.locator("#results .card")).to_have_count(0)
        assert not shown.transport.inferred()


def test_image_is_pasted_from_the_clipboard(browser: Browser, url: str) -> None:
    with opened(browser, url, permissions=["clipboard-read", "clipboard-write"]) as it:
        it.page.evaluate(COPY, list(encoded(8, 8)))
        it.page.keyboard.press("Control+V")
        expect(it.wait_for(".bars tbody tr:first-child th", "class 0")).to_be_visible()


def test_two_versions_side_by_side(browser: Browser, url: str, shown: Shown) -> None:
    with opened(browser, url) as it:
        it.page.select_option("#other", "m/2")
        it.ask(file("a.png"), file("b.png"))
        expect(it.page.locator(".card .answer .bars")).to_have_count(4)
        assert {request.version for request in shown.transport.inferred()} == {"1", "2"}


def test_keyboard_navigation(browser: Browser, url: str) -> None:
    with opened(browser, url) as it:
        keyboard = it.page.keyboard
        keyboard.press("Tab")
        expect(it.page.locator("#tab-try")).to_be_focused()
        keyboard.press("Tab")
        expect(it.page.locator("#model")).to_be_focused()
        keyboard.press("Tab")
        keyboard.press("Tab")
        expect(it.page.locator("#files")).to_be_focused()
        with it.page.expect_file_chooser() as chooser:
            keyboard.press("Space")
        chooser.value.set_files([file("a.png")])  # type: ignore[list-item]
        it.wait_for(".bars")
        it.page.locator("#tab-try").focus()
        keyboard.press("ArrowRight")
        expect(it.page.locator("#tab-models")).to_be_focused()
        it.page.locator("#models th button").first.focus()
        keyboard.press("Enter")
        it.wait_for("#model-detail h2", "version 1")
        expect(it.page.locator("#models th button").first).to_be_focused()


def test_busy_state_for_slow_server(browser: Browser, tmp_path: Path) -> None:
    held = Held()
    shown = Shown(tmp_path, transport=held)
    publish(shown, "a", "b")
    with serving(build_app(shown.server())) as url, opened(browser, url) as it:
        it.ask(file("a.png"))
        it.wait_for(".answer .busy", "asking the server")
        held.released.set()
        it.wait_for(".answer .bars")
        expect(it.page.locator(".busy")).to_have_count(0)


def test_missing_model_is_not_replaced(browser: Browser, url: str, shown: Shown) -> None:
    with opened(browser, url) as it:
        serves = shown.transport.responses["model_statistics"]
        (_, second) = serves("", "")["model_stats"]
        shown.transport.responses["model_statistics"] = {"model_stats": [second]}
        read_again(it)
        expect(it.page.locator("#model option:checked")).to_have_text("m, version 1 is not ready")
        it.ask(file("a.png"))
        it.wait_for("#results .error", "the chosen model is not ready")
        assert not shown.transport.inferred()
        shown.transport.responses["model_statistics"] = serves
        read_again(it)
        expect(it.page.locator("#model")).to_have_value("m/1")
        it.ask(file("a.png"))
        it.wait_for(".bars")
        assert {request.version for request in shown.transport.inferred()} == {"1"}


def test_reloaded_version_is_updated(browser: Browser, shown: Shown, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    shown.transport.responses["model_config"] = config(takes_images=False)
    shown.transport.responses["model_metadata"]["inputs"] = [{"name": "OLD", "datatype": "FP32", "shape": [3]}]
    metrics.write_text(METRICS.read_text() + LOADED.format(1))
    server = shown.server()
    server.metrics_url = metrics.as_uri()
    with serving(build_app(server)) as url, opened(browser, url) as it:
        it.wait_for("#tensor-form label", "OLD")
        it.page.click("#tab-models")
        it.page.locator("#models th button").first.click()
        it.wait_for("#model-detail", "OLD")
        shown.transport.responses["model_metadata"]["inputs"] = [{"name": "NEW", "datatype": "FP32", "shape": [3]}]
        metrics.write_text(METRICS.read_text() + LOADED.format(2))
        it.page.click("#list")
        it.wait_for("#model-detail", "NEW")
        it.page.click("#tab-try")
        it.wait_for("#tensor-form label", "NEW")


def read_again(it: Opened) -> None:
    """Refresh the list of models and return to Try."""
    it.page.click("#tab-models")
    it.page.click("#list")
    expect(it.page.locator("#admin-said")).to_be_empty()
    it.page.click("#tab-try")


def test_invalid_tensor_values(browser: Browser, url: str, shown: Shown) -> None:
    """A decimal comma must not change the values."""
    shown.transport.responses["model_config"] = config(takes_images=False)
    shown.transport.responses["model_metadata"]["inputs"] = [{"name": "X", "datatype": "FP32", "shape": [2]}]
    shown.transport.responses["infer"] = echo
    with opened(browser, url, locale="de-DE") as it:
        values = it.wait_for("#tensor-form textarea")
        for text, told in (("1,5 2,5", "4 values for a shape of 2"), ("eins", "'eins' is no FP32 value")):
            values.fill(text)
            it.page.click("#tensor-form button")
            it.wait_for("#results .error", told)
        assert not shown.transport.inferred()
        for text, sent in (("", "0, 0"), ("1.5 2500.25", "1.5, 2500.25")):
            values.fill(text)
            it.page.click("#tensor-form button")
            it.wait_for(".outputs pre", sent)


def test_drop_on_other_view(browser: Browser, url: str) -> None:
    with opened(browser, url) as it:
        it.page.click("#tab-traffic")
        give(it, "drop")
        expect(it.wait_for(".bars tbody tr:first-child th")).to_be_visible()
        expect(it.page.locator("#tab-try")).to_have_attribute("aria-selected", "true")


def test_image_of_20_megabytes(browser: Browser, url: str) -> None:
    content = io.BytesIO()
    Image.new("RGB", (2700, 2600)).save(content, "BMP")
    assert len(content.getvalue()) > 20_000_000
    with opened(browser, url) as it:
        it.ask({"name": "large.bmp", "mimeType": "image/bmp", "buffer": content.getvalue()})
        it.wait_for(".bars tbody th", "class 0")


def test_page_below_a_path(browser: Browser, shown: Shown) -> None:
    below = Starlette(routes=[Mount("/see", build_app(shown.server()))])
    with serving(below) as url, opened(browser, f"{url}see/") as it:
        it.ask(file("a.png"))
        it.wait_for(".bars")
        it.page.click("#tab-models")
        it.page.locator("#models th button").first.click()
        it.wait_for("#model-detail h3", "Signature")


def test_too_large_file_is_not_sent(browser: Browser, url: str, shown: Shown, tmp_path: Path) -> None:
    """If an upload is rejected midway, browsers only report a closed connection."""
    large = tmp_path / "large.bmp"
    with large.open("wb") as content:
        content.truncate(BODY_LIMIT + 1)
    with opened(browser, url) as it:
        expect(it.page.locator("#state")).to_contain_text("ready")
        asked: list[str] = []
        it.page.on("request", lambda request: asked.append(request.url))
        it.ask(str(large))
        it.wait_for(".answer .error", "larger than 64 MiB")
        assert [address for address in asked if "/image" in address] == []
        assert not shown.transport.inferred()


def test_tensors_are_sent_to_one_version(browser: Browser, url: str) -> None:
    with opened(browser, url) as it:
        expect(it.page.locator("#other")).to_be_visible()
        it.page.click("#switch")
        it.wait_for("#tensor-form button")
        expect(it.page.locator("#other")).to_be_hidden()


def test_decoupled_model_has_explanation_instead_of_programs(browser: Browser, url: str, shown: Shown) -> None:
    decoupled = {"model_transaction_policy": {"decoupled": True}}
    shown.transport.responses["model_config"] = config(takes_images=False) | decoupled
    with opened(browser, url) as it:
        it.page.click("#snippets summary")
        it.wait_for("#snippets p", "answers in a stream")
        expect(it.page.locator("#snippets pre")).to_have_count(0)


def test_copied_program_is_announced(browser: Browser, url: str) -> None:
    with opened(browser, url, permissions=["clipboard-read", "clipboard-write"]) as it:
        it.page.click("#snippets summary")
        it.page.get_by_role("button", name="Copy the curl program").click()
        expect(it.page.locator("#said")).to_have_text("curl: copied")
        assert it.page.evaluate("navigator.clipboard.readText()").startswith("python3 -c ")


def test_thousand_models(browser: Browser, url: str, shown: Shown) -> None:
    (row,) = counted(1)["model_stats"]
    rows = [{**row, "name": f"model-{number:03}"} for number in range(1000)]
    shown.transport.responses["model_statistics"] = {"model_stats": rows}
    with opened(browser, url, width=320) as it:
        expect(it.page.locator("#model option")).to_have_count(1000)
        it.page.click("#tab-models")
        expect(it.page.locator("#models tbody tr")).to_have_count(1000)
        it.page.fill("#filter", "MODEL-99")
        expect(it.page.locator("#models tbody tr")).to_have_count(10)
        it.page.fill("#filter", "none")
        it.wait_for("#models .empty", "No name has that in it")
        assert overflow(it) == 0


def test_admin_key_stays_in_its_tab(browser: Browser, url: str, shown: Shown) -> None:
    with opened(browser, url) as it:
        it.page.click("#tab-models")
        it.page.fill("#key", "a-secret")
        it.page.click("#list")
        it.wait_for("#models", "it is damaged")
        kept = "JSON.stringify([location.href, document.cookie, {...localStorage}, {...sessionStorage}, history.state])"
        assert "a-secret" not in it.page.evaluate(kept)
        assert "a-secret" in shown.keys
        other = it.page.context.new_page()
        other.goto(url)
        other.click("#tab-models")
        expect(other.locator("#models tbody tr")).to_have_count(2)
        assert other.locator("#models", has_text="it is damaged").count() == 0
        assert other.input_value("#key") == ""


def test_print_and_reduced_motion(browser: Browser, url: str) -> None:
    waits = """() => {
      const waiting = document.createElement("p");
      waiting.className = "busy";
      document.body.append(waiting);
      return getComputedStyle(waiting, "::before").animationName;
    }"""
    with opened(browser, url, scheme="dark", reduced_motion="reduce") as it:
        assert it.page.evaluate(waits) == "none"
        it.ask(file("a.png"))
        it.wait_for(".times")
        it.page.emulate_media(media="print", reduced_motion="no-preference")
        assert it.page.evaluate(waits) == "turn"
        expect(it.page.locator("#ask")).to_be_hidden()
        expect(it.page.locator(".bars")).to_be_visible()
        paper = "getComputedStyle(document.documentElement).getPropertyValue('--page')"
        assert it.page.evaluate(paper).strip() == "#faf8f5", "dark ink on light paper"


def test_server_messages_are_text(browser: Browser, url: str, shown: Shown) -> None:
    with opened(browser, url) as it:
        shown.transport.responses["infer"] = ServerError(f"it broke {HOSTILE}", hint="look at its log")
        it.ask(file("a.png"))
        expect(it.wait_for(".error")).to_contain_text(f"it broke {HOSTILE}")
        expect(it.page.locator(".error .hint")).to_have_text("look at its log")
        it.ask({"name": "a.png", "mimeType": "image/png", "buffer": b"no image"})
        it.wait_for(".error", "not an image in a known format")


@pytest.mark.parametrize("labels", [[], [HOSTILE, "b"], ["x" * 500, "b"]])
def test_labels_and_file_names_are_text(browser: Browser, url: str, shown: Shown, labels: list[str]) -> None:
    publish(shown, *labels)
    with opened(browser, url, width=320) as it:
        it.ask(file(f"{HOSTILE}.png"))
        expect(it.wait_for(".bars th[scope=row]")).to_have_text(labels[0] if labels else "class 0")
        expect(it.page.locator("figcaption")).to_contain_text(HOSTILE)
        it.page.click("#tab-models")
        it.page.locator("#models th button").first.click()
        it.wait_for("#model-detail h3", "Signature")
        assert it.page.locator("main img[src=x], main script").count() == 0
        assert overflow(it) == 0


def test_thousand_classes(browser: Browser, url: str, shown: Shown) -> None:
    publish(shown, *(f"a label of several words, number {index}" for index in range(1000)))
    with opened(browser, url, width=320) as it:
        it.page.fill("#top", "1000")
        it.ask(file("a.png"))
        expect(it.page.locator(".bars tbody tr")).to_have_count(1000)
        assert overflow(it) == 0


def test_boxes_and_masks_are_drawn_over_the_image(browser: Browser, url: str, shown: Shown) -> None:
    outputs = {name: array[:1] for name, array in detector_outputs().items()}
    text = Contracts.of({"1": Contract(preprocess=PIXELS, labels=("a", HOSTILE, "c"), task=DETECTION)}).to_json()
    shown.transport.responses |= {
        "model_config": {"max_batch_size": 4, "parameters": {"contracts": {"string_value": text}}},
        "infer": InferResponse(model="m", version="1", outputs=outputs),
    }
    with opened(browser, url) as it:
        it.ask({"name": "a.png", "mimeType": "image/png", "buffer": encoded(250, 60)})
        it.wait_for(".answer table", HOSTILE)
        places = [(3, 45), (10, 30), (40, 30), (245, 58)]
        shown_at = it.page.locator(".shown img").bounding_box()
        assert shown_at
        assert shown_at["width"] > 380, "a small image is shown as large as a person can read it"
        assert abs(shown_at["width"] / shown_at["height"] - 250 / 60) < 0.1
        drawn = dict(zip(places, it.page.evaluate(ALPHAS, places), strict=True))
        assert drawn[3, 45] > 180, "the edge of the first box"
        assert 80 < drawn[10, 30] < 160, "its mask, through which the image is seen"
        assert (drawn[40, 30], drawn[245, 58]) == (0, 0), "outside of the mask, and of all boxes"


@pytest.mark.parametrize("look", [("light", 1280), ("dark", 320)], ids=str)
def test_accessibility(browser: Browser, url: str, shown: Shown, digits: Path, look: tuple[str, int]) -> None:
    scheme, width = look
    (shown.folder / "m").mkdir()
    (shown.folder / "m" / "1").symlink_to(digits / "1")
    with opened(browser, url, width=width, scheme=scheme) as it:
        it.ask(file("a.png"))
        it.wait_for(".times")
        it.page.click("#snippets summary")
        assert faults_of_access(it) == []
        it.page.click("#switch")
        it.wait_for("#tensor-form button")
        assert faults_of_access(it) == []
        it.page.click("#tab-models")
        it.page.locator("#models th button").first.click()
        it.wait_for(".verdict")
        assert faults_of_access(it) == []
        it.page.click("#tab-traffic")
        it.wait_for(".chart")
        it.page.locator(".chart summary").first.click()
        assert faults_of_access(it) == []


def faults_of_access(it: Opened) -> list[str]:
    found = Axe().run(it.page).response["violations"]
    return [f"{fault['id']}: {fault['nodes'][0]['html'][:200]}" for fault in found]


@pytest.mark.parametrize("width", [320, 768, 2560])
def test_no_view_is_wider_than_its_window(browser: Browser, url: str, width: int) -> None:
    with opened(browser, url, width=width) as it:
        it.ask(file("a.png"))
        it.wait_for(".times")
        it.page.click("#snippets summary")
        for view in VIEWS:
            it.page.click(f"#tab-{view}")
            it.wait_for({"try": ".times", "models": "#models table", "traffic": ".chart"}[view])
            assert overflow(it) == 0, view


@pytest.mark.parametrize("width", [320, 1280])
def test_versions_of_other_backends(browser: Browser, url: str, shown: Shown, width: int) -> None:
    serves = shown.transport.responses["model_statistics"]

    def statistics(model: str, version: str) -> dict[str, Any]:
        rows = serves(model, version)["model_stats"]
        return {"model_stats": [*rows, {**rows[-1], "name": 'other "one"\\'}]}

    shown.transport.responses["model_statistics"] = statistics
    with opened(browser, url, width=width) as it:
        it.page.click("#tab-models")
        rows = it.page.locator("#models tbody tr")
        for number, cell in enumerate(("onnxruntime, cpu", "onnxruntime, native seat proven", "tensorrt unproven")):
            expect(rows.nth(number).locator("td").nth(2)).to_have_text(cell)
        rows.nth(1).locator("th button").click()
        expect(it.wait_for("#model-detail dl")).to_contain_text("backendonnxruntime, native seat proven")
        expect(it.page.locator("#model-detail")).to_contain_text("error 2e-7, last right")
        expect(it.page.locator("#model-detail dl").first).not_to_contain_text("instances")
        assert faults_of_access(it) == []
        assert overflow(it) == 0


@pytest.mark.parametrize("look", [("light", 320), ("dark", 1280)], ids=str)
def test_refused_versions(browser: Browser, shown: Shown, tmp_path: Path, look: tuple[str, int]) -> None:
    """Each has its state and its reason in the list and in the detail, without a key; the line above counts them."""
    scheme, width = look
    metrics, before = tmp_path / "metrics", METRICS.read_text()
    long = "broken/1/model.onnx cannot be loaded: " + "x" * 300
    lines = [
        refused_line("m", 3, f"the outputs changed: {HOSTILE}"),
        refused_line("broken", 1, long),
    ]
    metrics.write_text(before + "".join(lines))
    server = shown.server()
    server.metrics_url = metrics.as_uri()
    with serving(build_app(server)) as url, opened(browser, url, width=width, scheme=scheme) as it:
        state = it.wait_for("#state", "2 versions ready, 2 refused")
        expect(state).to_have_class("state bad")
        it.page.click("#tab-models")
        rows = it.page.locator("#models tbody tr", has=it.page.locator(".pill.bad"))
        expect(rows).to_have_count(2)
        for name, reason in (("broken", long), ("m", f"the outputs changed: {HOSTILE}")):
            row = it.page.locator("#models tbody tr", has_text="refused").filter(has_text=reason)
            expect(row.locator("th")).to_have_text(name)
            row.locator("th button").click()
            detail = it.page.locator("#model-detail")
            expect(detail.locator("h2")).to_have_text(name)
            expect(detail.locator("p").nth(1)).to_have_text(reason)
            assert row.locator("button", has_text="unload").count() == 0
            assert overflow(it) == 0
            hidden = it.page.locator("#models").evaluate("list => list.scrollWidth - list.clientWidth")
            assert width < 1000 or hidden <= 0, "reasons push no column out of sight"
        assert faults_of_access(it) == []
        metrics.write_text(before)
        it.page.click("#list")
        expect(it.wait_for("#state", "2 versions ready ·")).to_have_class("state good")
        expect(rows).to_have_count(0)
        expect(it.page.locator("#model-detail")).to_have_text("m, version 3 is not loaded any more.")


def refused_line(model: str, version: int, reason: str) -> str:
    text = reason.replace("\\", "\\\\").replace('"', '\\"')
    return f'graphkiln_version_refused{{model="{model}",version="{version}",reason="{text}"}} 1\n'


@pytest.mark.parametrize("look", [("light", 320), ("dark", 1280), ("light", 2560)], ids=str)
def test_rollout(browser: Browser, shown: Shown, tmp_path: Path, look: tuple[str, int]) -> None:
    scheme, width = look
    metrics = tmp_path / "metrics"
    metrics.write_text(METRICS.read_text() + ROLLOUT.format(phase="shadow", by="user", compared=2000))
    server = shown.server()
    server.metrics_url = metrics.as_uri()
    with serving(build_app(server)) as url, opened(browser, url, width=width, scheme=scheme) as it:
        it.page.click("#tab-models")
        it.page.locator("#models th button").first.click()
        place = it.wait_for("#rollout table")
        expect(it.page.locator("#rollout p")).to_have_text(
            "shadow Version 2 is compared with version 1 on 5% of the requests."
        )
        names, values = place.locator("th[scope=row]").all_inner_texts(), place.locator("td").all_inner_texts()
        rows = dict(zip(names, values, strict=True))
        assert (rows["compared"], rows["same decision"], rows["… at least"]) == ("2,000", "99.8%", "99.14%")
        assert rows["p99 of version 2"] == "7.9 ms"
        assert faults_of_access(it) == []
        assert overflow(it) == 0
        metrics.write_text(METRICS.read_text() + ROLLOUT.format(phase="aborted", by="server", compared=2040))
        it.page.click("#list")
        it.wait_for("#rollout", "2,040")
        expect(it.page.locator("#rollout p")).to_contain_text("Version 2 was aborted by the server")
        assert faults_of_access(it) == []
        metrics.write_text(METRICS.read_text())
        it.page.click("#list")
        expect(it.page.locator("#rollout")).to_be_empty()


def overflow(it: Opened) -> int:
    wide: int = it.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return wide


def test_policy_is_in_force(browser: Browser, url: str) -> None:
    with opened(browser, url) as it:
        with pytest.raises(BrowserError, match="TrustedHTML"):
            it.page.evaluate("document.body.innerHTML = '<b>markup</b>'")
        image = "document.querySelector('main').append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/' }))"
        with it.page.expect_console_message(lambda message: "Content Security Policy" in message.text):
            it.page.evaluate(image)
        assert it.faults
        it.faults.clear()


@pytest.fixture(scope="module")
def real(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    (port,) = free_ports(1)
    arguments = ("--model-store", repository / "model_repository", "--page-address", f"127.0.0.1:{port}")
    with Serving(
        tmp_path_factory.mktemp("page"), *arguments, "--model-control-mode=explicit", "--load-model=digits"
    ) as server:
        server.wait_ready()
        yield server, f"http://127.0.0.1:{port}/"


@pytest.mark.server
class TestRealServer:
    def test_digits_and_golden_sample(self, browser: Browser, real: tuple[Server, str], repository: Path) -> None:
        with opened(browser, real[1]) as it:
            it.ask(str(repository / "docs" / "digits" / "seven.png"))
            expect(it.wait_for(".bars tbody tr:first-child th")).to_have_text("seven")
            expect(it.page.locator(".times dl")).to_contain_text("queue")
            it.page.click("#switch")
            it.page.click("#tensor-form button")
            it.wait_for(".outputs .pill", "as the saved graph computed it: error")

    def test_page_reconnects_after_server_restart(
        self, browser: Browser, real: tuple[Server, str], repository: Path
    ) -> None:
        server, url = real
        with opened(browser, url) as it:
            triton = tritonserver_of(server)
            triton.kill()
            triton.wait()
            server.wait_ready()
            it.ask(str(repository / "docs" / "digits" / "seven.png"))
            expect(it.wait_for(".bars tbody tr:first-child th")).to_have_text("seven")

    def test_programs_run(self, browser: Browser, real: tuple[Server, str]) -> None:
        with opened(browser, real[1]) as it:
            it.page.click("#snippets summary")
            it.wait_for("#snippets pre")
            programs = {
                place.get_attribute("data-language"): place.inner_text()
                for place in it.page.locator("#snippets pre").all()
            }
        assert list(programs) == ["Python", "tritonclient", "curl"]
        for language, program in programs.items():
            command = ["bash", "-c", program] if language == "curl" else [sys.executable, "-c", program]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert ran.returncode == 0, ran.stderr
            assert ("OUTPUT_0" in ran.stdout) or language == "Python"
            assert ran.stdout.strip()

    def test_load_and_unload_with_admin_key(self, browser: Browser, real: tuple[Server, str]) -> None:
        server, url = real
        with opened(browser, url) as it:
            it.page.click("#tab-models")
            it.page.fill("#key", "wrong")
            it.page.click("#list")
            it.wait_for("#admin-said .error", "admin key")
            it.page.fill("#key", find_key("127.0.0.1", server.http_port))
            it.page.get_by_role("button", name="unload digits").click()
            it.wait_for("#models .pill", "unavailable")
            it.page.get_by_role("button", name="load digits", exact=True).click()
            it.wait_for("#models .pill", "ready")


def tritonserver_of(server: Server) -> psutil.Process:
    """Find the tritonserver process of a supervisor."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() == "tritonserver":
                return child
    raise AssertionError("there is no tritonserver")
