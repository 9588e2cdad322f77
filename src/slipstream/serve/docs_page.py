"""A page about the API, written from its OpenAPI document. It needs no scripts and no internet."""

import html
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code{font-family:ui-monospace,monospace}table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #8884;padding:.25rem .5rem;text-align:left;vertical-align:top}"
)


def docs_page(document: dict[str, Any]) -> str:
    """Return the page as HTML."""
    schemas = document.get("components", {}).get("schemas", {})
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(document['info']['title'])} API</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        f"<h1>{html.escape(document['info']['title'])} {html.escape(document['info']['version'])}</h1>"
        "<p>The same in machine-readable form: <a href=openapi.json>openapi.json</a>.</p>"
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            text = html.escape(operation.get("description", ""))
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{text}</p>")
            parts.append(_fields(_body_schema(operation, schemas)))
    return "".join(parts) + "</html>"


def _body_schema(operation: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    schema: dict[str, Any] = schemas.get(name, {})
    return schema


def _fields(schema: dict[str, Any]) -> str:
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = "" if field.get("default") is None else html.escape(repr(field["default"]))
        needed = "needed" if name in schema.get("required", ()) else default
        kind = html.escape(_kind(field))
        about = html.escape(field.get("description", ""))
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{kind}<td>{needed}<td>{about}")
    return f"<table><tr><th>Field<th>Type<th>Default<th>{''.join(rows)}</table>" if rows else ""


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"] if option.get("type") != "null")
    return str(field.get("type") or field.get("$ref", "").rpartition("/")[2])
