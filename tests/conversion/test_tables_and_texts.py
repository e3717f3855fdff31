"""Pipelines of scikit-learn beside `predict` and `predict_proba`: proven and right, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import skops.io
from converting import Convert
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    AdaBoostRegressor,
    BaggingRegressor,
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingRegressor,
    VotingClassifier,
)
from sklearn.feature_extraction.text import CountVectorizer, HashingVectorizer, TfidfVectorizer
from sklearn.feature_selection import SelectKBest
from sklearn.impute import SimpleImputer
from sklearn.linear_model import ElasticNet, LinearRegression, LogisticRegression, Ridge
from sklearn.multioutput import MultiOutputRegressor
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    KBinsDiscretizer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    PowerTransformer,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
)
from sklearn.svm import SVC, SVR
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.repository.version import read_version

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.train]
ROWS, HELD = 800, 400
NAMES = ["income", "age", "stamp", "share", "count"]


def numbers(seed: int, missing: bool = False) -> pd.DataFrame:
    """Columns around 1e7, in tenths, of time stamps, around 1e-6, and of whole numbers."""
    draw = np.random.default_rng(seed)
    count = ROWS if seed == 0 else HELD
    columns = [
        draw.normal(1e7, 1e6, count),
        draw.integers(0, 900, count) / 10,
        draw.uniform(1.6e9, 1.7e9, count),
        draw.normal(3e-6, 1e-6, count),
        draw.integers(0, 40, count).astype(np.float64),
    ]
    table = pd.DataFrame(np.stack(columns, axis=1), columns=NAMES)
    return table.mask(draw.random(table.shape) < 0.1) if missing else table


def target(table: pd.DataFrame) -> np.ndarray[Any, Any]:
    whole = table.fillna(0.0).to_numpy()
    return (whole[:, 0] / 1e6 + np.sin(whole[:, 1]) * 3 + (whole[:, 2] > 1.65e9) * 4 + whole[:, 3] * 1e6).round(3)


def mixed(seed: int) -> pd.DataFrame:
    table = numbers(seed)
    draw = np.random.default_rng(seed + 10)
    table["color"] = draw.choice(["red", "blue", "green", "ñandú"], len(table))
    table["size"] = draw.choice(["S", "M", "L"], len(table))
    return table


def encoded(encoder: Any) -> ColumnTransformer:
    return ColumnTransformer([("words", encoder, ["color", "size"]), ("numbers", StandardScaler(), NAMES)])


def forest(kind: Any = RandomForestRegressor, **settings: Any) -> Any:
    return kind(n_estimators=8, random_state=0, **settings)


# Name -> estimator, whether its target is a class, and its table. A few run with every test.
TABLES: dict[str, tuple[Any, bool, str]] = {
    "scaled forest": (make_pipeline(StandardScaler(), forest()), False, "numbers"),
    "forest": (forest(), False, "numbers"),
    "forest of classes": (make_pipeline(MinMaxScaler(), forest(RandomForestClassifier)), True, "numbers"),
    "histograms": (make_pipeline(StandardScaler(), HistGradientBoostingRegressor(max_iter=8)), False, "numbers"),
    "missing in a forest": (forest(), False, "missing"),
    "encoded words": (make_pipeline(encoded(OneHotEncoder()), forest()), False, "mixed"),
    "raw linear": (LinearRegression(), False, "numbers"),
    "neighbors": (make_pipeline(StandardScaler(), KNeighborsRegressor(3)), False, "numbers"),
    "ridge": (make_pipeline(StandardScaler(), Ridge()), False, "numbers"),
    "elastic net": (make_pipeline(RobustScaler(), ElasticNet()), False, "numbers"),
    "robust scaler": (make_pipeline(RobustScaler(), forest()), False, "numbers"),
    "largest scaler": (make_pipeline(MaxAbsScaler(), DecisionTreeRegressor()), False, "numbers"),
    "one tree": (make_pipeline(StandardScaler(), DecisionTreeRegressor()), False, "numbers"),
    "one tree of classes": (DecisionTreeClassifier(), True, "numbers"),
    "deep boosting": (make_pipeline(StandardScaler(), GradientBoostingRegressor(max_depth=6)), False, "numbers"),
    "boosted classes": (make_pipeline(StandardScaler(), GradientBoostingClassifier(n_estimators=8)), True, "numbers"),
    "histograms of classes": (HistGradientBoostingClassifier(max_iter=8), True, "numbers"),
    "histograms, missing": (HistGradientBoostingRegressor(max_iter=8), False, "missing"),
    "extra trees": (make_pipeline(StandardScaler(), forest(ExtraTreesClassifier)), True, "numbers"),
    "adaptive": (make_pipeline(StandardScaler(), AdaBoostRegressor(n_estimators=8)), False, "numbers"),
    "bagging": (make_pipeline(StandardScaler(), BaggingRegressor(n_estimators=4)), False, "numbers"),
    "isolation": (make_pipeline(StandardScaler(), IsolationForest(n_estimators=8)), False, "numbers"),
    "imputed forest": (make_pipeline(SimpleImputer(), StandardScaler(), forest()), False, "missing"),
    "imputed median": (make_pipeline(SimpleImputer(strategy="median"), forest()), False, "missing"),
    "polynomials": (make_pipeline(StandardScaler(), PolynomialFeatures(2), Ridge()), False, "numbers"),
    "raw polynomials": (make_pipeline(PolynomialFeatures(2), StandardScaler(), Ridge()), False, "numbers"),
    "powers": (make_pipeline(StandardScaler(), PowerTransformer(), forest()), False, "numbers"),
    "principal components": (make_pipeline(StandardScaler(), PCA(3), forest()), False, "numbers"),
    "components, logistic": (make_pipeline(StandardScaler(), PCA(3), LogisticRegression()), True, "numbers"),
    "support vectors": (make_pipeline(StandardScaler(), SVR()), False, "numbers"),
    "support vectors of classes": (make_pipeline(StandardScaler(), SVC()), True, "numbers"),
    "neighbors of classes": (make_pipeline(StandardScaler(), KNeighborsClassifier(3)), True, "numbers"),
    "naive Bayes": (make_pipeline(StandardScaler(), GaussianNB()), True, "numbers"),
    "raw naive Bayes": (GaussianNB(), True, "numbers"),
    "network": (make_pipeline(StandardScaler(), MLPRegressor(hidden_layer_sizes=(8,), max_iter=50)), False, "numbers"),
    "network of classes": (
        make_pipeline(MinMaxScaler(), MLPClassifier(hidden_layer_sizes=(8,), max_iter=50)),
        True,
        "numbers",
    ),
    "ordinal words": (make_pipeline(encoded(OrdinalEncoder()), forest()), False, "mixed"),
    "encoded histograms": (
        make_pipeline(encoded(OneHotEncoder(sparse_output=False)), HistGradientBoostingRegressor(max_iter=8)),
        *(False, "mixed"),
    ),
    "encoded logistic": (make_pipeline(encoded(OneHotEncoder()), LogisticRegression()), True, "mixed"),
    "selected": (make_pipeline(SelectKBest(k=3), StandardScaler(), forest()), False, "numbers"),
    "bins": (make_pipeline(KBinsDiscretizer(5), Ridge()), False, "numbers"),
    "quantiles": (make_pipeline(QuantileTransformer(n_quantiles=50), forest()), False, "numbers"),
    "several outputs": (make_pipeline(StandardScaler(), forest()), False, "two targets"),
    "several boosted": (MultiOutputRegressor(GradientBoostingRegressor(n_estimators=8)), False, "two targets"),
    "stacked": (
        StackingRegressor([("tree", DecisionTreeRegressor(max_depth=4)), ("line", Ridge())], Ridge()),
        *(False, "numbers"),
    ),
    "voting": (
        VotingClassifier([("tree", DecisionTreeClassifier()), ("bayes", GaussianNB())], voting="soft"),
        *(True, "numbers"),
    ),
    "logarithm of the target": (
        TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1),
        False,
        "numbers",
    ),
}
FAST_TABLES = [*TABLES][:8]
# Common ones, which a refusal would keep from being served.
SERVED_TABLES = {
    "scaled forest",
    "forest",
    "forest of classes",
    "histograms",
    "missing in a forest",
    "encoded words",
    "ridge",
}


def cases(fast: list[str], every: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in every]


@pytest.mark.parametrize("name", cases(FAST_TABLES, TABLES))
def test_a_table_is_answered_as_by_its_estimator_or_refused(run: Convert, tmp_path: Path, name: str) -> None:
    estimator, classes, kind = TABLES[name]
    make = {"missing": lambda seed: numbers(seed, missing=True), "mixed": mixed}.get(kind, numbers)
    table, held = make(0), make(1)
    wanted = target(table[NAMES])
    wanted = np.stack([wanted, wanted**2], axis=1) if kind == "two targets" else wanted
    estimator.fit(table, np.digitize(wanted, [11, 14, 17]) if classes else wanted)
    skops.io.dump(estimator, tmp_path / "m.skops")
    try:
        folder = run(str(tmp_path / "m.skops"), name.replace(" ", "-").replace(",", ""), allow_code=True)
    except (ConversionError, VerificationError):
        assert name not in SERVED_TABLES
        return
    for rows in (held, table):
        answers_as(folder, estimator, rows)


def answers_as(folder: Path, estimator: Any, rows: Any) -> None:
    """Compare the answers to rows, in batches of all and of one, with those of the estimator."""
    with OnnxRuntimeEngine().build_reference(folder / "model.onnx") as session:
        specs = session.signature.inputs
        given = rows.to_numpy() if isinstance(rows, pd.DataFrame) else np.array(rows, np.object_)[:, None]
        columns = [given] if len(specs) == 1 else [given[:, [i]] for i in range(len(specs))]
        feeds = {spec.name: column.astype(spec.dtype.numpy) for spec, column in zip(specs, columns, strict=True)}
        found = session.run(feeds)
    expected = [estimator.predict(rows)]
    expected += [estimator.predict_proba(rows)] if hasattr(estimator, "predict_proba") and len(found) > 1 else []
    for array, right in zip(found.values(), expected, strict=False):
        if right.dtype.kind == "f":
            apart = np.linalg.norm(array.reshape(right.shape) - right) / np.linalg.norm(right)
            assert apart < 1e-5, apart
        else:
            assert array.ravel().tolist() == right.tolist()


DOCUMENTS = [
    *("the plan is a good one", "this is a bad plan", "i am not happy", "i am happy", "vitamin c is good"),
    *("plan b is bad", "a good day", "a bad day", "good c code", "bad c code", "Größe und naïve café"),
    *("don't go, it's bad-bad", "good good good bad"),
] * 3
HELD_DOCUMENTS = [
    *(
        "this is a bad plan",
        "plan b is bad",
        "good a day a bad",
        "good good good good good plan bad",
        "good plan",
        "",
        " ",
    ),
    *("GOOD Plan", "naive cafe", "NAÏVE CAFÉ größe", "don't", "it's a c", "bad-bad good_day", "good\nbad\tplan"),
    *("日本 good", "x y z", "the not happy", "12 good 12", "good, bad. plan; i am"),
]


def patterned(pattern: str, **settings: Any) -> TfidfVectorizer:
    return TfidfVectorizer(**{"token_pattern": pattern, **settings})


VECTORIZERS: dict[str, Any] = {
    "words": TfidfVectorizer(),
    "pairs": TfidfVectorizer(ngram_range=(1, 2)),
    "logarithms": TfidfVectorizer(sublinear_tf=True),
    "characters": TfidfVectorizer(analyzer="char", ngram_range=(1, 3)),
    "capitals": TfidfVectorizer(lowercase=False, ngram_range=(1, 2)),
    "pairs alone": TfidfVectorizer(ngram_range=(2, 2)),
    "triples": TfidfVectorizer(ngram_range=(1, 3)),
    "once": TfidfVectorizer(binary=True),
    "counts": CountVectorizer(),
    "counts, once": CountVectorizer(binary=True),
    "counts of pairs, once": CountVectorizer(ngram_range=(1, 2), binary=True),
    "frequent": TfidfVectorizer(min_df=4),
    "five": TfidfVectorizer(max_features=5),
    "rare": TfidfVectorizer(max_df=0.3),
    "stop words": TfidfVectorizer(stop_words="english"),
    "own stop words": TfidfVectorizer(stop_words=["good", "is"]),
    "stop words in pairs": TfidfVectorizer(stop_words=["good", "is"], ngram_range=(1, 2)),
    "short words": patterned(r"(?u)\b\w+\b"),
    "short words, pairs": patterned(r"\w+", ngram_range=(1, 2)),
    "spaces": patterned(r"[^\s]+"),
    "three letters": patterned(r"(?u)\b\w\w\w+\b"),
    "Latin letters": patterned(r"[a-z]+"),
    "whole Latin words": patterned(r"(?u)\b[a-zA-Z]{3,}\b"),
    "a group": patterned(r"(\w+)-"),
    "all letters": TfidfVectorizer(lowercase=False),
    "without accents": TfidfVectorizer(strip_accents="unicode"),
    "ASCII": TfidfVectorizer(strip_accents="ascii"),
    "single characters": TfidfVectorizer(analyzer="char"),
    "characters of words": TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 3)),
    "pairs of characters": TfidfVectorizer(analyzer="char", ngram_range=(2, 2), lowercase=False),
    "no norm": TfidfVectorizer(norm=None),
    "shares": TfidfVectorizer(norm="l1", use_idf=False),
    "unsmoothed": TfidfVectorizer(smooth_idf=False),
    "hashes": HashingVectorizer(n_features=64),
    "given": TfidfVectorizer(vocabulary=["good", "bad", "plan b"], ngram_range=(1, 2)),
}
FAST_TEXTS = [*VECTORIZERS][:5]
SERVED = {"words", "pairs", "capitals", "triples", "once", "counts", "stop words", "short words"}


@pytest.mark.parametrize("name", cases(FAST_TEXTS, VECTORIZERS))
def test_a_text_is_answered_as_by_its_estimator_or_refused(run: Convert, tmp_path: Path, name: str) -> None:
    estimator = make_pipeline(VECTORIZERS[name], LogisticRegression(C=100))
    estimator.fit(DOCUMENTS, ["yes" if i % 3 else "no" for i in range(len(DOCUMENTS))])
    skops.io.dump(estimator, tmp_path / "m.skops")
    try:
        folder = run(str(tmp_path / "m.skops"), allow_code=True)
    except (ConversionError, VerificationError):
        assert name not in SERVED
        return
    answers_as(folder, estimator, HELD_DOCUMENTS)
    manifest = Manifest.read(folder / "manifest.json")
    assert (folder / str(manifest.labels_file)).read_text().split() == ["no", "yes"]


def test_tables_of_another_precision_are_answered_otherwise_and_need_samples(run: Convert, tmp_path: Path) -> None:
    """scikit-learn's own scaler rounds a table of float32, and its forest then takes other branches."""
    table = numbers(0).to_numpy()
    estimator = make_pipeline(StandardScaler(), forest()).fit(table, target(numbers(0)))
    skops.io.dump(estimator, tmp_path / "m.skops")
    with pytest.raises(ConversionError, match=r"float32.*float64 differently.*--samples.*FP64 inputs"):
        run(str(tmp_path / "m.skops"))
    np.savez(tmp_path / "float64.npz", INPUT_0=table)
    folder = run(str(tmp_path / "m.skops"), samples=tmp_path / "float64.npz")
    answers_as(folder, estimator, pd.DataFrame(table))
    assert [spec.dtype for spec in Manifest.read(folder / "manifest.json").signature.inputs] == ["FP64"]
    np.savez(tmp_path / "float32.npz", INPUT_0=table.astype(np.float32))
    with pytest.raises(VerificationError, match=r"tables of float64"):
        run(str(tmp_path / "m.skops"), samples=tmp_path / "float32.npz")


