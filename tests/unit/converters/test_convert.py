"""Conversions of a source in text: what is proven is written, everything else is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph
from PIL import Image
from sources import TextSource

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, ManifestError, RepositoryError, VerificationError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Classification, Detection, Embedding, Ranking, Segmentation, Task
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.image_config import image_config
from graphkiln_backend.storage.address import RemoteAddress
from graphkiln_converters.convert import (
    check_given_files,
    check_given_labels,
    convert,
    export_source,
    keeps_names,
    local_source,
    open_model,
    read_given_labels,
    remote_part,
    rewrite,
    warn_without_preprocess,
    with_dynamic_axes,
    with_fitting_labels,
    with_task,
)
from graphkiln_converters.prove import Proof, prove_graph
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
    made = TextSource.of(TEXT, (IMAGE,), WEIGHTS, preprocess=SPEC, labels=tuple("abcde"))
    monkeypatch.setattr("graphkiln_converters.convert.open_source", lambda *_: made)
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
    @pytest.mark.usefixtures("source")
    def test_the_manifest_records_the_conversion(self, store: Path) -> None:
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
    def test_new_names_are_told_beside_the_old_ones(self, store: Path, logged: list[str]) -> None:
        """Two inputs of one type are swapped without an error."""
        run(store)
        told = [line.partition(" (--keep-names")[0] for line in logged if " -> " in line]
        assert told == ["inputs: image -> INPUT_0", "outputs: scores -> OUTPUT_0"]
        logged.clear()
        run(store, name="kept", keep_names=True)
        assert not any(" -> " in line for line in logged)

    @pytest.mark.parametrize(
        ("known", "names", "kept"),
        [
            (True, ["image"], True),
            (False, ["image"], False),
            (False, ["ids", "mask"], True),
            (False, ["input_0", "input_1"], False),
        ],
        ids=["a known name", "one input", "two inputs", "inputs without names"],
    )
    def test_names_are_kept_where_they_tell_inputs_apart(self, known: bool, names: list[str], kept: bool) -> None:
        source = TextSource.of("", tuple(InputSpec(name=name, shape=(3,)) for name in names), named=known)
        asked = Recipe(source="text", name="m")
        assert keeps_names(source, asked) is kept
        for answer in (True, False):
            assert keeps_names(source, asked.model_copy(update={"keep_names": answer})) is answer

    @pytest.mark.usefixtures("source")
    def test_the_manifest_remembers_whether_names_were_kept(self, store: Path) -> None:
        """A conversion that is repeated by a later release has the tensors that it had."""
        conversion = Manifest.read(run(store) / "manifest.json").conversion
        assert conversion is not None
        assert conversion.recipe["keep_names"] is False

    @pytest.mark.usefixtures("source")
    def test_versions_of_other_names_name_the_way_out(self, store: Path) -> None:
        run(store)
        with pytest.raises(ConversionError, match="'INPUT_0' is not in the graph") as caught:
            run(store, keep_names=True)
        assert "--no-keep-names" in caught.value.hint
        (store / "m" / "config.pbtxt").unlink()
        with pytest.raises(ConversionError, match="another signature") as caught:
            run(store, keep_names=True)
        assert "--no-keep-names" in caught.value.hint

    @pytest.mark.usefixtures("source")
    def test_the_manifest_has_the_remaining_preprocessing_labels_and_ranking(self, store: Path) -> None:
        plain = Manifest.read(run(store) / "manifest.json")
        assert (plain.preprocess, plain.labels_file, plain.ranking) == (SPEC, "labels.txt", None)
        ranked = Manifest.read(run(store, name="ranked", top_k=2, input="uint8-nhwc") / "manifest.json")
        assert ranked.preprocess == Preprocess.from_json(
            '{"resize": 8, "crop": [8, 8], "layout": "HWC", "dtype": "UINT8"}'
        )
        assert ranked.ranking == Ranking(scores="OUTPUT_0", indices="INDEX_0", labels=tuple("abcde"))
        assert ranked.labels is None

    @pytest.mark.usefixtures("source")
    def test_encoded_images_add_a_parameter_to_the_configuration(self, store: Path) -> None:
        preprocess = Manifest.read(run(store, input="encoded") / "manifest.json").preprocess
        assert preprocess is not None
        assert preprocess.dtype is DType.UINT8
        config = read_config(store / "m" / "config.pbtxt")
        assert config.parameters["accept_images"].string_value == "true"
        assert image_config(config, instances=1).name == "m.images"

    @pytest.mark.usefixtures("source")
    def test_encoded_images_with_an_older_configuration_are_refused(self, store: Path) -> None:
        run(store, input="uint8-nhwc")
        with pytest.raises(ConversionError, match="does not accept encoded images") as caught:
            run(store, input="encoded")
        line = caught.value.hint.removeprefix("add: ")
        assert not (store / "m" / "2").exists()
        with (store / "m" / "config.pbtxt").open("a") as config:
            config.write(line)
        assert run(store, input="encoded").name == "2"

    @pytest.mark.usefixtures("source")
    def test_raw_pixels_of_dynamic_sizes(self, store: Path) -> None:
        """Samples that were made for the source become pixels at the smallest and largest size."""
        source = TextSource.of(TEXT.replace("8,8]", "h,w]"), (IMAGE,), WEIGHTS, preprocess=SPEC)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("graphkiln_converters.convert.open_source", lambda *_: source)
            version = run(store, input="uint8-nhwc", dynamic=["image:2=4..16", "image:3=6..12"])
        pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 9, 3), np.uint8)
        image = np.stack([SPEC.normalize(one) for one in pixels])
        expected = compute(source.graph(), image=image)["scores"]
        np.testing.assert_allclose(serve(version, INPUT_0=pixels)["OUTPUT_0"], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("source")
def test_equal_graphs_of_a_source_are_proven_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[Path] = []

    def counted(graph: Path, *arguments: Any, **options: Any) -> Proof:
        proven.append(graph)
        return prove_graph(graph, *arguments, **options)

    monkeypatch.setattr("graphkiln_converters.convert.prove_graph", counted)
    recipe = Recipe(source="text", name="a", model_store=store)
    with export_source(recipe) as exported:

        def errors(name: str, **fields: Any) -> dict[str, float]:
            version = convert(recipe.model_copy(update={"name": name, **fields}), exported=exported)
            conversion = Manifest.read(version / "manifest.json").conversion
            assert conversion is not None
            return conversion.output_errors

        first = errors("a")
        assert errors("b", skip=("pad-into-conv",)) == first  # the graph has no padding
        assert len(proven) == 1
        errors("c", skip=("fold-batch-norm",))
        errors("d", relative_l2=1e-3)
        assert len(proven) == 3


class TestLabeledSamples:
    @pytest.fixture
    def labeled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Images, and in which third each of their pixels is brightest: what the source says, too."""
        text = "(float[batch,3,8,8] image) => (float[batch,3,8,8] map) { map = Identity(image) }"
        plain = Preprocess(resize=8, crop=(8, 8))
        made = TextSource.of(text, (IMAGE,), {}, preprocess=plain, labels=())
        monkeypatch.setattr("graphkiln_converters.convert.open_source", lambda *_: made)
        for folder in ("photos", "photos.masks"):
            (tmp_path / folder).mkdir()
        for number in range(4):
            pixels = np.random.default_rng(number).permutation(192).reshape(8, 8, 3).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
            Image.fromarray(pixels.argmax(axis=2).astype(np.uint8)).save(tmp_path / "photos.masks" / f"{number}.png")
        return tmp_path / "photos"

    def test_the_proof_measures_labeled_samples(self, labeled: Path, store: Path) -> None:
        manifest = Manifest.read(run(store, task="segmentation", samples=labeled) / "manifest.json")
        assert "mIoU 100.00% instead of 100.00%" in manifest.verification[0].verdict


