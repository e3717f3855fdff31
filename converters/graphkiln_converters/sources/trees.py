"""Tree ensembles in ONNX graphs: rows that reach their leaves, and corrections of skl2onnx's export.

A tree compares a column of its input tensor with thresholds. The values of a graph's inputs where a comparison changes
are found by bisection through the nodes before the tree, if that column depends on a single column of the inputs. Rows
are then chosen by walking down the trees, towards leaves that no row has reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.sources.base import InputSpec, feeds_of

# One array of each input column, `[rows]`: numbers, or text.
Columns = Sequence[AnyArray]
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]

_ENOUGH = 0.9  # share of the leaves that the samples should reach
_WANTED = 0.99  # share at which the search ends
_MOST_CHOICES = 64  # distinct values of a column that is searched value by value
_MOST_ROWS = 16384
_ROWS_AT_ONCE = 2048
_MOST_CELLS = 2**24  # rows x columns of one evaluation
_FRUITLESS = 3  # rounds without another leaf before the search ends
_LIMIT = 1e30  # of the magnitude of inputs in a bisection
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "BRANCH_LEQ": np.less_equal,
    "BRANCH_LT": np.less,
    "BRANCH_GTE": np.greater_equal,
    "BRANCH_GT": np.greater,
    "BRANCH_EQ": np.equal,
    "BRANCH_NEQ": np.not_equal,
}
_TREES = ("TreeEnsembleRegressor", "TreeEnsembleClassifier")
_THRESHOLD = "num_threshold"  # field of a tree whose comparisons are in fp64
_MODES = ("LEAF", *_COMPARISONS)


@dataclass(frozen=True, slots=True)
class Trees:
    """All trees of a graph, with consecutive numbers of their nodes.

    Attributes:
        tensors: Names of the tensors that trees read.
        tensor: Number of the tensor of each node.
        feature: Column of the tensor that a node compares.
        value: Threshold of the comparison.
        mode: Position in `_MODES`.
        true: Next node if the comparison holds.
        false: Next node if it does not.
        missing: Whether it holds for NaN.
        roots: First node of each tree.
    """

    tensors: tuple[str, ...]
    tensor: _Ints
    feature: _Ints
    value: npt.NDArray[np.float64]
    mode: _Ints
    true: _Ints
    false: _Ints
    missing: _Bools
    roots: _Ints

    @classmethod
    def of(cls, graph: onnx.GraphProto) -> Trees | None:
        """Read the trees of a graph; None if it has none."""
        tensors: dict[str, int] = {}
        parts: list[dict[str, AnyArray]] = []
        count = 0
        for node in graph.node:
            if node.op_type in _TREES:
                parts.append(_read(node, count))
                size = parts[-1]["feature"].size
                parts[-1]["tensor"] = np.full(size, tensors.setdefault(node.input[0], len(tensors)))
                count += size
        if not count:
            return None
        return cls(tuple(tensors), **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def before(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Copy the nodes of a graph before the trees; the tensors that trees read are its outputs, in order."""
        made = {name: node for node in model.graph.node for name in node.output}
        needed, waiting = set(), [*self.tensors]
        while waiting:
            node = made.get(waiting.pop())
            if node is not None and id(node) not in needed:
                needed.add(id(node))
                waiting += node.input
        nodes = [node for node in model.graph.node if id(node) in needed]
        names = [f"read_by_trees_{number}" for number in range(len(self.tensors))]
        nodes += [onnx.helper.make_node("Identity", [a], [b]) for a, b in zip(self.tensors, names, strict=True)]
        graph = onnx.helper.make_graph(
            nodes,
            "before_trees",
            model.graph.input,
            [onnx.ValueInfoProto(name=name) for name in names],
            model.graph.initializer,
        )
        return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)

    @property
    def leaves(self) -> _Ints:
        """Numbers of the leaves."""
        return np.flatnonzero(self.mode == 0)

    def holds(self, nodes: _Ints, values: AnyArray) -> _Bools:
        """Evaluate the comparison of each node for one value."""
        found = np.zeros(values.shape, np.bool_)
        mode = self.mode[nodes]
        for number, compare in enumerate(_COMPARISONS.values(), 1):
            np.copyto(found, compare(values, self.value[nodes]), where=mode == number)
        return np.where(np.isnan(values), self.missing[nodes], found)

    def reached(self, tensors: Sequence[AnyArray]) -> _Ints:
        """Leaves that rows reach, `[rows, trees]`."""
        rows = np.arange(len(tensors[0]))[:, None]
        nodes = np.broadcast_to(self.roots, (len(rows), self.roots.size)).copy()
        while (inner := self.mode[nodes] != 0).any():
            values = np.zeros(nodes.shape)
            for number, tensor in enumerate(tensors):
                of_tensor = inner & (self.tensor[nodes] == number)
                values = np.where(of_tensor, tensor[rows, np.where(of_tensor, self.feature[nodes], 0)], values)
            following = np.where(self.holds(nodes, values), self.true[nodes], self.false[nodes])
            nodes = np.where(inner, following, nodes)
        return nodes


