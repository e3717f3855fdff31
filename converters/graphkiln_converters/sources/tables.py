"""Synthetic rows like the training data of an estimator of scikit-learn, drawn from its fitted attributes.

Scalers have the center and spread of a column, encoders its categories, neighbors and kernels whole rows, trees their
thresholds, linear models the size of each term. Rows at the input of a step in a pipeline are mapped back through the
steps before it. Columns without any such attribute are standard normal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float64]
_Reader = Callable[[Any, int, "Draw"], Iterator[Rows]]

# Center and spread of each column; `[columns]`, or `[groups, columns]` for groups of rows.
_SPREADS = (
    *(("mean_", "scale_"), ("center_", "scale_"), ("_x_mean", "_x_std"), ("theta_", "var_")),
    *(("location_", "covariance_"), ("means_", "covariances_"), ("mean_", "var_")),
)
_VARIANCES = {"var_", "covariance_", "covariances_"}
_CENTERS = ("cluster_centers_", "subcluster_centers_", "centroids_", "means_")
_FITTED_ROWS = ("_fit_X", "X_fit_", "X_train_", "support_vectors_", *_CENTERS)
_CHILDREN = (
    *("best_estimator_", "estimator_", "regressor_", "classifier_", "base_estimator_", "_preprocessor"),
    *("estimators_", "calibrated_classifiers_", "estimator", "initial_imputer_", "_base_imputer"),
)
_MOST_CHILDREN = 50


@dataclass(frozen=True, slots=True)
class Draw:
    """Source of random rows.

    Attributes:
        generator: Source of random numbers.
        count: Number of rows.
        exact: Share of the values that are exactly at a threshold, where the column has thresholds.
    """

    generator: np.random.Generator
    count: int
    exact: float

    def normal(self, width: int) -> Rows:
        """Draw standard normal rows."""
        return self.generator.standard_normal((self.count, width))

    def along(self, values: Any) -> Rows:
        """Draw one column from the range of some values, and a little beyond."""
        values = np.unique(np.asarray(values, np.float64)[np.isfinite(values)])
        if values.size < 2:
            center = values[0] if values.size else 0.0
            return center + (abs(center) / 4 or 1.0) * self.generator.standard_normal(self.count)
        first, last = values[0] - (values[1] - values[0]), values[-1] + (values[-1] - values[-2])
        grid = np.concatenate([[first], values, [last]])
        between = np.interp(self.generator.uniform(0, grid.size - 1, self.count), np.arange(grid.size), grid)
        # Bins of training data often end at one of its values.
        exact = self.generator.random(self.count) < self.exact
        found: Rows = np.where(exact, self.generator.choice(values, self.count), between)
        return found

    def near(self, rows: Any, *, centers: bool) -> Rows:
        """Draw fitted rows and points on the lines through pairs of them; near `centers`, with noise added."""
        rows = np.asarray(rows.toarray() if hasattr(rows, "toarray") else rows, np.float64)
        first, second = (rows[self.generator.integers(0, len(rows), self.count)] for _ in range(2))
        way = self.generator.uniform(-0.3, 0.5, (self.count, 1)) * (self.generator.random((self.count, 1)) < 0.75)
        spread = rows.std(axis=0) / 4 if centers else 0.0
        found: Rows = first + way * (second - first) + spread * self.normal(rows.shape[1])
        return found


def fitted_rows(estimator: Any, width: int, generator: np.random.Generator, count: int, *, exact: float = 0.25) -> Rows:
    """Draw rows of numbers, `[count, width]`, like those that an estimator was fitted to.

    Args:
        estimator: The estimator.
        width: Number of columns.
        generator: Source of random numbers.
        count: Number of rows.
        exact: See `Draw`.
    """
    draw = Draw(generator, count, exact)
    rows = _known(estimator, width, draw, _attributes)
    rows = _filled(rows, _known(estimator, width, draw, _hints))
    return _filled(rows, draw.normal(width))


def _filled(rows: Rows, others: Rows) -> Rows:
    """Fill unknown values (NaN) from others, if these have the same width."""
    return np.where(np.isnan(rows), others, rows) if others.shape == rows.shape else rows


def _unknown(width: int, draw: Draw) -> Rows:
    return np.full((draw.count, width), np.nan)


def _known(step: Any, width: int, draw: Draw, read: _Reader) -> Rows:
    """Rows at the input of a step, with NaN for columns that no attribute of it or of a later step describes.

    Args:
        step: A step, or a whole estimator.
        width: Number of columns.
        draw: Source of random rows.
        read: Draws rows from the attributes of one step.
    """
    if hasattr(step, "steps"):
        return _pipeline(step, width, draw, read)
    rows = _unknown(width, draw)
    if hasattr(step, "_transformer_to_input_indices"):  # a ColumnTransformer
        for name, child, _ in step.transformers_:
            columns = list(step._transformer_to_input_indices.get(name, ()))  # noqa: SLF001
            rows[:, columns] = _known(child, len(columns), draw, read)
        return rows
    if isinstance(step, str) or step is None:
        return rows
    for found in read(step, width, draw):
        rows = _filled(rows, found)
    for child in _children(step):
        if not np.isnan(rows).any():
            break
        if getattr(child, "n_features_in_", width) == width:
            rows = _filled(rows, _known(child, width, draw, read))
    return rows


def _children(step: Any) -> Iterator[Any]:
    for _, child in getattr(step, "transformer_list", ()):  # of a FeatureUnion
        yield child
    for name in _CHILDREN:
        held = getattr(step, name, None)
        if held is not None and not isinstance(held, str):
            yield from np.asarray(held, np.object_).ravel()[:_MOST_CHILDREN]


def _pipeline(pipeline: Any, width: int, draw: Draw, read: _Reader) -> Rows:
    """Rows at the input of a pipeline, mapped back from the inputs of its steps."""
    steps = [step for _, step in pipeline.steps]
    rows = _unknown(width, draw)
    for position, step in enumerate(steps):
        found: Rows | None = _known(step, getattr(step, "n_features_in_", width), draw, read)
        for before in reversed(steps[:position]):
            found = None if found is None else _mapped_back(before, found)
        if found is not None and found.shape == rows.shape:
            other = draw.generator.random((draw.count, 1)) < 0.5
            rows = np.where(np.isnan(rows) | (other & ~np.isnan(found)), found, rows)
    return rows


def _mapped_back(step: Any, rows: Rows) -> Rows | None:
    """Rows at the input of a step for rows at its output; None if the step cannot be inverted."""
    width = getattr(step, "n_features_in_", rows.shape[1])
    back = np.full((len(rows), width), np.nan)
    found: Rows | None
    if hasattr(step, "steps"):
        found = rows
        for _, before in reversed(step.steps):
            found = None if found is None else _mapped_back(before, found)
        return found
    if hasattr(step, "_transformer_to_input_indices"):
        for name, child, _ in step.transformers_:
            columns = list(step._transformer_to_input_indices.get(name, ()))  # noqa: SLF001
            found = _mapped_back(child, rows[:, step.output_indices_[name]]) if columns else None
            if found is not None and found.shape[1] == len(columns):
                back[:, columns] = found
        return back
    if hasattr(step, "get_support"):  # a selection of columns
        back[:, step.get_support()] = rows
    elif hasattr(step, "powers_"):  # polynomials: the terms of one column alone
        for term in np.flatnonzero(step.powers_.sum(axis=1) == 1):
            back[:, step.powers_[term].argmax()] = rows[:, term]
    else:
        return _inverse(step, rows, width)
    return back


def _inverse(step: Any, rows: Rows, width: int) -> Rows | None:
    if hasattr(step, "inverse_transform") and not hasattr(step, "statistics_"):
        try:
            return np.asarray(step.inverse_transform(rows), np.float64)
        except (ValueError, TypeError, IndexError):
            return None
    return rows if rows.shape[1] == width else None  # imputers, normalizers and other steps that keep columns


def _attributes(step: Any, width: int, draw: Draw) -> Iterator[Rows]:
    """Rows from each fitted attribute that describes the training data."""
    if hasattr(step, "lambdas_"):  # of a power transformer, whose results are standard normal
        yield np.asarray(step.inverse_transform(draw.normal(width)), np.float64)
    if hasattr(step, "components_") and hasattr(step, "explained_variance_"):
        scores = draw.normal(len(step.components_)) * np.sqrt(step.explained_variance_)
        center, rest = getattr(step, "mean_", 0.0), getattr(step, "noise_variance_", 0.0)
        yield center + scores @ step.components_ + draw.normal(step.components_.shape[1]) * np.sqrt(max(rest, 0.0))
    for name in _FITTED_ROWS:
        rows: Any = getattr(step, name, None)
        if getattr(rows, "ndim", 0) == 2 and rows.shape[0] and rows.shape[1] == width:
            yield draw.near(rows, centers=name in _CENTERS)
    yield from _spreads(step, width, draw)
    yield from _columns(step, width, draw)


def _spreads(step: Any, width: int, draw: Draw) -> Iterator[Rows]:
    if (least := getattr(step, "data_min_", None)) is not None:
        yield least + draw.generator.random((draw.count, width)) * (step.data_max_ - least)
    if (most := getattr(step, "max_abs_", None)) is not None:
        yield most * draw.generator.uniform(0, 1, (draw.count, width))
    for middle, spread in _SPREADS:
        center, scale = getattr(step, middle, None), getattr(step, spread, None)
        if scale is None or (center is None and middle != "center_"):
            continue
        scale = np.sqrt(scale) if spread in _VARIANCES else np.asarray(scale)
        center = np.zeros(width) if center is None else np.asarray(center)
        if scale.ndim == 2 and scale.shape[0] == scale.shape[1] and center.ndim == 1:
            scale = np.diag(scale)
        if center.shape == scale.shape and center.shape[-1:] == (width,) and center.ndim <= 2:
            group = draw.generator.integers(0, np.atleast_2d(center).shape[0], draw.count)
            yield np.atleast_2d(center)[group] + np.atleast_2d(scale)[group] * draw.normal(width)


def _columns(step: Any, width: int, draw: Draw) -> Iterator[Rows]:
    """Rows from lists of values of each column: categories, quantiles, bins, thresholds."""
    for values, between in _lists(step, width):
        rows = _unknown(width, draw)
        for column, found in values.items():
            if len(found) and column < width:
                rows[:, column] = draw.along(found) if between else draw.generator.choice(found, draw.count)
        yield rows


def _lists(step: Any, width: int) -> Iterator[tuple[dict[int, Any], bool]]:
    """Values by column, and whether there are others between them."""
    if (categories := getattr(step, "categories_", None)) is not None:
        numbers = ([each for each in np.asarray(one).tolist() if isinstance(each, int | float)] for one in categories)
        yield dict(enumerate(numbers)), False
    if (quantiles := getattr(step, "quantiles_", None)) is not None:
        yield dict(enumerate(np.asarray(quantiles).T)), True
    if (edges := getattr(step, "bin_edges_", None)) is not None:
        yield dict(enumerate(edges)), True
    if (splines := getattr(step, "bsplines_", None)) is not None:
        yield {column: each.t[each.k : -each.k or None] for column, each in enumerate(splines)}, True
    if (mapper := getattr(step, "_bin_mapper", None)) is not None:
        yield dict(enumerate(mapper.bin_thresholds_)), True
    if (thresholds := getattr(step, "X_thresholds_", None)) is not None:
        yield {0: thresholds}, True
    if (tree := getattr(step, "tree_", None)) is not None:
        yield {column: tree.threshold[tree.feature == column] for column in range(width)}, True
    elif getattr(step, "estimators_", None) is not None:
        yield _of_trees(step, width), True


def _of_trees(step: Any, width: int) -> dict[int, Any]:
    """Thresholds of each column in an ensemble of trees, whose trees may be fitted to some of the columns."""
    found: dict[int, list[Any]] = {}
    children = list(np.asarray(step.estimators_, np.object_).ravel())
    columns = getattr(step, "estimators_features_", None)
    for number, child in enumerate(children):
        tree: Any = getattr(child, "tree_", None)
        seen = np.arange(width) if columns is None or len(columns) != len(children) else np.asarray(columns[number])
        for column in np.unique(tree.feature[tree.feature >= 0]) if tree is not None else ():
            found.setdefault(int(seen[column]), []).append(tree.threshold[tree.feature == column])
    return {column: np.concatenate(values) for column, values in found.items()}


def _hints(step: Any, width: int, draw: Draw) -> Iterator[Rows]:
    """Rows from less informative attributes: fill-in values, counts, coefficients."""
    statistics = getattr(step, "statistics_", None)
    if statistics is not None and np.asarray(statistics).dtype.kind in "biuf" and len(statistics) == width:
        center = np.asarray(statistics, np.float64)
        yield center + np.where(center, np.abs(center) / 4, 1.0) * draw.normal(width)
    if hasattr(step, "feature_log_prob_"):  # naive Bayes of counts
        yield draw.generator.poisson(2.0, (draw.count, width)).astype(np.float64)
    coefficients = getattr(step, "coef_", None)
    if coefficients is None or np.shape(coefficients)[-1:] != (width,):
        return
    # Terms of about the intercept's size; in each row one of them cancels it, as in data far from zero.
    weights = np.atleast_2d(np.asarray(coefficients.toarray() if hasattr(coefficients, "toarray") else coefficients))
    intercepts = np.broadcast_to(np.ravel(getattr(step, "intercept_", 0.0)), len(weights))
    chosen = draw.generator.integers(0, len(weights), draw.count)
    weight, intercept = weights[chosen].astype(np.float64), intercepts[chosen].astype(np.float64)
    unit = np.divide(1.0, np.abs(weight), out=np.ones_like(weight), where=np.abs(weight) > 1e-30)
    rows = draw.normal(width) * unit * np.maximum(1.0, np.abs(intercept))[:, None] / np.sqrt(width)
    carrier = np.abs(weight).argmax(axis=1) if width < 2 else draw.generator.integers(0, width, draw.count)
    every = np.arange(draw.count)
    rows[every, carrier] -= np.sign(weight[every, carrier]) * intercept * unit[every, carrier]
    yield rows
