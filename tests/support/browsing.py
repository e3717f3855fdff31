"""Measure a page in a real browser, at a given width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_HARNESS = """<!DOCTYPE html><meta charset="utf-8">
<style>body { margin: 0 } iframe { border: 0; width: %dpx; height: 3000px }</style>
<iframe id="page"></iframe><script>
const frame = document.getElementById("page");
frame.onload = () => {
  const inside = frame.contentDocument, outside = [];
  let smallest = 99;
  for (const svg of inside.querySelectorAll("svg"))
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBBox(), view = svg.viewBox.baseVal;
      const letters = parseFloat(inside.defaultView.getComputedStyle(text).fontSize);
      smallest = Math.min(smallest, letters * svg.getBoundingClientRect().width / view.width);
      if (box.x < -1 || box.x + box.width > view.width + 1 || box.y < -1 || box.y + box.height > view.height + 1)
        outside.push(text.textContent);
    }
  const found = { overflow: Math.max(0, inside.documentElement.scrollWidth - frame.clientWidth), outside, smallest,
                  title: inside.title };
  for (const [name, what] of Object.entries(%s)) found[name] = inside.querySelectorAll(what).length;
  const note = document.createElement("pre");
  note.id = "found"; note.textContent = JSON.stringify(found); document.body.append(note);
};
frame.srcdoc = %s;
</script>"""


def browse(page: str, folder: Path, width: int, counted: Mapping[str, str]) -> dict[str, Any]:
    """Open a page in a headless browser, in a frame of that width; save an image of it as `shot.png`.

    Args:
        page: HTML.
        folder: Where files may lie.
        width: Of the frame, in pixels.
        counted: Name -> selector of the elements to count.

    Returns:
        `overflow` in pixels, the texts `outside` of their charts, the `smallest` letters of a chart in pixels, the
        `title`, and the counts by name.
    """
    safe = json.dumps(page).replace("</", "<\\/")
    (folder / "harness.html").write_text(_HARNESS % (width, json.dumps(dict(counted)), safe))
    (folder / "page.html").write_text(page)
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--virtual-time-budget=3000", f"--window-size={max(width, 500)},2400"]
    shot = [*command, f"--screenshot={folder / 'shot.png'}", (folder / "page.html").as_uri()]
    subprocess.run(shot, check=True, capture_output=True, timeout=120)
    told = subprocess.run(
        [*command, "--dump-dom", (folder / "harness.html").as_uri()], check=True, capture_output=True, text=True,
        timeout=120,
    ).stdout  # fmt: skip
    text = re.sub(r"&(amp|lt|gt);", lambda match: {"amp": "&", "lt": "<", "gt": ">"}[match[1]], told)
    answer: dict[str, Any] = json.loads(text.rpartition('<pre id="found">')[2].partition("</pre>")[0])
    return answer