def _read(node: onnx.NodeProto, first: int) -> dict[str, AnyArray]:
    """Read the trees of one node, numbered from `first`."""
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    trees, numbers = (np.array(given[f"nodes_{name}"], np.int64) for name in ("treeids", "nodeids"))
    position = {key: first + i for i, key in enumerate(zip(trees.tolist(), numbers.tolist(), strict=True))}

    def following(name: str) -> AnyArray:
        pairs = zip(trees.tolist(), given[f"nodes_{name}nodeids"], strict=True)
        return np.array([position.get(pair, first) for pair in pairs], np.int64)

    return {
        "feature": np.array(given["nodes_featureids"], np.int64),
        "value": _values(given),
        "mode": np.array([_MODES.index(mode.decode()) for mode in given["nodes_modes"]], np.int64),
        "true": following("true"),
        "false": following("false"),
        "missing": np.array(given.get("nodes_missing_value_tracks_true") or np.zeros(trees.size), np.bool_),
        "roots": first + np.unique(trees, return_index=True)[1],
    }


_ROUNDED = (
    "trees with FP32 thresholds: exporters round those of LightGBM and scikit-learn, which are FP64, and rows near one "
    "may take the other branch; this proof compares the file with itself, --reference FILE.npz compares it with the "
    "library's results"
)


def rounded_thresholds(graph: onnx.GraphProto) -> str:
    """Warn of trees whose thresholds an exporter may have rounded; empty for none, and for FP64 and XGBoost's `<`."""
    for node in graph.node:
        if node.op_type in _TREES:
            given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
            if "nodes_values_as_tensor" not in given and b"BRANCH_LEQ" in given.get("nodes_modes", ()):
                return _ROUNDED
    return ""


def correct_trees(model: onnx.ModelProto, estimator: Any, *, double: bool) -> None:
    """Correct skl2onnx's export of scikit-learn's trees, in place.

    Most of them compare fp32 values with fp64 thresholds, even for FP64 inputs: the thresholds of skl2onnx are then
    rounded, or wrong halfway between two fp32 values. It leaves out the branches for missing values, and reads results
    as fp64 that are fp32.

    Args:
        model: The exported graph.
        estimator: Estimator of scikit-learn whose trees these are.
        double: The inputs are FP64.
    """
    known: dict[tuple[bytes, bytes], list[Any]] = {}
    for state in _states(estimator, set()):
        known.setdefault(_key(state), []).append(state)
    for node in [node for node in model.graph.node if node.op_type in _TREES]:
        given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        matched = _matched(given, known)
        if matched is None:
            continue
        missing, thresholds, of_bins = matched
        given["nodes_missing_value_tracks_true"] = missing.tolist()
        if double and of_bins:
            given["nodes_values_as_tensor"] = onnx.numpy_helper.from_array(thresholds)
            given.pop("nodes_values", None)
            for imported in model.opset_import:
                if imported.domain == "ai.onnx.ml":
                    imported.version = max(imported.version, 3)  # the first with thresholds in fp64
        elif double:
            for name in [name for name in given if name.endswith("_as_tensor")]:
                given[name.removesuffix("_as_tensor")] = onnx.numpy_helper.to_array(given.pop(name)).astype(np.float32)
            below = thresholds.astype(np.float32)
            given["nodes_values"] = np.where(below > thresholds, np.nextafter(below, np.float32(-np.inf)), below)
        del node.attribute[:]
        node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in given.items())
        _add_exactly(model.graph, node)
        if double:
            _cast_around(model.graph, node, before=not of_bins)


