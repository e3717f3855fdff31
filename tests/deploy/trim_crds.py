"""Write tests/deploy/crds from CustomResourceDefinitions: their structure without descriptions.

    python tests/deploy/trim_crds.py PATH/TO/CRD.yaml VERSION SOURCE

Of pods and containers only the names of keys are kept: tests validate them with the schema of a Pod. Unknown keys are
refused, as by an API server with `kubectl apply --validate=strict`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parent / "crds"
# Keys by which a pod's specification is recognized.
_POD_KEYS = {"containers", "initContainers", "nodeSelector", "restartPolicy"}
_CONTAINER_KEYS = {"image", "livenessProbe", "volumeMounts"}

# Further keys of KServe's objects.
_OWN_KEYS = {"model", "modelFormat", "protocolVersion", "storageUri", "runtime", "minReplicas", "maxReplicas"}


def trim(schema: Any) -> Any:
    """Remove descriptions and pods from a schema, and forbid unknown keys."""
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties", {})
    if properties.keys() >= _POD_KEYS or properties.keys() >= _CONTAINER_KEYS:
        own = {name: trim(each) if name in _OWN_KEYS else {} for name, each in properties.items()}
        return {"type": "object", "properties": own, "additionalProperties": False}
    kept = {key: value for key, value in schema.items() if key in {"type", "required", "enum", "pattern", "minimum"}}
    if schema.get("x-kubernetes-int-or-string"):
        kept = {"type": ["integer", "string"]}
    if properties:
        kept["properties"] = {name: trim(each) for name, each in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = trim(schema["additionalProperties"])
    if "items" in schema:
        kept["items"] = trim(schema["items"])
    return kept


def main(path: str, version: str, source: str) -> None:
    """Write one schema."""
    definition = yaml.safe_load(Path(path).read_text())
    (found,) = (each for each in definition["spec"]["versions"] if each["name"] == version)
    schema = trim(found["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    schema["properties"]["metadata"] = {"type": "object"}
    names, group = definition["spec"]["names"], definition["spec"]["group"]
    document = {"source": source, "license": "Apache-2.0", "group": group, "version": version, "schema": schema}
    (_FOLDER / f"{names['kind']}.json").write_text(json.dumps(document, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
