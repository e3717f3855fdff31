"""`mlflow:models:/NAME/VERSION`, `mlflow:runs:/RUN/PATH`, `mlflow:DIR`: models logged with MLflow.

`fetch` downloads a model's folder from the tracking server, `open_source` opens a folder. The file of an ONNX,
torch.export, skops or transformers model is opened by its own source, with that source's trust: MLflow's loaders take
the list of trusted types from the model itself. Pickles are loaded by MLflow, with --allow-code. The signature is
compared with the model, and the rows of the input example are proven beside synthetic ones.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.text import nearest, redact
from graphkiln_converters.recipe import Recipe, check_file, first_line
from graphkiln_converters.sources.base import CODE_HINT, EXPORT_BATCH, USUAL_SIZE, SourceModel
from graphkiln_converters.sources.base import open_source as open_other

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at the import
import mlflow
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.tracking import is_tracking_uri_set
from mlflow.types import Schema

from graphkiln_converters.sources.mlflow_signature import check_inputs, check_outputs, rows_of, tensors_of, with_rows

MODEL_FILE = "MLmodel"
_REGISTERED_FILE = "registered_model_meta"
_PROGRAM = "model.pt2"
_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@]+))")
_LOGGED = re.compile(r"models:/(?P<id>m-[^/@]+)")
_OF_RUN = re.compile(r"runs:/(?P<run>[^/]+)/(?P<path>.+)")
_FORMS = "models:/NAME/VERSION, models:/NAME@ALIAS, models:/m-ID, runs:/RUN/PATH"
# MLflow's own settings try a server that does not answer for minutes. Those of the environment have precedence.
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
# Files that MLflow writes after it has recorded the size of the others.
_NOT_COUNTED = {
    *(MODEL_FILE, _REGISTERED_FILE),
    *("conda.yaml", "python_env.yaml", "requirements.txt", "constraints.txt"),
}
_ROWS = 64  # of an input example
_ALIGNED = 8  # tokens, of which `huggingface` takes 8 at least


# From the server to a folder.


def fetch(location: str, folder: Path) -> Path:
    """Download a model from the tracking server of MLFLOW_TRACKING_URI.

    Args:
        location: Address of the model, as in `_FORMS`.
        folder: An empty folder.

    Returns:
        Folder of the model, inside the given one.

    Raises:
        ConversionError: There is no such model, the server does not answer, or the download is incomplete.
    """
    if not is_tracking_uri_set():  # type: ignore[no-untyped-call]
        raise ConversionError(
            f"mlflow:{location}: the tracking server is not known",
            hint="set MLFLOW_TRACKING_URI, for example to http://HOST:5000; a folder of a model is mlflow:DIR",
        )
    with _connected():
        found = Path(mlflow.artifacts.download_artifacts(artifact_uri=_resolved(location), dst_path=str(folder)))
    if not (found / MODEL_FILE).is_file():
        raise ConversionError(
            f"mlflow:{location} is not a model: it has no file {MODEL_FILE}",
            hint="name a model, as logged by mlflow.<flavor>.log_model",
        )
    return found


@contextmanager
def _connected() -> Iterator[None]:
    """Set timeouts, and translate MLflow's errors.

    Raises:
        ConversionError: A call failed.
    """
    server = redact(str(mlflow.get_tracking_uri()))
    before = dict(os.environ)
    os.environ.update(_SETTINGS | before)
    try:
        yield
    except GraphkilnError:
        raise
    except Exception as error:  # of MLflow, requests, and the clients of object stores
        raise ConversionError(
            f"MLflow at {server}: {redact(first_line(error))}",
            hint="check MLFLOW_TRACKING_URI, the server, and your access to it and its artifacts; "
            f"MLFLOW_HTTP_REQUEST_TIMEOUT ({os.environ['MLFLOW_HTTP_REQUEST_TIMEOUT']} s) and "
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES make it more patient",
        ) from error
    finally:
        for name in _SETTINGS.keys() - before.keys():
            del os.environ[name]


def _resolved(location: str) -> str:
    """Check that a model exists, and replace its alias by the version.

    Raises:
        ConversionError: It does not exist.
    """
    client = mlflow.MlflowClient()
    if match := _REGISTERED.fullmatch(location):
        name, version, alias = match["name"], match["version"], match["alias"]
        with _named(f"the registry has no '{location.removeprefix('models:/')}'", lambda: _versions_of(client, name)):
            if alias:
                version = client.get_model_version_by_alias(name, alias).version
            client.get_model_version(name, str(version))
        return f"models:/{name}/{version}"
    if match := _LOGGED.fullmatch(location):
        with _named(f"there is no logged model '{match['id']}'", lambda: ""):
            client.get_logged_model(match["id"])
        return location
    if match := _OF_RUN.fullmatch(location):
        with _named(f"there is no run '{match['run']}'", lambda: ""):
            run = client.get_run(match["run"])
        models = [client.get_logged_model(each.model_id).name for each in getattr(run.outputs, "model_outputs", ())]
        files = {each.path for each in client.list_artifacts(match["run"])}
        if match["path"].split("/")[0] not in {*models, *files}:
            raise ConversionError(
                f"run {match['run']} has no model '{match['path']}'",
                hint=f"it has {', '.join(models)}" if models else "it has logged no model",
            )
        return location
    raise ConversionError(f"'mlflow:{location}' is not an address of a model", hint=f"expected {_FORMS}, or a folder")


@contextmanager
def _named(problem: str, known: Callable[[], str]) -> Iterator[None]:
    """Translate MLflow's answer that something does not exist; `known` makes the hint.

    Raises:
        ConversionError: It does not exist.
    """
    try:
        yield
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND"):
            raise
        raise ConversionError(f"MLflow: {problem}: {first_line(error)}", hint=known()) from error


def _versions_of(client: mlflow.MlflowClient, name: str) -> str:
    """List the versions and aliases of a model, or else a model of a similar name."""
    models = {each.name: each for each in client.search_registered_models()}
    if name not in models:
        near = nearest(name, [*models])
        return f"did you mean '{near}'?" if near else f"it has {', '.join(sorted(models)) or 'no models'}"
    versions = sorted(int(each.version) for each in client.search_model_versions(f"name='{name}'"))
    aliases = [f"{name}@{alias}" for alias in sorted(client.get_registered_model(name).aliases)]
    return f"it has {', '.join([*(f'{name}/{number}' for number in versions), *aliases]) or 'no versions'}"


# From a folder to a source.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Logged:
    """A model in a folder.

    Attributes:
        folder: The folder.
        flavor: Values of the flavor.
        inputs: Inputs of the signature, or None.
        outputs: Outputs of the signature, or None.
        example: First rows of the input example, or None.
    """

    folder: Path
    flavor: Mapping[str, Any]
    inputs: Schema | None
    outputs: Schema | None
    example: Any

    def path(self, key: str) -> Path:
        """File or folder that the flavor names.

        Raises:
            ConversionError: It is not in the folder.
        """
        path = self.folder / str(self.flavor.get(key))
        if not path.resolve().is_relative_to(self.folder.resolve()) or not path.exists():
            raise ConversionError(
                f"{self.folder} is incomplete: its {key}, '{self.flavor.get(key)}', is not there",
                hint="log the model again",
            )
        return path

    def unpickle(self, flavor: str, recipe: Recipe, safe: str, **options: Any) -> Any:
        """Load a pickle with MLflow's loader.

        Args:
            flavor: Name of the flavor.
            recipe: Recipe, which must allow code.
            safe: A serialization format without code.
            **options: Options of the loader.

        Raises:
            ConversionError: --allow-code is missing, or the model cannot be loaded.
        """
        if not recipe.allow_code:
            raise ConversionError(
                f"{self.folder} is not loaded: a pickle can run code",
                hint=f"{CODE_HINT}; or log it with serialization_format='{safe}'",
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # other releases of libraries
                return getattr(mlflow, flavor).load_model(str(self.folder), **options)
        except Exception as error:  # of anything that a pickle calls
            raise ConversionError(
                f"{self.folder} cannot be loaded: {type(error).__name__}: {first_line(error)}",
                hint="install the releases that its requirements.txt names, or log the model again",
            ) from error

    def checked(self, model: SourceModel) -> SourceModel:
        """Compare a model with the signature, and add the rows of the example.

        Raises:
            ConversionError: They do not fit.
        """
        try:
            check_inputs(self.inputs, model)
            check_outputs(self.outputs, model)
            return with_rows(model, rows_of(self.example, model.inputs, whole=bool(model.whole)))
        except BaseException:
            model.close()
            raise


def open_source(location: str, recipe: Recipe) -> SourceModel:
    """Open a folder that MLflow saved.

    Raises:
        ConversionError: The folder is incomplete, has no supported flavor, needs --allow-code, or its signature or
            input example does not fit the model.
    """
    folder = Path(location)
    check_file(folder / MODEL_FILE, expected="a folder saved by MLflow")
    described, signature, example = _read(folder)
    flavors: Mapping[str, Any] = described.flavors or {}
    name = next((each for each in _OPENERS if each in flavors), None)
    if name is None:
        raise ConversionError(
            f"{folder} has the flavors {', '.join(sorted(flavors))}, of which graphkiln converts none",
            hint=f"log it as {', '.join(_OPENERS)}, or convert its files by another source",
        )
    logged = _Logged(
        folder=folder,
        flavor=flavors[name],
        inputs=signature.inputs if signature else None,
        outputs=signature.outputs if signature else None,
        example=_head(example),
    )
    model = _OPENERS[name](logged, recipe)
    library = next(each for each in ("mlflow-skinny", "mlflow") if any(metadata.distributions(name=each)))
    return replace(
        model,
        description=f"mlflow:{location}",
        libraries=(*model.libraries, library),
        notes=(*model.notes, _origin(described, folder)),
    )


def _read(folder: Path) -> tuple[Model, ModelSignature | None, Any]:
    """Read the description of a model, its signature and its input example.

    Raises:
        ConversionError: One of them is damaged, or files are missing.
    """
    part = MODEL_FILE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pandas, about types of columns
            described = Model.load(str(folder))
            signature = described.signature
            _check_size(folder, described.model_size_bytes)
            part = "its input example"
            return described, signature, described.load_input_example(str(folder))
    except GraphkilnError:
        raise
    except Exception as error:  # of YAML, JSON, pandas
        raise ConversionError(
            f"{folder}: {part} is damaged, or disagrees with the signature: {first_line(error)}",
            hint="log the model again",
        ) from error


def _origin(described: Model, folder: Path) -> str:
    """Name the model: an alias names another one tomorrow."""
    facts = {"model": described.model_id, "run": described.run_id, "logged by MLflow": described.mlflow_version}
    file = folder / _REGISTERED_FILE
    found = yaml.safe_load(file.read_text()) if file.is_file() else {}
    if found.get("model_name"):
        facts = {"version": f"{found['model_version']} of '{found['model_name']}'", **facts}
    return f"MLflow: {', '.join(f'{key} {value}' for key, value in facts.items() if value)}"


def _check_size(folder: Path, recorded: int | None) -> None:
    """Compare the size of the files with the recorded one.

    Raises:
        ConversionError: Something is missing.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in _NOT_COUNTED]
    found = sum(path.stat().st_size for path in files)
    if recorded and found < recorded:
        raise ConversionError(
            f"{folder} is incomplete: its files have {found} bytes, {MODEL_FILE} says {recorded}",
            hint="restore the artifacts of the model, or log it again",
        )