def _add_exactly(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    """Divide the sum of a forest's votes by its number of trees, instead of each vote.

    Sums of 1/20 are rounded, and by ONNX Runtime in another order in large batches: the label of a row whose classes
    have equal votes would follow the size of its batch, and scikit-learn's is the first. Whole votes have exact sums.
    """
    given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    trees = len({*given["nodes_treeids"]})
    averages = given.get("post_transform", b"NONE") == b"NONE" and not given.get("base_values")
    # With weights of one class only, ONNX Runtime compares their sum with 0.5.
    if trees == 1 or not averages or len({*given.get("class_ids", ())}) < 2 or "class_weights" not in given:
        return
    given["class_weights"] = (np.array(given["class_weights"]) * trees).astype(np.float32)
    del node.attribute[:]
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in given.items())
    result, votes, count = node.output[1], f"{node.output[1]}_votes", f"{node.output[1]}_trees"
    node.output[1] = votes
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(trees, np.float32), count))
    graph.node.insert(list(graph.node).index(node) + 1, onnx.helper.make_node("Div", [votes, count], [result]))


def _matched(
    given: Mapping[str, Any], known: Mapping[tuple[bytes, bytes], list[Any]]
) -> tuple[_Ints, npt.NDArray[np.float64], bool] | None:
    """Find the trees of an operator among scikit-learn's.

    Returns:
        For each node whether NaN goes to the left, and its threshold; and whether they are trees of bins, which compare
        in fp64. None if a tree is not known.
    """
    trees, numbers, features = (np.array(given[f"nodes_{name}ids"]) for name in ("tree", "node", "feature"))
    inner = np.array([mode != b"LEAF" for mode in given["nodes_modes"]])
    values, missing, thresholds, of_bins = _values(given), np.zeros(trees.size, np.int64), np.zeros(trees.size), False
    for tree in np.unique(trees):
        own = np.flatnonzero((trees == tree) & inner)
        own = own[np.argsort(numbers[own])]
        states = known.get((numbers[own].tobytes(), features[own].tobytes()))
        if states is None:
            return None
        compared = [_thresholds(state)[numbers[own]] for state in states]  # trees of one form differ in these
        nearest = int(np.argmin([np.abs(each - values[own]).sum() for each in compared]))
        missing[own] = states[nearest]["missing_go_to_left"][numbers[own]]
        thresholds[own] = compared[nearest]
        of_bins |= _THRESHOLD in states[nearest].dtype.names
    return missing, thresholds, of_bins


def _cast_around(graph: onnx.GraphProto, node: onnx.NodeProto, *, before: bool) -> None:
    """Cast the input of trees to fp32, as scikit-learn does, and their results to the fp64 of the following nodes."""
    answer = node.output[0]
    if node.op_type == "TreeEnsembleRegressor" and answer not in {value.name for value in graph.output}:
        for reader in graph.node:
            reader.input[:] = [f"{answer}_fp64" if name == answer else name for name in reader.input]
        cast = onnx.helper.make_node("Cast", [answer], [f"{answer}_fp64"], to=onnx.TensorProto.DOUBLE)
        graph.node.insert([*graph.node].index(node) + 1, cast)
    if before:
        rounded = f"{node.input[0]}_fp32_{answer}"
        cast = onnx.helper.make_node("Cast", [node.input[0]], [rounded], to=onnx.TensorProto.FLOAT)
        graph.node.insert([*graph.node].index(node), cast)
        node.input[0] = rounded