def test_classes_of_equal_votes_are_those_of_scikit_learn_at_any_batch_size(run: Convert, tmp_path: Path) -> None:
    """ONNX Runtime adds votes of 1/20 in another order in large batches."""
    generator = np.random.default_rng(0)
    table, others = (np.round(generator.normal(size=(rows, 5)), 1) for rows in (400, 3000))
    estimator = RandomForestClassifier(20, random_state=0).fit(table, generator.integers(0, 3, 400))
    skops.io.dump(estimator, tmp_path / "m.skops")
    np.savez(tmp_path / "s.npz", INPUT_0=table.astype(np.float32))
    folder = run(str(tmp_path / "m.skops"), samples=tmp_path / "s.npz")
    others = others.astype(np.float32)
    best = np.sort(estimator.predict_proba(others), axis=1)
    assert np.isclose(best[:, -1], best[:, -2], atol=1e-9).sum() > 100, "nothing is tested"
    with OnnxRuntimeEngine().build_reference(folder / "model.onnx") as session:
        labels = session.run({"X": others})["output_label"]
    np.testing.assert_array_equal(labels, estimator.predict(others))


def test_golden_samples_of_a_forest_differ(run: Convert, tmp_path: Path) -> None:
    table = numbers(0)
    skops.io.dump(DecisionTreeRegressor(max_depth=2).fit(table, target(table)), tmp_path / "m.skops")
    golden = read_version(run(str(tmp_path / "m.skops"))).golden
    assert isinstance(golden, GoldenSamples)
    assert len(np.unique(golden.graph_outputs["variable"])) == 4