class TestRefused:
    def test_changed_outputs_are_refused(
        self, source: TextSource, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = TextSource.of(TEXT, (IMAGE,), {**WEIGHTS, "mean": WEIGHTS["mean"] + np.float32(1e-3)})
        monkeypatch.setattr(TextSource, "export", lambda _: other.graph())
        with pytest.raises(VerificationError, match="the outputs changed"):
            run(store)
        assert not store.exists()
        assert source.closed == [True]

    def test_an_existing_version_is_refused_before_the_source_is_opened(self, source: TextSource, store: Path) -> None:
        (store / "m" / "4").mkdir(parents=True)
        with pytest.raises(ConversionError, match="4 already exists"):
            run(store, version=4)
        assert (source.closed, source.rows) == ([], [])

    def test_an_unusable_store_is_refused_before_the_source_is_opened(self, source: TextSource, tmp_path: Path) -> None:
        """An export and a proof take minutes."""
        (tmp_path / "file").touch()
        with pytest.raises(ConversionError, match="is not a folder"):
            run(tmp_path / "file")
        assert (source.closed, source.rows) == ([], [])

    def test_a_failed_export_writes_nothing(
        self, source: TextSource, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: object) -> None:
            raise ConversionError("it branches on values")

        monkeypatch.setattr(TextSource, "export", fail)
        with pytest.raises(ConversionError, match="branches on values"):
            run(store)
        assert source.closed == [True]
        assert not store.exists()

    @pytest.mark.usefixtures("source")
    def test_int8_without_calibration_samples_is_refused(self, store: Path) -> None:
        with pytest.raises(ConversionError, match="needs samples to calibrate on"):
            run(store, precision="int8")
        assert not store.exists()


@pytest.mark.parametrize(("saved", "proven"), [(1, (3, 5)), (3, (1, 5))])
def test_proofs_use_other_batch_sizes_than_the_saved_one(
    store: Path, monkeypatch: pytest.MonkeyPatch, saved: int, proven: tuple[int, ...]
) -> None:
    made = TextSource.of(TEXT, (IMAGE,), WEIGHTS, batch_size=saved)
    monkeypatch.setattr("graphkiln_converters.convert.open_source", lambda *_: made)
    verification = Manifest.read(run(store, precision="fp16") / "manifest.json").verification
    assert [verdict.batch_sizes for verdict in verification] == [proven, proven]


class Rough(TextSource):
    """A source whose fp32 outputs have a relative error."""

    error: ClassVar[float] = 1.5e-5

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        return {name: (array * (1 + self.error)).astype("f4") for name, array in super().run(feeds).items()}

    def run_in_fp64(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        return {name: array.astype("f8") for name, array in super().run(feeds).items()}


def opened_rough(monkeypatch: pytest.MonkeyPatch, error: float, text: str = TEXT) -> None:
    made = Rough.of(text, (IMAGE,), WEIGHTS)
    monkeypatch.setattr(Rough, "error", error)
    monkeypatch.setattr("graphkiln_converters.convert.open_source", lambda *_: made)


def test_an_export_is_compared_with_fp64_if_the_fp32_source_is_slightly_off(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_rough(monkeypatch, 1.5e-5)
    (verdict,) = Manifest.read(run(store) / "manifest.json").verification
    assert "beside fp64, from which its own fp32 is 1.5e-05 off" in verdict.verdict
    opened_rough(monkeypatch, 1e-4)
    with pytest.raises(VerificationError, match=r"limit 1e-05"):
        run(store)


def test_fp64_is_not_computed_if_it_cannot_change_the_verdict(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_rough(monkeypatch, 1e-3)
    monkeypatch.setattr(Rough, "run_in_fp64", lambda *_: pytest.fail("that takes minutes for a large model"))
    with pytest.raises(VerificationError, match=r"limit 1e-05"):
        run(store)


def test_a_wrong_export_is_refused_beside_fp64(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_rough(monkeypatch, 1.5e-5)
    wrong = WEIGHTS | {"head": WEIGHTS["head"] * np.float32(1 + 5e-5)}
    monkeypatch.setattr(Rough, "export", lambda *_: TextSource.of(TEXT, (IMAGE,), wrong).graph())
    with pytest.raises(VerificationError, match="beside fp64"):
        run(store)


# Opening a source.

IDS = InputSpec(name="ids", shape=(16,), dynamic={0: (1, 64)})
SPEC_OF_OPENING = Preprocess(mean=(0.1, 0.2, 0.3))


@pytest.fixture
def source_of_opening(monkeypatch: pytest.MonkeyPatch) -> TextSource:
    made = TextSource.of(
        "(float[b,3,8,8] image) => (float[b,3,8,8] y) { y = Relu(image) }",
        (IMAGE,),
        preprocess=SPEC_OF_OPENING,
        labels=("a", "b"),
    )
    monkeypatch.setattr("graphkiln_converters.convert.open_source", lambda *_: made)
    return made


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "text", "name": "m", **fields})


class TestOpening:
    @pytest.mark.usefixtures("source")
    def test_options_of_the_recipe_replace_those_of_the_source(self, tmp_path: Path) -> None:
        (tmp_path / "labels.txt").write_text("x\ny\nz\n")
        fields = {"preprocess": {"resize": 9}, "labels": tmp_path / "labels.txt", "dynamic": ["image:2=8..16"]}
        with open_model(recipe(**fields)) as model:
            assert model.preprocess == Preprocess(resize=9)
            assert model.labels == ("x", "y", "z")
            assert model.inputs[0].dynamic == {1: (8, 16)}

    @pytest.mark.parametrize(
        ("fields", "error", "words"),
        [
            ({"labels": "missing.txt"}, ConversionError, r"cannot read labels from missing\.txt"),
            ({"preprocess": {"resized": 8}}, ManifestError, r"preprocess.*resized"),
            ({"preprocess": {"mean": [0.5]}}, ManifestError, "must have 3 values"),
            ({"preprocess": {"mean": [128, 128, 128]}}, ManifestError, "expected pixels in units of 0..1"),
            (
                {"preprocess": {"resize": 9}},
                ManifestError,
                r"\[3, any, any\] with a shorter side of 9, but input 'image' takes \[3, 8, 8\]",
            ),
            ({"dynamic": ["text:1=1..2"]}, ConversionError, "there is no input 'text'"),
        ],
    )
    def test_a_mistake_closes_the_source(
        self, source_of_opening: TextSource, fields: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            open_model(recipe(**fields))
        assert source_of_opening.closed == [True]


class TestDynamicAxes:
    @pytest.mark.parametrize(("axis", "ends"), [(0, (1, 2)), (4, (1, 2)), (2, (0, 2)), (2, (3, 2))])
    def test_invalid_axes_are_refused(self, axis: int, ends: tuple[int, int]) -> None:
        with pytest.raises(ConversionError, match=r"does not fit image \[batch, 3, 8, 8\]") as caught:
            with_dynamic_axes((IDS, IMAGE), {"image": {axis: ends}})
        assert "axis 0 is the batch" in caught.value.hint


# Labels and preprocessing.

PIXELS = Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)


class TestFittingLabels:
    LABELS = ("a", "b", "c")

    def fitted(self, text: str, labels: Path | None = None, **options: Any) -> tuple[str, ...]:
        model = TextSource.of(text, (), labels=self.LABELS)
        return with_fitting_labels(model, recipe(labels=labels, **options), graph(text)).labels

    @pytest.mark.parametrize("shape", ["batch,3", "batch,n", "batch,5,8,8"])
    def test_labels_that_match_the_classes_are_kept(self, shape: str) -> None:
        assert self.fitted(f"(float[{shape}] x) => (float[{shape}] y) {{ y = Relu(x) }}") == self.LABELS

    def test_labels_of_a_source_that_do_not_match_are_left_out_with_a_warning(self, logged: list[str]) -> None:
        assert self.fitted("(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }") == ()
        assert "3 labels for the 4 classes" in logged[0]

    def test_labels_of_the_user_must_match(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=r"l\.txt has 3 labels for the 4 classes"):
            self.fitted("(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }", tmp_path / "l.txt")

    @pytest.mark.parametrize(
        ("text", "classes", "task"),
        [
            ("(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }", 4, None),
            ("(float[batch,5,8,8] x) => (float[batch,5,8,8] y) { y = Relu(x) }", 5, Segmentation(scores="y")),
        ],
    )
    def test_labels_of_the_user_are_counted_before_the_export(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, classes: int, task: Task | None
    ) -> None:
        """An export takes minutes, and a proof as well."""
        labels = tmp_path / "l.txt"
        labels.write_text("a\nb\nc\n")
        shape = tuple(graph(text).graph.inputs[0].shape)[1:]
        source = TextSource.of(text, (InputSpec(name="x", shape=shape),), task=task)
        monkeypatch.setattr("graphkiln_converters.convert.open_source", lambda _: source)
        monkeypatch.setattr(TextSource, "export", lambda _: pytest.fail("exported"))
        with pytest.raises(ConversionError, match=rf"l\.txt has 3 labels for the {classes} classes"):
            convert(recipe(labels=labels, model_store=tmp_path / "store"))

    def test_a_label_that_cannot_be_written_is_refused_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "l.txt").write_text("a\nb\x07\n")
        with pytest.raises(ConversionError, match="the label of class 1 holds a control character"):
            read_given_labels(tmp_path / "l.txt")

    def test_sizes_that_follow_the_input_are_no_classes(self, tmp_path: Path) -> None:
        text = "(float[batch,n] x) => (float[batch,n] y) { y = Relu(x) }"
        source = TextSource.of(text, (InputSpec(name="x", shape=(8,), dynamic={0: (1, 16)}),), labels=self.LABELS)
        check_given_labels(source, recipe(labels=tmp_path / "l.txt"))

    def test_labels_of_a_detector_are_kept(self) -> None:
        task = Detection(boxes="b", scores="y", classes="c", counts="n")
        model = TextSource.of("", (), labels=self.LABELS, task=task)
        scores = graph("(float[batch,300] x) => (float[batch,300] y) { y = Relu(x) }")
        assert with_fitting_labels(model, recipe(), scores).labels == self.LABELS

    def test_labels_must_match_the_kept_output(self) -> None:
        text = (
            "(float[batch,4] x, float[batch,3] z) => (float[batch,4] y, float[batch,3] w) { y = Relu(x) w = Relu(z) }"
        )
        assert self.fitted(text, outputs=["w"]) == self.LABELS
        assert self.fitted(text, outputs=["y"]) == ()


@pytest.mark.parametrize(
    ("task", "preprocess", "warned"),
    [
        (Embedding(vectors="v"), None, True),
        (Embedding(vectors="v"), PIXELS, False),
        (Classification(), None, False),
        (None, None, False),
    ],
)
def test_an_image_task_without_preprocessing_is_warned_about(
    caplog: pytest.LogCaptureFixture, task: Task | None, preprocess: Preprocess | None, warned: bool
) -> None:
    warn_without_preprocess(TextSource.of("", (), preprocess=preprocess, task=task))
    assert ("--preprocess" in caplog.text) == warned


# The task.

VECTORS = "(float[batch, 4] x) => (float[batch, 4] y) { y = Relu(x) }"
MAPS = "(float[batch, 3, 8, 8] x) => (float[batch, 3, 8, 8] y) { y = Relu(x) }"
DETECTIONS = (
    "(float[batch, 5, 4] x) => (float[batch, 5, 4] boxes, float[batch, 5] scores, int64[batch, 5] classes, "
    "int32[batch] counts) { boxes = Relu(x) axes = Constant<value_ints=[2]>() scores = ReduceMax<keepdims=0>(x, axes) "
    "classes = ArgMax<axis=2, keepdims=0>(x) one = Constant<value_ints=[1]>() "
    "many = ReduceSum<keepdims=0>(classes, one) "
    "counts = Cast<to=6>(many) }"
)


DETECTION = Detection(boxes="boxes", scores="scores", classes="classes", counts="counts")


def task_of(text: str, own: Task | None = None, **options: Any) -> Task | None:
    return with_task(TextSource.of(text, (), task=own), recipe(**options), graph(text)).task


@pytest.mark.parametrize(
    ("text", "own", "options", "expected"),
    [
        (VECTORS, None, {}, None),
        (MAPS, Segmentation(scores="y"), {}, Segmentation(scores="y")),
        (MAPS, Segmentation(scores="other"), {}, None),
        (VECTORS, None, {"task": "classification"}, Classification()),
        (VECTORS, None, {"task": "embedding"}, Embedding(vectors="y")),
        (VECTORS, None, {"task": "embedding", "normalize": True}, Embedding(vectors="y", normalize=True)),
        (MAPS, None, {"task": "segmentation"}, Segmentation(scores="y")),
        (DETECTIONS, None, {"task": "detection"}, DETECTION),
        (DETECTIONS, None, {"task": "detection", "score_threshold": 0.125}, replace(DETECTION, score_threshold=0.125)),
    ],
)
def test_the_task_is_the_sources_or_the_requested_one(
    text: str, own: Task | None, options: dict[str, Any], expected: Task | None
) -> None:
    assert task_of(text, own, **options) == expected


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (MAPS, {"task": "embedding"}, r"--task embedding needs.*--outputs"),
        (VECTORS, {"task": "segmentation"}, r"--task segmentation needs.*--outputs"),
        (VECTORS, {"task": "detection"}, r"--task detection needs.*--outputs"),
        (VECTORS, {"task": "embedding", "score_threshold": 0.1}, "--score-threshold is for detectors"),
        (MAPS, {"task": "segmentation", "normalize": True}, "--normalize is for vectors"),
        (MAPS, {"task": "segmentation", "top_k": 2}, "is for classifiers"),
        (MAPS, {"task": "segmentation", "softmax": True}, "is for classifiers"),
        (MAPS, {"task": "segmentation", "layout": "nhwc"}, "is for classifiers"),
    ],
)
def test_options_that_do_not_match_the_task_are_refused(text: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        task_of(text, **options)


# Sources in remote stores.


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("s3://b/m.onnx", ("", "s3://b/m.onnx")),
        ("sklearn:gs://b/m.skops", ("sklearn:", "gs://b/m.skops")),
        ("torchvision:resnet18", ("", "")),
        ("python:m.py:make", ("", "")),
        ("models/m.onnx", ("", "")),
    ],
)
def test_addresses_of_remote_sources(source: str, parts: tuple[str, str]) -> None:
    assert remote_part(source) == parts


