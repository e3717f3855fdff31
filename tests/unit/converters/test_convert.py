"""The story of a conversion, with a source in text: what is proven is written, all else is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import compute, draw
from PIL import Image
from sources import TextSource

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.image_config import image_config
from graphkiln_converters import opening
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec

TEXT = """(float[batch,3,8,8] image) => (float[batch,5] scores) {
    c = Conv<pads=[1,1,1,1]>(image, kernel)
    n = BatchNormalization(c, ones, zeros, mean, variance)
    r = Relu(n)
    p = GlobalAveragePool(r)
    f = Flatten(p)
    scores = MatMul(f, head)
}"""
WEIGHTS = {
    "kernel": draw(8, 3, 3, 3), "ones": np.ones(8, "f4"), "zeros": np.zeros(8, "f4"), "mean": draw(8, seed=1),
    "variance": np.full(8, 0.3, "f4"), "head": draw(8, 5, seed=2),
}  # fmt: skip
IMAGE = InputSpec(name="image", shape=(3, 8, 8))
SPEC = Preprocess(resize=8, crop=(8, 8), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> TextSource:
    made = TextSource(TEXT, (IMAGE,), WEIGHTS, preprocess=SPEC, labels=tuple("abcde"))
    monkeypatch.setattr(opening, "open_source", lambda *_: made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def run(store: Path, **fields: Any) -> Path:
    recipe = Recipe.model_validate({"source": "text", "name": "m", "model_store": store, **fields})
    return convert(recipe, command="a test")


def serve(version: Path, **feeds: AnyArray) -> dict[str, AnyArray]:
    with OnnxRuntimeEngine().build_reference(version / "model.onnx") as session:
        return session.run(feeds)


class TestFp32:
    def test_what_is_written_computes_the_same(self, source: TextSource, store: Path) -> None:
        version, image = run(store), draw(7, 3, 8, 8)
        assert version == store / "m" / "1"
        expected = compute(source.graph(), image=image)["scores"]
        np.testing.assert_allclose(serve(version, INPUT_0=image)["OUTPUT_0"], expected, rtol=1e-4, atol=1e-5)
        assert source.closed == 1

    @pytest.mark.usefixtures("source")
    def test_the_manifest_tells_how(self, store: Path) -> None:
        manifest = Manifest.read(run(store, softmax=True) / "manifest.json")
        assert (manifest.provenance.source, manifest.provenance.command) == ("a text", "a test")
        assert set(manifest.provenance.versions) == {"numpy", "onnx", "onnxruntime", "python"}
        conversion = manifest.conversion
        assert conversion is not None
        assert (conversion.recipe["version"], conversion.recipe["softmax"]) == (1, True)
        assert [record.name for record in conversion.passes][-2:] == ["rename", "softmax"]
        assert conversion.graph_bytes == (store / "m" / "1" / "model.onnx").stat().st_size
        assert conversion.output_errors["OUTPUT_0"] < 1e-5
        assert manifest.verification[0].batch_sizes == (1, 3)

    @pytest.mark.usefixtures("source")
    def test_clients_are_told_what_is_left_for_them(self, store: Path) -> None:
        plain = Manifest.read(run(store) / "manifest.json")
        assert (plain.preprocess, plain.labels_file, plain.ranking) == (SPEC, "labels.txt", None)
        ranked = Manifest.read(run(store, name="ranked", top_k=2, input="uint8-nhwc") / "manifest.json")
        assert ranked.preprocess == Preprocess.from_json(
            '{"resize": 8, "crop": [8, 8], "layout": "HWC", "dtype": "UINT8"}'
        )
        assert ranked.ranking == Ranking(scores="OUTPUT_0", indices="INDEX_0", labels=tuple("abcde"))
        assert ranked.labels is None

    @pytest.mark.usefixtures("source")
    def test_encoded_images_are_raw_pixels_and_a_line_of_the_configuration(self, store: Path) -> None:
        said = Manifest.read(run(store, input="encoded") / "manifest.json").preprocess
        assert said is not None
        assert said.dtype is DType.UINT8
        config = read_config(store / "m" / "config.pbtxt")
        assert config.parameters["accept_images"].string_value == "true"
        assert image_config(config, instances=1).name == "m.images"

    @pytest.mark.usefixtures("source")
    def test_encoded_images_where_the_configuration_was_written_before(self, store: Path) -> None:
        run(store, input="uint8-nhwc")
        with pytest.raises(ConversionError, match="lets the model take no encoded images") as caught:
            run(store, input="encoded")
        line = caught.value.hint.removeprefix("add: ")
        assert not (store / "m" / "2").exists()
        with (store / "m" / "config.pbtxt").open("a") as config:
            config.write(line)
        assert run(store, input="encoded").name == "2"

    @pytest.mark.usefixtures("source")
    def test_bytes_at_sizes_that_vary(self, store: Path) -> None:
        """Samples that were made for the source become pixels at the smallest and largest size."""
        source = TextSource(TEXT.replace("8,8]", "h,w]"), (IMAGE,), WEIGHTS, preprocess=SPEC)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "open_source", lambda *_: source)
            version = run(store, input="uint8-nhwc", dynamic=["image:2=4..16", "image:3=6..12"])
        pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 9, 3), np.uint8)
        image = np.stack([SPEC.normalize(one) for one in pixels])
        expected = compute(source.graph(), image=image)["scores"]
        np.testing.assert_allclose(serve(version, INPUT_0=pixels)["OUTPUT_0"], expected, rtol=1e-3, atol=1e-4)


class TestLabeledSamples:
    @pytest.fixture
    def labeled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Images, and in which third each of their pixels is brightest: what the source says, too."""
        text = "(float[batch,3,8,8] image) => (float[batch,3,8,8] map) { map = Identity(image) }"
        plain = Preprocess(resize=8, crop=(8, 8))
        made = TextSource(text, (IMAGE,), {}, preprocess=plain, labels=())
        monkeypatch.setattr(opening, "open_source", lambda *_: made)
        for folder in ("photos", "photos.masks"):
            (tmp_path / folder).mkdir()
        for number in range(4):
            pixels = np.random.default_rng(number).permutation(192).reshape(8, 8, 3).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
            Image.fromarray(pixels.argmax(axis=2).astype(np.uint8)).save(tmp_path / "photos.masks" / f"{number}.png")
        return tmp_path / "photos"

    def test_the_proof_says_how_good_the_graph_is(self, labeled: Path, store: Path) -> None:
        manifest = Manifest.read(run(store, task="segmentation", samples=labeled) / "manifest.json")
        assert "mIoU 100.00% instead of 100.00%" in manifest.verification[0].verdict

    def test_labels_that_do_not_fit(self, labeled: Path, store: Path) -> None:
        (labeled.with_name("photos.masks") / "3.png").unlink()
        with pytest.raises(ConversionError, match="there is no file"):
            run(store, task="segmentation", samples=labeled)
        assert not store.exists()