def _values(given: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Thresholds of the nodes of an operator."""
    values = given.get("nodes_values")
    return np.array(
        onnx.numpy_helper.to_array(given["nodes_values_as_tensor"]) if values is None else values, np.float64
    )


def _thresholds(state: Any) -> npt.NDArray[np.float64]:
    return np.asarray(state[_THRESHOLD if _THRESHOLD in state.dtype.names else "threshold"], np.float64)


def _key(state: Any) -> tuple[bytes, bytes]:
    """Numbers and columns of the nodes of a tree that branch."""
    if _THRESHOLD in state.dtype.names:  # of gradient boosting by histograms
        inner, features = np.flatnonzero(state["is_leaf"] == 0), state["feature_idx"]
    else:
        inner, features = np.flatnonzero(state["left_child"] >= 0), state["feature"]
    return inner.tobytes(), features[inner].astype(np.int64).tobytes()


def _states(held: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the node arrays of all trees of scikit-learn that an object refers to."""
    if id(held) in seen or isinstance(held, str | bytes):
        return
    seen.add(id(held))
    if type(held).__name__ == "TreePredictor":
        yield held.nodes
    elif hasattr(held, "tree_"):
        yield held.tree_.__getstate__()["nodes"]
    else:
        if isinstance(held, np.ndarray):
            inner: Any = held.ravel() if held.dtype == np.object_ else ()
        else:
            inner = held if isinstance(held, list | tuple) else getattr(held, "__dict__", {}).values()
        for each in inner:
            yield from _states(each, seen)


def with_leaves(
    trees: Trees,
    run: Callable[[Mapping[str, AnyArray]], Mapping[str, AnyArray]],
    specs: Sequence[InputSpec],
    columns: Columns,
    generator: np.random.Generator,
) -> tuple[list[AnyArray], str]:
    """Add rows that reach the leaves of trees.

    Args:
        trees: The trees.
        run: Compute the graph of `Trees.before`.
        specs: Inputs of the graph.
        columns: Plausible rows; others are chosen near them.
        generator: Source of random numbers.

    Returns:
        The plausible and the added rows, and a note if they reach too few leaves.
    """

    def evaluate(columns: Columns) -> list[AnyArray]:
        return [*run(feeds_of(specs, columns)).values()]

    values = {number: np.unique(column) for number, column in enumerate(columns)}
    choices = {number: found for number, found in values.items() if found.size <= _MOST_CHOICES}
    walk = _Walk.through(trees, evaluate, columns, choices)
    covered = np.zeros(trees.mode.size, np.bool_)
    covered[trees.reached(evaluate(columns))] = True
    parts: list[Columns] = [columns]
    added = fruitless = 0
    while covered[trees.leaves].mean() < _WANTED and fruitless < _FRUITLESS and added < _MOST_ROWS:
        tried = walk.rows(covered, generator)
        found = trees.reached(evaluate(tried))
        new = _adding(found, covered)
        fruitless = 0 if new.size else fruitless + 1
        covered[found[new]] = True
        parts.append([column[new] for column in tried])
        added += new.size
    rows = [np.concatenate(pieces) for pieces in zip(*parts, strict=True)]
    share = float(covered[trees.leaves].mean())
    if share >= _ENOUGH:
        return rows, ""
    reached = f"{share:.0%} of the {trees.leaves.size} leaves of the trees"
    return rows, f"the samples reach {reached}: give rows of the training data, --samples FILE.npz"


def _adding(found: _Ints, covered: _Bools) -> _Ints:
    """Rows that reach a leaf which is neither covered nor reached by an earlier row."""
    first = np.unique(found, return_index=True)
    new = ~covered[first[0]]
    rows: _Ints = np.unique(first[1][new] // found.shape[1])
    return rows


@dataclass(frozen=True, slots=True)
class _Walk:
    """A search for rows: the splits of trees in terms of the columns of the inputs.

    Attributes:
        trees: The trees.
        base: Plausible rows.
        choices: Column -> its possible values.
        column: Column that decides a node; -1 if it is unknown.
        low: Largest value on the lower side of a node.
        high: Smallest value on its upper side.
        rising: Whether the comparison of a node holds on its upper side.
        allowed: Node -> for which choices of its column the comparison holds.
        order: Nodes with a branch, the deepest first.
    """

    trees: Trees
    base: Columns
    choices: Mapping[int, AnyArray]
    column: _Ints
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    rising: _Bools
    allowed: Mapping[int, AnyArray]
    order: Sequence[_Ints]

    @classmethod
    def through(
        cls,
        trees: Trees,
        evaluate: Callable[[Columns], Sequence[AnyArray]],
        base: Columns,
        choices: Mapping[int, AnyArray],
    ) -> _Walk:
        """Find the values of input columns where comparisons change."""
        size = trees.mode.size
        column, rising = np.full(size, -1), np.zeros(size, np.bool_)
        low, high = np.full(size, -np.inf), np.full(size, np.inf)
        inner = np.flatnonzero(trees.mode)
        owners = _owners(trees, evaluate, base)
        column[inner] = [
            owners[number].get(feature, -1)
            for number, feature in zip(trees.tensor[inner].tolist(), trees.feature[inner].tolist(), strict=True)
        ]
        allowed: dict[int, AnyArray] = {}
        for number, values in choices.items():
            nodes = np.flatnonzero(column == number)
            if nodes.size:
                first = [np.repeat(each[:1], values.size) for each in base]
                tensors = evaluate([*first[:number], values, *first[number + 1 :]])
                for node in nodes.tolist():
                    compared = tensors[trees.tensor[node]][:, trees.feature[node]]
                    allowed[node] = trees.holds(np.full(values.size, node), compared)
        scaled = inner[(column[inner] >= 0) & ~np.isin(column[inner], list(choices))]
        for nodes in np.array_split(scaled, max(1, scaled.size * len(base) // _MOST_CELLS + 1)):
            low[nodes], high[nodes], rising[nodes] = _sides(trees, evaluate, base, column, nodes)
            column[nodes[low[nodes] == high[nodes]]] = -1
        return cls(trees, base, choices, column, low, high, rising, allowed, _by_depth(trees))

    def rows(self, covered: _Bools, generator: np.random.Generator) -> Columns:
        """Choose rows towards leaves that are not covered."""
        trees, count = self.trees, _ROWS_AT_ONCE
        open_leaves = np.zeros(trees.mode.size)
        open_leaves[trees.leaves] = ~covered[trees.leaves]
        for nodes in self.order:
            open_leaves[nodes] = open_leaves[trees.true[nodes]] + open_leaves[trees.false[nodes]]
        least, most = (np.full((count, len(self.base)), value) for value in (-np.inf, np.inf))
        left = {number: np.ones((count, values.size), np.bool_) for number, values in self.choices.items()}
        # The first tree is free to choose, the others are bound to its box: begin with many open leaves.
        order = np.argsort(-open_leaves[trees.roots] * generator.random(trees.roots.size))
        for root in trees.roots[order]:
            self._descend(int(root), open_leaves, (least, most, left), generator)
        return self._inside(least, most, left, generator)

    def _descend(
        self, root: int, open_leaves: npt.NDArray[np.float64], box: Any, generator: np.random.Generator
    ) -> None:
        """Walk each row down a tree, and restrict its box to the leaf that it reaches."""
        trees, (least, most, left) = self.trees, box
        rows, nodes = np.arange(len(least)), np.full(len(least), root)
        while rows.size:
            inner = trees.mode[nodes] != 0
            rows, nodes = rows[inner], nodes[inner]
            column = self.column[nodes]
            choice = np.isin(column, list(self.choices))
            number = np.where(column < 0, 0, column)
            upper = (column < 0) | (most[rows, number] >= self.high[nodes])
            lower = (column < 0) | (least[rows, number] <= self.low[nodes])
            rising = self.rising[nodes]
            can = np.stack([np.where(rising, upper, lower), np.where(rising, lower, upper)])
            for i in np.flatnonzero(choice):
                kept, holds = left[int(column[i])][rows[i]], self.allowed[int(nodes[i])]
                can[:, i] = (kept & holds).any(), (kept & ~holds).any()
            wanted = np.stack([open_leaves[trees.true[nodes]], open_leaves[trees.false[nodes]]])
            wanted = np.where(can, wanted + 1e-3, 0.0)  # without open leaves below, either side is as good
            drawn: npt.NDArray[np.float64] = generator.random(rows.size) * wanted.sum(axis=0)
            holds_now = drawn < wanted[0]
            up = (holds_now == rising) & (column >= 0) & ~choice
            down = (holds_now != rising) & (column >= 0) & ~choice
            least[rows[up], column[up]] = np.maximum(least[rows[up], column[up]], self.high[nodes[up]])
            most[rows[down], column[down]] = np.minimum(most[rows[down], column[down]], self.low[nodes[down]])
            for i in np.flatnonzero(choice):
                kept, holds = left[int(column[i])], self.allowed[int(nodes[i])]
                kept[rows[i]] &= holds if holds_now[i] else ~holds
            nodes = np.where(holds_now, trees.true[nodes], trees.false[nodes])

    def _inside(self, least: Any, most: Any, left: Any, generator: np.random.Generator) -> Columns:
        """Choose a row in each box: that of the base if it fits, an edge, or a point between."""
        count = len(least)
        picked = generator.integers(0, len(self.base[0]), count)
        columns: list[AnyArray] = []
        for number, values in enumerate(self.base):
            near = values[picked]
            if number in self.choices:
                order = generator.random(left[number].shape) * left[number]
                columns.append(np.where(left[number].any(axis=1), self.choices[number][order.argmax(axis=1)], near))
                continue
            if values.dtype.kind not in "fiu":  # text with many different values
                columns.append(near)
                continue
            low, high = least[:, number], most[:, number]
            clipped = np.clip(near, low, high)
            between = np.isfinite(low) & np.isfinite(high) & (generator.random(count) < 0.3)
            inside = low + generator.random(count) * np.where(between, high - low, 0.0)
            edge = np.where(np.isfinite(low) & (generator.random(count) < 0.5), low, high)
            edges = np.isfinite(edge) & (generator.random(count) < 0.3)
            columns.append(np.where(edges, edge, np.where(between, inside, clipped)))
        return columns


def _owners(trees: Trees, evaluate: Callable[[Columns], Sequence[AnyArray]], base: Columns) -> list[dict[int, int]]:
    """For each tensor: its column -> the column of the inputs on which it depends, or -1 if there are several."""
    some = [column[:16] for column in base]
    before = evaluate(some)
    owners: list[dict[int, int]] = [{} for _ in trees.tensors]
    for number, column in enumerate(base):
        different = column[len(column) // 2 :][: len(some[0])]
        after = evaluate([different if i == number else each for i, each in enumerate(some)])
        for tensor, (first, second) in enumerate(zip(before, after, strict=True)):
            for feature in np.flatnonzero((first != second).any(axis=0)).tolist():
                owners[tensor][feature] = -1 if feature in owners[tensor] else number
    return owners


def _sides(
    trees: Trees, evaluate: Callable[[Columns], Sequence[AnyArray]], base: Columns, column: _Ints, nodes: _Ints
) -> tuple[AnyArray, AnyArray, _Bools]:
    """Neighboring fp32 values of each node's column between which its comparison changes, and whether it then holds.

    The two are equal where none was found.
    """
    own, every = column[nodes], np.arange(nodes.size)
    ends: list[tuple[Any, Any]] = [
        (np.nanmin(each), np.nanmax(each)) if each.dtype.kind in "fiu" else (0, 0) for each in base
    ]
    wide = [(low - 16 * (high - low) - 1, high + 16 * (high - low) + 1) for low, high in ends]

    def holds(values: AnyArray) -> _Bools:
        table = [np.repeat(each[:1], nodes.size) for each in base]
        for number in np.unique(own).tolist():
            table[number] = np.where(own == number, values, table[number])
        tensors = evaluate(table)
        compared = np.stack(
            [tensor[every, np.minimum(trees.feature[nodes], tensor.shape[1] - 1)] for tensor in tensors]
        )
        return trees.holds(nodes, compared[trees.tensor[nodes], every])

    low, high = (_ordinal(np.array([wide[number][end] for number in own.tolist()])) for end in (0, 1))
    first, last = holds(_of_ordinal(low)), holds(_of_ordinal(high))
    outside = first == last
    low, high = np.where(outside, _ordinal(-_LIMIT), low), np.where(outside, _ordinal(_LIMIT), high)
    first, last = holds(_of_ordinal(low)), holds(_of_ordinal(high))
    while (high - low > 1).any():
        middle = (low + high) // 2
        same = holds(_of_ordinal(middle)) == first
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    found = first != last
    return _of_ordinal(low), np.where(found, _of_ordinal(high), _of_ordinal(low)), last


def _ordinal(values: Any) -> _Ints:
    """Number fp32 values in their order."""
    bits = np.asarray(values, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _of_ordinal(numbers: _Ints) -> npt.NDArray[np.float64]:
    magnitude = np.abs(numbers).astype(np.int32).view(np.float32).astype(np.float64)
    return np.where(numbers < 0, -magnitude, magnitude)


def _by_depth(trees: Trees) -> list[_Ints]:
    """Nodes with a branch, the deepest first."""
    levels, nodes = [], trees.roots
    while (nodes := nodes[trees.mode[nodes] != 0]).size:
        levels.append(nodes)
        nodes = np.concatenate([trees.true[nodes], trees.false[nodes]])
    return levels[::-1]