def test_a_remote_source_is_fetched_for_the_duration_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(address: RemoteAddress, folder: Path) -> Path:
        (folder / "m.skops").write_text(str(address))
        return folder / "m.skops"

    monkeypatch.setattr("graphkiln_converters.convert.fetch_file", fetch)
    with local_source("sklearn:s3://b/m.skops") as source:
        kind, _, path = source.partition(":")
        assert (kind, Path(path).read_text()) == ("sklearn", "s3://b/m.skops")
    assert not Path(path).parent.exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("https://h/m.onnx", "download the file"),
        ("s3://b/models", "is not a model file"),
        ("s4://b/m.onnx", "s4:// are not known"),
        ("s3://m.onnx", "name a model in it"),
    ],
)
def test_invalid_addresses_are_refused(source: str, words: str) -> None:
    with pytest.raises((ConversionError, RepositoryError), match=words), local_source(source):
        pass


# The passes that a recipe requests, on a graph.

SPEC_OF_REWRITING = Preprocess(std=(2.0, 3.0, 4.0))


def network() -> onnx_ir.Model:
    text = """(float[b,3,4,4] image) => (float[b,3] scores, float[b,3,4,4] map) {
        map = Identity(image)
        p = GlobalAveragePool(map)
        scores = Flatten(p)
    }"""
    return graph(text)


