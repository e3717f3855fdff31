"""Invalid commands: one line on stderr, before any output or request."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import RunVerb

CLASSIFY, INFER, CONVERT = "classify image.jpg --model m", "infer --model m", "convert x.onnx --name m --print-recipe"
SEVERAL = "detect image.jpg other.jpg --model m --draw"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: Path) -> Path:
    """A folder with some files and a store, `models`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("empty", "keys", "models"):
        Path(folder).mkdir()
    Path("models/digits").symlink_to(digits)
    for name, content in (("image.jpg", b""), ("other.jpg", b""), ("x.onnx", b"nonsense"), ("x.npy", b"nonsense")):
        Path(name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nonsense", "nonsense"),
        ("--nonsense", "--nonsense"),
        ("models load --nonsense", "--nonsense"),
        ("models extra", "extra"),
        ("cache nonsense", "nonsense"),
        # connections
        ("models --url ftp://h:1", "ftp"),
        ("models --url http://", "http"),
        ("models --header Authorization", "expected NAME:TEXT"),
        ("models --header=", "expected NAME:TEXT"),
        ("models --url https://h:1 --ca-file ca.pem", "ca.pem"),
        *((f"models --url http://h:1 --{option} f", f"--{option}: the connection to") for option in
          ("ca-file", "client-cert", "client-key")),
        ("health --wait -1", "--wait"),
        # images
        ("classify image.jpg", "--model"),
        (f"{CLASSIFY} --top-k 0", "--top-k"),
        (f"{CLASSIFY} --batch-size 0", "--batch-size"),
        (f"{CLASSIFY} --concurrency 0", "--concurrency"),
        (f"{CLASSIFY} --csv --json", "choose one"),
        ("classify empty --model m", "holds no image"),
        ("embed empty --model m --out v.parquet", "holds no image"),
        ("detect https://example.org/cat.jpg --model m", "fetch_urls=True"),
        ("classify http://10.0.0.1/cat.jpg --model m", "curl -O"),
        ("segment - --model m", "> image.jpg"),
        ("classify data:image/png;base64,iVBORw0KGgo//Ag== --model m", "a data: URL"),
        (f"classify iVBORw0KGgo{'A' * 4000} --model m", "base64 text"),
        ("classify <svg/> --model m", "SVG"),
        (f"{SEVERAL} x.png", "one file for 2 images"),
        ("detect image.jpg --model m --draw x.txt", "unknown image format"),
        ("detect image.jpg --model m --draw image.jpg", "would overwrite"),
        # tensors
        (f"{INFER} --input X=none.npy", "cannot read none.npy"),
        (f"{INFER} --input X", "expected NAME=FILE"),
        (f"{INFER} --input =x.npy", "expected NAME=FILE"),
        (f"{INFER} --input X=empty", "Is a directory"),
        (f"{INFER} --input X=image.jpg", "it is empty"),
        (f"{INFER} --input X=x.npy", "numpy.save"),
        (f"{INFER} --input X=hello", "strings need quotes"),
        (f"{INFER} --input none.npz", "none.npz"),
        (f"{INFER} --input X=[1] --input X=[2]", "twice"),
        (f"{INFER} --input X=[1", "not JSON"),
        # versions
        ("inspect nowhere", "nowhere"),
        ("inspect x.onnx", "x.onnx"),
        ("inspect models", "name one of its models: digits"),
        ("inspect models/digit", "did you mean 'models/digits'?"),
        ("inspect empty", "has no version folder"),
        ("verify models/digits --precision fp61", "did you mean 'fp16'"),
        ("verify models/digits --engine openvin", "did you mean 'openvino'"),
        ("explain models/digits --set precision", "a value is missing"),
        ("explain models/digits --set precison=bf16", "did you mean 'precision'"),
        ("explain models/digits --set threads=x", "--set must"),
        ("sign models/digits:3 --key k", "no such file"),
        ("convert missing.onnx --name m --model-store .", "there is no file"),
        (f"{CONVERT} --out-indices 1,b", "cannot read --out-indices"),
        (f"{CONVERT} --preprocess {{", "cannot read --preprocess"),
        (f"{CONVERT} --layout hwc", "'layout'"),
        (f"{CONVERT} --top-k -1", "'top_k'"),
        (f"{CONVERT} softmaxx=1", "unknown key 'softmaxx'"),
        (f"{CONVERT} --softmaxx", "--softmaxx"),
        (f"{CONVERT} --version 0", "--version"),
        (f"{CONVERT} --relative-l2 x", "--relative-l2"),
        # stores and caches
        ("pull models copy", "is not an address"),
        ("push models copy", "is not an address"),
        ("pull oci://127.0.0.1:1/models:1 copy --trusted-keys nowhere", "cannot be read"),
        ("pull oci://127.0.0.1:1/models:1 copy --trusted-keys keys", "no public key"),
        ("cache list --cache none", "there is no cache at none"),
        ("cache prune --cache off", "the cache is off"),
        ("cache prune --cache empty --to much", "'much' is not a size"),
        # stories
        ("story --model m --weights none.pth", "there is no file none.pth"),
        ("story --model m --preprocess {resize}", "--preprocess is not JSON"),
        ("story --model m --preprocess [1]", "must be an object"),
        ("story --model m --html nowhere/report.html", "there is no folder nowhere"),
        ("story --model m --image-size 8", "--image-size"),
        ("story --model m --seconds 0", "--seconds"),
    ],
)  # fmt: skip
def test_mistake_is_reported_before_any_work(run: RunVerb, here: Path, words: str, message: str) -> None:
    before = sorted(here.iterdir())
    finished = run(*words.split(" "))
    assert finished.code in (1, 2)
    assert finished.out == ""
    assert message.lower() in " ".join(finished.err.split()).lower()
    assert len(finished.err) < 1000, "long arguments are abbreviated"
    assert sorted(here.iterdir()) == before


def test_header_is_not_repeated_in_an_error(run: RunVerb) -> None:
    """A header may be a secret."""
    assert "topsecret" not in run("models", "--header", "topsecret").err