def _head(example: Any) -> Any:
    """First rows of an example; a dict of arrays has rows for each."""
    if hasattr(example, "toarray"):
        return example[:_ROWS].toarray()
    if isinstance(example, Mapping):
        return {str(name): np.asarray(rows)[:_ROWS] for name, rows in example.items() if np.ndim(rows)}
    return example if example is None or isinstance(example, str) else example[:_ROWS]


# Flavors. ONNX, torch.export and skops files, and folders of transformers, are opened by their own sources.


def _open_onnx(logged: _Logged, recipe: Recipe) -> SourceModel:
    return logged.checked(open_other(recipe.model_copy(update={"source": str(logged.path("data"))})))


def _open_sklearn(logged: _Logged, recipe: Recipe) -> SourceModel:
    from graphkiln_converters.sources.sklearn import load_estimator, open_estimator

    file = logged.path("pickled_model")
    is_pickle = logged.flavor.get("serialization_format") != "skops"
    estimator = logged.unpickle("sklearn", recipe, "skops") if is_pickle else load_estimator(str(file), recipe)
    model = open_estimator(estimator, f"mlflow:{logged.folder}")
    names = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
    check_inputs(logged.inputs, model, any_number=True, columns=names)
    is_known = hasattr(logged.example, "columns") and {*names} == {*logged.example.columns}
    rows = rows_of(logged.example[names] if is_known else logged.example, model.inputs, any_number=True)
    if not recipe.samples:  # else `fitting` follows, with these
        found = [array.dtype for array in rows.values()]
        types: Sequence[Any] = logged.inputs.numpy_types() if logged.inputs else found
        single = bool(types) and all(np.dtype(each) == np.float32 for each in types)
        tables = rows or {spec.name: spec.known for spec in model.inputs if spec.known is not None}
        number = np.float32 if single else np.float64  # type of the tables that the estimator is used with
        model = model.fitting({name: _as_number(array, number) for name, array in tables.items()})
    if names and len(model.inputs) == 1:
        model = replace(model, notes=(*model.notes, f"columns of {model.inputs[0].name}: {', '.join(names)}"))
    return with_rows(model, rows)