def test_raw_pixels_need_a_preprocess() -> None:
    with pytest.raises(ConversionError, match="--input encoded: the preprocessing of images is unknown") as caught:
        rewrite(network(), recipe(input="encoded"), None)
    assert "--preprocess" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "(float[b,3] x) => (float[b,3] y) { y = Relu(x) }",
        "(float[b,3,4,4] x, float[b,3,4,4] z) => (float[b,3,4,4] y) { y = Add(x, z) }",
    ],
)
def test_raw_pixels_need_an_image_input(text: str) -> None:
    with pytest.raises(ConversionError, match="--input uint8-nhwc: the input is not an FP32 image") as caught:
        rewrite(graph(text), recipe(input="uint8-nhwc"), SPEC_OF_REWRITING)
    assert caught.value.hint == "it is for models with one FP32 image as their input"


def test_raw_pixels_need_the_pass_that_embeds_the_preprocessing() -> None:
    with pytest.raises(ConversionError, match="needs the pass input-uint8-nhwc"):
        rewrite(graph(TEXT, **WEIGHTS), recipe(input="encoded", skip=["input-uint8-nhwc"]), SPEC_OF_REWRITING)


# Files of the recipe, which are checked first.


def recipe_of_given_files(folder: Path, **fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "m.onnx", "model_store": folder / "store", **fields})