class TestRefused:
    def test_outputs_that_are_not_the_sources(
        self, source: TextSource, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = TextSource(TEXT, (IMAGE,), {**WEIGHTS, "mean": WEIGHTS["mean"] + np.float32(1e-3)})
        monkeypatch.setattr(source, "export", lambda _: other.graph())
        with pytest.raises(VerificationError, match="the outputs changed"):
            run(store)
        assert not store.exists()
        assert source.closed == 1

    def test_a_version_that_exists_before_anything_is_opened(self, source: TextSource, store: Path) -> None:
        (store / "m" / "4").mkdir(parents=True)
        with pytest.raises(ConversionError, match="4 exists already"):
            run(store, version=4)
        assert (source.closed, source.rows) == (0, [])

    def test_an_export_that_fails(self, source: TextSource, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: object) -> None:
            raise ConversionError("it branches on values")

        monkeypatch.setattr(source, "export", fail)
        with pytest.raises(ConversionError, match="branches on values"):
            run(store)
        assert source.closed == 1
        assert not store.exists()

    def test_images_that_no_client_can_make(self, source: TextSource, store: Path) -> None:
        with pytest.raises(ConversionError, match="clients make no bf16 images") as caught:
            run(store, precision="bf16", lower_edges=True)
        assert "--input uint8-nhwc" in caught.value.hint
        assert source.rows == [], "told before anything is run"

    @pytest.mark.usefixtures("source")
    def test_int8_without_samples_to_calibrate_on(self, store: Path) -> None:
        with pytest.raises(ConversionError, match="needs samples to calibrate on"):
            run(store, precision="int8")
        assert not store.exists()


@pytest.mark.usefixtures("source")
class TestLowered:
    def test_two_proofs_and_one_graph(self, store: Path) -> None:
        version = run(store, precision="fp16")
        manifest = Manifest.read(version / "manifest.json")
        assert [verdict.step for verdict in manifest.verification] == ["export", "fp16"]
        assert manifest.conversion is not None
        assert manifest.conversion.passes[-1].name == "lower-precision"
        assert manifest.conversion.passes[-1].note == "2/2 products in fp16"
        assert "proven with fp16 values and fp32 sums" in manifest.conversion.notes[0]

    def test_lower_edges_reach_the_client(self, store: Path) -> None:
        version = run(store, precision="fp16", lower_edges=True)
        manifest = Manifest.read(version / "manifest.json")
        assert [str(spec.dtype) for spec in (*manifest.signature.inputs, *manifest.signature.outputs)] == ["FP16"] * 2
        assert manifest.preprocess is not None
        assert str(manifest.preprocess.dtype) == "FP16"
        assert serve(version, INPUT_0=draw(2, 3, 8, 8).astype(np.float16))["OUTPUT_0"].dtype == np.float16

    def test_bytes_stay_bytes(self, store: Path) -> None:
        version = run(store, precision="bf16", lower_edges=True, input="uint8-nhwc")
        manifest = Manifest.read(version / "manifest.json")
        assert [str(spec.dtype) for spec in (*manifest.signature.inputs, *manifest.signature.outputs)] == [
            "UINT8",
            "BF16",
        ]

    def test_int8(self, store: Path, tmp_path: Path) -> None:
        np.savez(tmp_path / "c.npz", INPUT_0=draw(32, 3, 8, 8, seed=9))
        version = run(store, precision="int8", calibration=tmp_path / "c.npz", relative_l2=0.5)
        manifest = Manifest.read(version / "manifest.json")
        assert [verdict.step for verdict in manifest.verification] == ["export", "int8"]
        assert manifest.verification[1].relative_l2_limit == 0.5
        assert manifest.conversion is not None
        coverage, speed = manifest.conversion.notes
        assert coverage == "2/2 products in int8"
        assert speed.startswith("rate of int8 to that of fp32, on ")


class Rough(TextSource):
    """Its own fp32 is off by a share of each output; a graph that is off, too, is so otherwise."""

    error = 1.5e-5

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        return {name: (array * (1 + self.error)).astype("f4") for name, array in super().run(feeds).items()}

    def run_in_fp64(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        return {name: array.astype("f8") for name, array in super().run(feeds).items()}


def opened_rough(monkeypatch: pytest.MonkeyPatch, error: float, text: str = TEXT) -> None:
    made = Rough(text, (IMAGE,), WEIGHTS)
    made.error = error
    monkeypatch.setattr(opening, "open_source", lambda *_: made)


def test_an_export_that_is_nearer_to_fp64_than_its_source_is_right(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_rough(monkeypatch, 1.5e-5)
    (verdict,) = Manifest.read(run(store) / "manifest.json").verification
    assert "beside fp64, from which its own fp32 is 1.5e-05 off" in verdict.verdict


def test_a_source_whose_fp32_means_little_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_rough(monkeypatch, 1e-4)
    with pytest.raises(VerificationError, match=r"limit 1e-05"):
        run(store)


def test_fp64_is_not_computed_where_it_could_change_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_rough(monkeypatch, 1e-3)
    monkeypatch.setattr(Rough, "run_in_fp64", lambda *_: pytest.fail("that takes minutes for a large model"))
    with pytest.raises(VerificationError, match=r"limit 1e-05"):
        run(store)


def test_an_export_that_is_wrong_is_not_excused_by_its_source(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_rough(monkeypatch, 1.5e-5)
    wrong = WEIGHTS | {"head": WEIGHTS["head"] * np.float32(1 + 5e-5)}
    monkeypatch.setattr(Rough, "export", lambda *_: TextSource(TEXT, (IMAGE,), wrong).graph())
    with pytest.raises(VerificationError, match="beside fp64"):
        run(store)