def _as_number(array: AnyArray, number: type[np.floating[Any]]) -> AnyArray:
    return array if array.dtype == np.object_ else array.astype(number)


def _open_pytorch(logged: _Logged, recipe: Recipe) -> SourceModel:
    data = logged.path("model_data")
    if (data / _PROGRAM).is_file():
        return logged.checked(open_other(recipe.model_copy(update={"source": str(data / _PROGRAM)})))
    module = logged.unpickle("pytorch", recipe, "pt2", map_location="cpu", weights_only=False)
    import torch

    from graphkiln_converters.sources.python_module import module_source

    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise ConversionError(
            f"{logged.folder} is a {type(module).__name__}, expected a torch.nn.Module",
            hint="download the artifacts, and convert a program of torch.jit as torchscript:FILE",
        )
    model = module_source(module, _module_example(logged, recipe), recipe, description=f"mlflow:{logged.folder}")
    varying = [{axis for axis, size in enumerate(each.shape[1:]) if size == -1} for each in tensors_of(logged.inputs)]
    specs = [
        replace(spec, dynamic={axis: (1, 2 * size) for axis, size in enumerate(spec.shape) if axis in axes})
        for spec, axes in zip(model.inputs, varying, strict=False)
    ]
    return logged.checked(replace(model, inputs=tuple(specs)) if len(specs) == len(model.inputs) else model)