def test_existing_files_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("one\n")
    check_given_files(
        recipe_of_given_files(tmp_path, labels=file, weights=file, reference=file, samples=tmp_path, calibration=file)
    )
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("option", ["weights", "samples"])
def test_a_missing_file_is_refused_before_the_source_is_opened(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConversionError, match=rf"{option}: there is no file .*nowhere.* \(expected an? "):
        convert(recipe_of_given_files(tmp_path, **{option: tmp_path / "nowhere"}))


def test_a_folder_instead_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is a folder, not a file"):
        check_given_files(recipe_of_given_files(tmp_path, labels=tmp_path))


class TestStores:
    def test_a_store_below_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConversionError, match="file is not a folder"):
            check_given_files(recipe_of_given_files(tmp_path, model_store=tmp_path / "file" / "store"))

    @pytest.mark.parametrize("existing", ["", "store", "store/m"])
    def test_a_store_that_is_not_writable_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: str
    ) -> None:
        """Permissions tell nothing about root and about file systems that are mounted to be read."""
        (tmp_path / existing).mkdir(parents=True, exist_ok=True)

        def refuse(path: str, *_: int) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

        monkeypatch.setattr(os, "mkdir", refuse)
        with pytest.raises(ConversionError, match="is not writable: Read-only file system") as caught:
            check_given_files(recipe_of_given_files(tmp_path))
        assert str(tmp_path / existing) in caught.value.message

    def test_a_file_with_the_name_of_the_model_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "m").touch()
        with pytest.raises(ConversionError, match="store/m is not a folder"):
            check_given_files(recipe_of_given_files(tmp_path))

    def test_a_store_that_cannot_be_accessed_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> bool:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "exists", refuse)
        with pytest.raises(ConversionError, match=r"--model-store .*store cannot be accessed"):
            check_given_files(recipe_of_given_files(tmp_path))
