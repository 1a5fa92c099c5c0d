"""The JSON Schema of profiles."""

from typing import Any

from toolkit.job.schema import describe, env_schema, head_of, sbatch_schema
from toolkit.launcher_plugins import BUILT_IN
from toolkit.profile.base import model_of


def profile_schema() -> dict[str, Any]:
    """Return the JSON Schema of profiles; descriptions are the docstrings of the fields.

    It has the kinds of this package: `local`, `slurm` and `kubernetes`.
    """
    parts: dict[str, Any] = {}
    models: dict[str, str] = {}
    for kind in BUILT_IN:
        model = model_of(kind)
        assert model is not None
        part = model.model_json_schema(by_alias=True)
        parts |= part.pop("$defs", {})
        properties = part["properties"]
        properties["env"] = env_schema()
        if "sbatch" in properties:
            properties["sbatch"] = sbatch_schema()
        for mapping in ("resources", "node_selector"):
            if mapping in properties:  # other keys are refused as well
                properties[mapping]["additionalProperties"] = False
        models[kind] = model.__name__
        parts[model.__name__] = part
    describe(parts)
    return {
        **head_of("profile"),
        "title": "Profile",
        "description": "The facts of a site.",
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": [*models], "description": "The kind of site."}},
        "allOf": [
            {
                "if": {"required": ["kind"], "properties": {"kind": {"const": kind}}},
                "then": {"$ref": f"#/$defs/{name}"},
            }
            for kind, name in models.items()
        ],
        "$defs": parts,
    }