def _module_example(logged: _Logged, recipe: Recipe) -> Any:
    """Inputs of a module: the example, or tensors of the signature; None if only the recipe has shapes.

    Raises:
        ConversionError: Nothing is known.
    """
    from graphkiln_converters.sources.pytorch import to_tensor

    example, schema = logged.example, logged.inputs
    if isinstance(example, Mapping):
        return {name: to_tensor(np.ascontiguousarray(rows)) for name, rows in example.items()}
    if example is not None:  # MLflow gives tables to a module as float32
        return to_tensor(np.ascontiguousarray(example, None if isinstance(example, np.ndarray) else np.float32))
    if tensors := tensors_of(schema):
        sizes = [[USUAL_SIZE if size == -1 else size for size in each.shape[1:]] for each in tensors]
        zeros = [to_tensor(np.zeros((EXPORT_BATCH, *own), each.type)) for own, each in zip(sizes, tensors, strict=True)]
        return (
            {str(each.name): zero for each, zero in zip(tensors, zeros, strict=True)} if tensors[0].name else zeros[0]
        )
    if schema:
        return to_tensor(np.zeros((EXPORT_BATCH, len(schema.inputs)), np.float32))
    if recipe.shapes:
        return None
    raise ConversionError(
        f"{logged.folder} has neither a signature nor an input example",
        hint="give the sizes of one sample (--shape 3x224x224), or log it with input_example",
    )


def _open_transformers(logged: _Logged, recipe: Recipe) -> SourceModel:
    """Open the folder of a model; its signature is that of a pipeline, so that only texts of the example are used."""
    if "peft_adaptor" in logged.flavor:
        raise ConversionError(f"{logged.folder} is an adapter", hint="log model.merge_and_unload() instead")
    if "model_binary" not in logged.flavor:
        name = logged.flavor.get("source_model_name")
        raise ConversionError(f"{logged.folder} has no weights, but refers to {name}", hint=f"huggingface:{name}")
    files = [*logged.path("model_binary").iterdir(), *logged.folder.glob("components/*/preprocessor_config.json")]
    with TemporaryDirectory(prefix="graphkiln-") as folder:  # as transformers saves them: all in one
        for file in {file.name: file for file in reversed(files)}.values():
            (Path(folder) / file.name).symlink_to(file.resolve())
        model = open_other(recipe.model_copy(update={"source": f"huggingface:{folder}"}))
    if model.random_weights:
        raise ConversionError(f"{logged.folder} is incomplete: it has no weights", hint="log the model again")
    if logged.example is None:
        return model
    texts, tokenizer = _texts(logged.example), logged.folder / "components" / "tokenizer"
    if not texts or not tokenizer.is_dir() or model.inputs[0].name != "input_ids":
        return replace(model, notes=(*model.notes, "the input example is not used: it is not a list of texts"))
    import transformers

    auto: Any = transformers.AutoTokenizer
    longest = model.inputs[0].dynamic[0][1]
    try:
        found = auto.from_pretrained(tokenizer, trust_remote_code=False)(
            texts, padding=True, pad_to_multiple_of=_ALIGNED, truncation=True, max_length=longest, return_tensors="np"
        )
    except Exception as error:
        raise ConversionError(
            f"{logged.folder}: its tokenizer fails on the input example: {first_line(error)}",
            hint="log it with a tokenizer that has a padding token, or without an example",
        ) from error
    return with_rows(model, rows_of(dict(found), model.inputs))


def _texts(example: Any) -> list[str]:
    """Texts of an example: one, a list of them, or a table of one column; empty for others."""
    rows = np.asarray([example] if isinstance(example, str) else example, np.object_)
    rows = rows[:, 0] if rows.ndim == 2 and rows.shape[1] == 1 else rows
    found: list[Any] = rows.tolist() if rows.ndim == 1 else []
    return found if all(isinstance(each, str) for each in found) else []


_OPENERS = {
    "onnx": _open_onnx,
    "sklearn": _open_sklearn,
    "pytorch": _open_pytorch,
    "transformers": _open_transformers,
}
